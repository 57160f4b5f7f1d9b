"""The comparison of a pipeline's jobs: the tests that ran in none of them, and the text about them. Pure functions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from pytest_accel.core.record_events import DevicesThere, MissingNeed, Outcome, Status, TestsCounted
from pytest_accel.core.terminal_lines import escaped
from pytest_accel.core.units import count_text, format_memory

Jobs = Mapping[str, TestsCounted]
"""The outcomes of the tests of each job of a pipeline, by the name of its record."""
RAN = (Status.FAILED, Status.ERROR, Status.XPASSED, Status.PASSED, Status.XFAILED)
"""The statuses of a test that was started and has a verdict."""


@dataclass(frozen=True, slots=True)
class AllowedLine:
    """One line of the file of ``--allow``."""

    number: int
    pattern: str
    """A node id, in which ``*`` stands for any characters and ``?`` for one."""

    def matcher(self) -> Callable[[str], bool]:
        """Return a function that says whether the line allows a node id."""
        # A parametrized id has brackets, which are no wildcards here.
        compiled = re.compile(fnmatch.translate(self.pattern.replace("[", "[[]")))
        return lambda nodeid: nodeid == self.pattern or compiled.match(nodeid) is not None


@dataclass(frozen=True, slots=True)
class StaleLine:
    """A line of the file of ``--allow`` that has to be removed or changed."""

    line: AllowedLine
    ran: Mapping[str, str]
    """The tests of the line that ran, each with the name of a job in which it did; empty if the line has no test."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The tests of all jobs."""

    jobs: Jobs
    tests: int
    """Number of tests in any job, including files that every job skipped as a whole."""
    not_run: Mapping[str, Mapping[str, Outcome]]
    """The tests that ran in no job and are not allowed to: their outcomes by job, by node id."""
    allowed: frozenset[str]
    """The tests that ran in no job, as they are allowed to."""
    stale: tuple[StaleLine, ...]

    @property
    def is_proof(self) -> bool:
        """True if there are tests, each ran in a job or is allowed not to, and no line of the list is stale."""
        return bool(self.tests) and not self.not_run and not self.stale


def merge(jobs: Jobs, allow: Sequence[AllowedLine] = ()) -> Merged:
    """Return what became of the tests of `jobs`."""
    outcomes: dict[str, dict[str, Outcome]] = {}
    for job, census in jobs.items():
        for nodeid, outcome in census.tests.items():
            outcomes.setdefault(nodeid, {})[job] = outcome
    for nodeid, found in _files_without_tests(jobs, outcomes).items():
        outcomes[nodeid] = found
    ran = {
        nodeid: next(job for job, outcome in found.items() if outcome.status in RAN)
        for nodeid, found in outcomes.items()
        if any(outcome.status in RAN for outcome in found.values())
    }
    allowed: set[str] = set()
    stale: list[StaleLine] = []
    for line in allow:
        matches = set(filter(line.matcher(), outcomes))
        if not matches or matches & ran.keys():
            stale.append(StaleLine(line, {nodeid: ran[nodeid] for nodeid in sorted(matches & ran.keys())}))
        allowed |= matches - ran.keys()
    not_run = {nodeid: found for nodeid, found in sorted(outcomes.items()) if nodeid not in ran.keys() | allowed}
    return Merged(jobs, len(outcomes), not_run, frozenset(allowed), tuple(stale))


def _files_without_tests(jobs: Jobs, nodeids: Iterable[str]) -> dict[str, dict[str, Outcome]]:
    """Return the outcomes by job of each file whose tests no job has collected, because jobs skipped the file."""
    skipped: dict[str, dict[str, Outcome]] = {}
    for job, census in jobs.items():
        for nodeid, reason in census.skipped_files.items():
            skipped.setdefault(nodeid, {})[job] = Outcome(Status.SKIPPED, reason)
    parents = {parent for nodeid in nodeids for parent in _parents(nodeid)} if skipped else set()
    return {nodeid: found for nodeid, found in skipped.items() if nodeid not in parents}


def _parents(nodeid: str) -> Iterable[str]:
    """Return `nodeid` and the ids of all files, classes and folders that it is in."""
    return [nodeid, *(nodeid[: match.start()] for match in re.finditer("/|::", nodeid))]


def parse_allow(text: str) -> list[AllowedLine]:
    """Return the lines of a file of ``--allow``. Comments begin with ``#`` at the start of a line or after a space."""
    lines = [re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in text.splitlines()]
    return [AllowedLine(number, line) for number, line in enumerate(lines, 1) if line]


def text(merged: Merged, allow: str | None) -> str:
    """Return one line if all is well, else the list of what is not. `allow` is the name of the file of ``--allow``."""
    return "\n".join(map(escaped, _lines(merged, allow)))


def _lines(merged: Merged, allow: str | None) -> Iterator[str]:
    count = sum(not one.collect_only for one in merged.jobs.values())
    incomplete = [name for name, one in merged.jobs.items() if not one.complete and not one.collect_only]
    if not merged.tests:
        yield f"no test was collected in {count_text(count, 'job')}"
    elif merged.is_proof:
        ran = merged.tests - len(merged.allowed)
        line = (
            f"{ran} of {count_text(merged.tests, 'test')} ran in {'the job' if count == 1 else f'one of {count} jobs'}"
        )
        line += f"; {len(merged.allowed)} did not, as {allow} allows" if merged.allowed else ""
        yield line + (f"; not complete: {', '.join(incomplete)}" if incomplete else "")
        return
    if merged.not_run:
        where = "did not run in the job" if count == 1 else f"ran in none of {count} jobs"
        yield f"{len(merged.not_run)} of {count_text(merged.tests, 'test')} {where}"
    by_cause = sorted((_causes(found, merged.jobs), nodeid) for nodeid, found in merged.not_run.items())
    for causes, group in groupby(by_cause, key=lambda pair: pair[0]):
        yield ""
        yield from causes
        yield from (f"    {nodeid}" for _, nodeid in group)
    if merged.stale:
        yield ""
        yield f"{allow} is out of date:"
    for stale in merged.stale:
        where = f"    line {stale.line.number}: {stale.line.pattern}: "
        if not stale.ran:
            yield f"{where}there is no such test in any job"
        for nodeid, job in stale.ran.items():
            yield f"{where}{nodeid} ran in {job}" if nodeid != stale.line.pattern else f"{where}ran in {job}"
    if incomplete:
        yield ""
        yield f"not complete, so that tests may be unknown or not run: {', '.join(incomplete)}"


def _causes(found: Mapping[str, Outcome], jobs: Jobs) -> tuple[str, ...]:
    """Return why a test with the outcomes `found` (by job) ran in no job, in lines."""
    missing = {job: outcome for job, outcome in found.items() if outcome.status is Status.MISSING}
    reasons = sorted({str(outcome.reason) for outcome in found.values() if outcome.status is Status.SKIPPED})
    deselected = [job for job, outcome in found.items() if outcome.status is Status.DESELECTED]
    not_run = [job for job, outcome in found.items() if outcome.status is Status.NOT_RUN]
    collected = [job for job in not_run if jobs[job].collect_only]
    unfinished = [job for job in not_run if job not in collected]
    lines = [
        *_missing_causes(missing),
        *(f"skipped: {reason}" for reason in reasons),
        *([f"not run before the session ended: {', '.join(unfinished)}"] if unfinished else []),
        *([f"deselected: {', '.join(deselected)}"] if deselected else []),
    ]
    return tuple(lines) or (f"collected only: {', '.join(collected)}",)


def _missing_causes(missing: Mapping[str, Outcome]) -> list[str]:
    """Return what a test needs and what the jobs had: in one line if only the number of devices is too small."""
    needs = [outcome.need for outcome in missing.values() if outcome.need is not None]
    there = [outcome.there for outcome in missing.values() if outcome.there is not None]
    # The kind and its backend depend on the session, unless the marks name them.
    alike = {msgspec.structs.replace(need, kind="none", backend=()) for need in needs}
    kinds = {need.kind for need in needs} - {"none"}
    if len(alike) == 1 and len(kinds) <= 1 and len(there) == len(missing) and _is_short(needs[0], there):
        counts = ", ".join(map(str, sorted({one.devices for one in there})))
        jobs = "the job" if len(there) == 1 else "the jobs"
        return [f"needs {_in_words(needs[0], next(iter(kinds), None))}; {jobs} had {counts}"]
    return sorted({outcome.reason or "missing hardware" for outcome in missing.values()})


def _is_short(need: MissingNeed, there: Iterable[DevicesThere]) -> bool:
    """Return whether each of the jobs had fewer devices than a test needs, so that the numbers explain the skips."""
    return need.share == 1 and need.nodes == 1 and all(one.devices < need.devices for one in there)


def _in_words(need: MissingNeed, kind: str | None) -> str:
    """Return `need` as text: ``8 cuda devices with >= 40 GiB``. `kind` is the kind of the devices, None if unknown."""
    words = [str(need.devices), *([kind] if kind else []), "device" if need.devices == 1 else "devices"]
    return (
        " ".join(words)
        + (f" with >= {format_memory(need.memory)}" if need.memory else "")
        + (f" for {need.world_size} ranks" if need.world_size not in (1, need.devices) else "")
    )
