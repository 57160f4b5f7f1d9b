"""What the ranks of a property-based test tell each other, and what they conclude from it: pure.

Every rank draws the examples of such a test itself, all from one seed. At each step (an example has ended, a test
draws more, ...) each tells the others what it does, and all come to the same conclusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_accel.core.rank_names import ranks_text

Outcome = Literal["passed", "stopped", "rejected", "skipped", "failed"]
"""How an example ended on one rank: ``stopped`` by the generator of examples, ``rejected`` by ``assume``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended an example on one rank, as the other ranks can show it."""

    module: str
    qualname: str
    text: str
    path: str
    line: int
    origin: str
    """Equal for failures that are the same bug."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A test with examples begins."""

    at: float
    """The rank's clock; all ranks go by that of rank 0."""
    name: str
    seed: int | None
    """From which the rank would draw; None: the suite has fixed it."""
    database: bool
    """Whether the rank would keep failing examples."""
    constants: int
    """A checksum of the constants in the suite's modules, which the generator draws now and then."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Examples are read from the database, by rank 0 for all."""

    at: float
    examples: list[str]


@dataclass(frozen=True, slots=True)
class Draw:
    """The body of the test draws more."""

    at: float
    drawn: str
    """Equal for the same draws until now."""
    shown: str
    """The last of them, for people."""


@dataclass(frozen=True, slots=True)
class End:
    """An example has ended."""

    at: float
    drawn: str
    shown: str
    outcome: Outcome
    seconds: float
    targets: dict[str, float]
    """What the test has told ``target()``."""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """The rank takes no more steps in this test."""

    at: float
    failure: Failure | None


Step = Opening | Fetch | Draw | End | Leave
_KINDS: Mapping[str, type[Step]] = {kind.__name__: kind for kind in (Opening, Fetch, Draw, End, Leave)}


def to_record(step: Step) -> dict[str, Any]:
    """Return `step` as JSON has it."""
    return {"kind": type(step).__name__, **asdict(step)}


def from_record(record: Mapping[str, Any]) -> Step:
    """Return the step that `record` is of; ValueError if it is of none."""
    fields = dict(record)
    kind = _KINDS.get(str(fields.pop("kind", None)))
    try:
        if kind is None:
            raise TypeError("unknown kind")
        if isinstance(failure := fields.get("failure"), dict):
            fields["failure"] = Failure(**failure)
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"a record of another rank is no step of a test: {error}") from None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What all ranks do after a step."""

    outcome: Outcome | Literal["goes on", "broken", "left", "different"]
    """``broken``: the example has failed and the ranks cannot go on together; ``left``: a rank takes no more steps."""
    rank: int = 0
    """The rank that `failure` is of."""
    failure: Failure | None = None
    text: str = ""
    """What the ranks do differently."""
    targets: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """The time of the slowest rank."""
    slowest: int = 0


def conclude(steps: Sequence[Step]) -> Conclusion:
    """Return what follows from the `steps` of all ranks, in their order.

    Failed anywhere is failed everywhere, and rejected anywhere is rejected everywhere; a failure comes first.
    """
    for rank, step in enumerate(steps):
        if isinstance(step, Leave):
            return Conclusion("left", rank, step.failure, f"rank {rank} has ended the test")
    if len({type(step) for step in steps}) == 1 and not isinstance(steps[0], End):
        same = len({_identity(step) for step in steps}) == 1
        return Conclusion("goes on") if same else Conclusion("different", text=_differences(steps))
    ends = {rank: step for rank, step in enumerate(steps) if isinstance(step, End)}
    draws = [step for step in steps if isinstance(step, Draw)]
    if len(ends) + len(draws) < len(steps):
        return Conclusion("different", text=_differences(steps))
    return _conclude_example(steps, ends)


def _conclude_example(steps: Sequence[Step], ends: Mapping[int, End]) -> Conclusion:
    """Return the conclusion of an example that has ended on some ranks, while the test draws more on the others."""
    ranks: dict[Outcome, list[int]] = {}
    for rank, end in ends.items():
        ranks.setdefault(end.outcome, []).append(rank)
    in_step = len({_identity(step) for step in steps}) == 1 and (len(ranks) == 1 or "stopped" not in ranks)
    if "failed" in ranks:
        rank = ranks["failed"][0]
        return Conclusion("failed" if in_step else "broken", rank, ends[rank].failure)
    if not in_step:
        return Conclusion("different", text=_differences(steps))
    if "skipped" in ranks:
        if len(ranks["skipped"]) == len(steps):
            return Conclusion("skipped")
        ran = [rank for rank in range(len(steps)) if rank not in ranks["skipped"]]
        text = f"the ranks disagree about an example: {ranks_text(ranks['skipped'])} skipped, {ranks_text(ran)} ran"
        return Conclusion("broken", text=text)
    if "rejected" in ranks:
        return Conclusion("rejected", ranks["rejected"][0])
    if len(ends) < len(steps):
        return Conclusion("different", text=_differences(steps))
    targets: dict[str, float] = {}
    for end in ends.values():
        for label, value in end.targets.items():
            targets[label] = max(value, targets.get(label, value))
    slowest = max(ends, key=lambda rank: ends[rank].seconds)
    outcome: Outcome = "stopped" if "stopped" in ranks else "passed"
    return Conclusion(outcome, targets=targets, seconds=ends[slowest].seconds, slowest=slowest)


def _identity(step: Step) -> object:
    if isinstance(step, Opening):
        return step.name
    return step.drawn if isinstance(step, (Draw, End)) else None


def _differences(steps: Sequence[Step]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, step in enumerate(steps):
        ranks.setdefault(_describe(step), []).append(rank)
    if len(ranks) == 1:  # They differ in what is not shown of them.
        ranks = {f"{_describe(step)} [{_identity(step)}]": [rank] for rank, step in enumerate(steps)}
    said = "; ".join(f"{ranks_text(those)} {what}" for what, those in ranks.items())
    return f"the ranks drew different examples ({said}): what a test draws must not depend on the rank"


def _describe(step: Step) -> str:
    if isinstance(step, Opening):
        return f"began the examples of {step.name}"
    if isinstance(step, Draw):
        return f"drew {step.shown} and draws more"
    if isinstance(step, End):
        return f"drew {step.shown}"
    return "read the example database"
