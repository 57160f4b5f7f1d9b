"""Messages between the ranks of a property-based test, and the conclusions that the ranks reach from them.

Every rank draws the examples of such a test itself, from the same seed. At each step (an example has ended, the test
draws more values, ...) each rank sends its step to the others, and all ranks reach the same conclusion. Apart from the
exceptions that stand in for those of other ranks, these are pure functions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

import msgspec
from hypothesis.internal import escalation
from msgspec import Struct

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.serialization import exception_text, mark_repeated, stand_in_type

Outcome = Literal["passed", "stopped", "rejected", "skipped", "failed"]
"""Outcome of an example on one rank: ``stopped`` by Hypothesis's engine, ``rejected`` by ``assume``."""


class Failure(Struct, frozen=True):
    """An exception that ended an example on one rank, in a form that other ranks can show."""

    module: str
    qualname: str
    text: str
    path: str
    line: int
    origin: str
    """Identity of the bug: equal for all failures that Hypothesis counts as the same bug."""


class Opening(Struct, frozen=True, tag_field="kind", tag=True):
    """Step: a test with examples begins."""

    at: float
    """Time on this rank's clock. All ranks use the time of rank 0."""
    name: str
    seed: int | None
    """The seed that this rank would use; None: the suite has fixed it."""
    database: bool
    """True if this rank has a database for failing examples."""
    constants: int
    """Checksum of the constants in the suite's modules, which Hypothesis sometimes draws."""


class Fetch(Struct, frozen=True, tag_field="kind", tag=True):
    """Step: rank 0 reads examples from the database for all ranks."""

    at: float
    examples: list[str]
    """The examples in base64; empty except on rank 0."""


class Draw(Struct, frozen=True, tag_field="kind", tag=True):
    """Step: the body of the test draws more values."""

    at: float
    drawn: str
    """Checksum of all values drawn for the example until now."""
    shown: str
    """The last of these values, as text for messages."""


class ExampleEnd(Struct, frozen=True, tag_field="kind", tag=True):
    """Step: an example has ended."""

    at: float
    drawn: str
    shown: str
    outcome: Outcome
    seconds: float
    targets: dict[str, float]
    """The values that the test has passed to ``target()``, by label."""
    failure: Failure | None = None


class Leave(Struct, frozen=True, tag_field="kind", tag=True):
    """Step: the rank takes no more steps in this test."""

    at: float
    failure: Failure | None


Step = Opening | Fetch | Draw | ExampleEnd | Leave


def to_record(step: Step) -> dict[str, Any]:
    """Return `step` as a dict that can be serialized as JSON."""
    record: dict[str, Any] = msgspec.to_builtins(step)
    return record


def from_record(record: Mapping[str, Any]) -> Step:
    """Return the step that :func:`to_record` serialized as `record`; raise ValueError if `record` is not valid."""
    try:
        step: Step = msgspec.convert(record, Step)
    except msgspec.ValidationError as error:
        raise ValueError(f"a record of another rank is not a step of a test: {error}") from None
    return step


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result of a step, equal on all ranks."""

    outcome: Outcome | Literal["continues", "broken", "left", "different"]
    """The outcome of the example on all ranks, or one of:

    ``continues``: the example, or the test, goes on. ``broken``: an example has failed, or only some ranks skipped it,
    and the ranks cannot continue together. ``left``: a rank takes no more steps. ``different``: the ranks took
    different steps or drew different examples.
    """
    rank: int = 0
    """The rank of `failure`, or the one that rejected the example or left."""
    failure: Failure | None = None
    text: str = ""
    """The difference between the ranks, for messages."""
    targets: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """The time of the slowest rank."""
    slowest: int = 0


def conclude(steps: Sequence[Step]) -> Conclusion:
    """Return the conclusion from the `steps` of all ranks, which are in the order of the ranks.

    An example that fails or is rejected on one rank fails or is rejected on all ranks. A failure has precedence.
    """
    for rank, step in enumerate(steps):
        if isinstance(step, Leave):
            return Conclusion("left", rank, step.failure, f"rank {rank} has ended the test")
    if len({type(step) for step in steps}) == 1 and not isinstance(steps[0], ExampleEnd):
        same = len({_identity(step) for step in steps}) == 1
        return Conclusion("continues") if same else Conclusion("different", text=_differences(steps))
    ends = {rank: step for rank, step in enumerate(steps) if isinstance(step, ExampleEnd)}
    draws = [step for step in steps if isinstance(step, Draw)]
    if len(ends) + len(draws) < len(steps):
        return Conclusion("different", text=_differences(steps))
    return _conclude_example(steps, ends)


def _conclude_example(steps: Sequence[Step], ends: Mapping[int, ExampleEnd]) -> Conclusion:
    """Return the conclusion of an example that has ended on some ranks, while the other ranks draw more values."""
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
    """Return the part of `step` that must be equal on all ranks; None if there is no such part."""
    if isinstance(step, Opening):
        return step.name
    return step.drawn if isinstance(step, (Draw, ExampleEnd)) else None


def _differences(steps: Sequence[Step]) -> str:
    """Return a message about the steps of the ranks, which differ."""
    texts = [_describe(step) for step in steps]
    if len({*texts}) == 1:
        # The texts show only the last values: add the checksums, or the outcomes if the checksums are equal, too.
        in_step = len({_identity(step) for step in steps}) == 1
        details = [step.outcome if in_step and isinstance(step, ExampleEnd) else _identity(step) for step in steps]
        texts = [f"{text} [{detail}]" for text, detail in zip(texts, details, strict=True)]
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    steps_text = "; ".join(f"{ranks_text(numbers)} {text}" for text, numbers in ranks.items())
    return f"the ranks drew different examples ({steps_text}): what a test draws must not depend on the rank"


def _describe(step: Step) -> str:
    """Return the words for `step` in a message, which follow the name of a rank."""
    if isinstance(step, Opening):
        return f"began the examples of {step.name}"
    if isinstance(step, Draw):
        return f"drew {step.shown} and draws more"
    if isinstance(step, ExampleEnd):
        return f"drew {step.shown}"
    return "read the example database"


__hypothesistracebackhide__ = True
"""Makes Hypothesis hide this module's frames in tracebacks, as it hides its own."""

LONGEST_TEXT = 10_000
"""Characters of an exception's text that are sent to other ranks, and of an example in a report."""


def failure_of(error: BaseException) -> Failure:
    """Return the description of `error` that is sent to other ranks."""
    path, line, frame = __file__, 1, error.__traceback__
    while frame is not None:
        path, line, frame = frame.tb_frame.f_code.co_filename, frame.tb_lineno or 1, frame.tb_next
    try:
        origin = str(escalation.InterestingOrigin.from_exception(error))
    except Exception:  # The exception's context may contain objects of any kind.
        origin = f"{type(error).__qualname__} {path}:{line}"
    kind = type(error)
    return Failure(
        kind.__module__, kind.__qualname__, exception_text(error)[:LONGEST_TEXT], path, line, origin[:LONGEST_TEXT]
    )


def stand_in(found: Conclusion) -> BaseException:
    """Return an exception that stands in for the failure of another rank."""
    failure = found.failure
    assert failure is not None
    text = f"failed on rank {found.rank}: {failure.qualname}: {failure.text}"
    error = _type_of(failure.module, failure.qualname, failure.origin)(text)
    mark_repeated(error, found.rank)
    return error


@functools.cache
def _type_of(module: str, qualname: str, origin: str) -> type[BaseException]:
    """Return an exception type, the same one for the same bug: Hypothesis distinguishes bugs by type and place.

    `origin` identifies the bug. It is used only as part of the cache's key.
    """
    return stand_in_type(module, qualname, Exception)


def raise_at(error: BaseException, path: str, line: int) -> None:
    """Raise `error` so that its traceback ends at line `line` of the file `path`, such as where another rank failed."""
    __tracebackhide__ = True
    exec(_raise_statement(path, line), {"error": error})


@functools.cache
def _raise_statement(path: str, line: int) -> CodeType:
    """Return the code of ``raise error`` with `path` and `line` as its place."""
    return compile("raise error", path, "exec").replace(co_firstlineno=line)


def add_note(error: BaseException, text: str) -> None:
    """Add `text` to the report of `error`, as `BaseException.add_note` does, which Python has since 3.11."""
    vars(error).setdefault("__notes__", []).append(text)
