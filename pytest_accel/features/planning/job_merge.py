"""The comparison of a pipeline's jobs: the tests that ran in none of them, and the list of allowed ones. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_accel.features.planning.census_file import Census, Outcome, Status

Jobs = Mapping[str, Census]
"""The censuses of a pipeline by the names of their files."""


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
        nodeid: next(job for job, outcome in found.items() if outcome.status.has_run)
        for nodeid, found in outcomes.items()
        if any(outcome.status.has_run for outcome in found.values())
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
