"""The comparison of a pipeline's jobs: the tests that ran in none of them, and the text about them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from pytest_accel.core.units import count_text
from pytest_accel.features.record.record_file import RecordError, read_record
from pytest_accel.features.record.session_summary import escaped
from pytest_accel.features.record.timeline import TestRun, sessions_of

RAN = ("failed", "error", "xpassed", "passed", "xfailed")
"""The statuses of a test that was started and has a verdict."""
_STRONGEST_FIRST = (*RAN, "missing hardware", "skipped", "not run", "deselected")
"""All statuses. If a test ran several times, the status counts that comes first here."""


class Outcome(NamedTuple):
    """The outcome of a test in one job."""

    status: str
    reason: str = ""
    """Why the test was skipped."""


class JobTests(NamedTuple):
    """The tests of one job, and the files and packages that were skipped as a whole, by node id."""

    tests: Mapping[str, Outcome]
    complete: bool
    """False if some tests are unknown."""


def read_job(path: str) -> JobTests:
    """Return the tests of the session with the record `path`. Raise :class:`RecordError` if the session was killed."""
    (session,) = sessions_of([read_record(path)])
    if (collected := session.collected) is None:
        raise RecordError(f"{path} does not say what became of each test: its session was killed before it ended")
    copies = Counter(collected.tests)
    runs: dict[str, list[Outcome]] = {test: [] for test in copies}
    for run in session.tests:
        # xdist appends the group of a test to its id (`--dist loadgroup`).
        test = run.test if run.test in copies else run.test.rpartition("@")[0]
        if (outcome := _outcome(run)) is not None and test in runs:
            runs[test].append(outcome)
    tests = {file: Outcome("skipped", reason) for file, reason in collected.skipped_files.items()}
    tests |= {test: Outcome("deselected") for test in collected.deselected}
    for test, found in runs.items():
        # If several tests have one id, all must have run.
        found += [Outcome("not run")] * copies[test]
        tests[test] = sorted(found, key=lambda one: _STRONGEST_FIRST.index(one.status))[copies[test] - 1]
    return JobTests(tests, collected.complete)


def _outcome(run: TestRun) -> Outcome | None:
    """Return the outcome of a run; None if it has no verdict, or a plugin repeats it."""
    verdict = run.verdict
    if run.missing:
        return Outcome("missing hardware", run.missing)
    if verdict == "xfailed" and all(phase.when != "call" for phase in run.phases):
        # xfail(run=False), or a fixture that fails as expected. pytest 8 puts "reason: " in front.
        reason = next((phase.xfail for phase in run.phases if phase.xfail), "").removeprefix("reason: ")
        return Outcome("skipped", reason or "expected failure in setup")
    return None if verdict in ("unfinished", "rerun") else Outcome(verdict, run.skip)


def parse_allow(text: str) -> list[str]:
    """Return the pattern of each line of a file of ``--allow``.

    Comments begin with ``#`` at the start of a line or after a space. In a pattern, ``*`` stands for any characters and
    ``?`` for one.
    """
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def compare(jobs: Mapping[str, JobTests], allow: Sequence[str], allow_file: str) -> tuple[bool, str]:
    """Return whether there are tests and each has run in a job, or is allowed not to, and the text about it.

    `jobs` have the names of their records. `allow` has the patterns of `allow_file`; none may be out of date.
    """
    tests: dict[str, dict[str, Outcome]] = {}
    for name, job in jobs.items():
        for test, outcome in job.tests.items():
            tests.setdefault(test, {})[name] = outcome
    # A file that a job has skipped as a whole counts if no job has collected tests of it.
    collected = {test[: match.start()] for test in tests if "::" in test for match in re.finditer("/|::", test)}
    tests = {test: found for test, found in tests.items() if test not in collected}
    # The first job counts, so it is set last.
    ran = {test: name for test, found in tests.items() for name, one in reversed(found.items()) if one.status in RAN}
    allowed: set[str] = set()
    stale: list[str] = []
    for pattern in allow:
        # A parametrized id has brackets, which are no wildcards here.
        matches = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
        found_tests = sorted(test for test in tests if test == pattern or matches(test))
        allowed.update(test for test in found_tests if test not in ran)
        about = [f"{test} ran in {ran[test]}" for test in found_tests if test in ran]
        about = about if found_tests else ["there is no such test in any job"]
        stale += [f"    {pattern}: {text}" for text in about]
    not_run = {test: found for test, found in sorted(tests.items()) if test not in ran and test not in allowed}
    is_proof = bool(tests) and not not_run and not stale
    lines = list(_lines(len(jobs), len(tests), len(allowed), not_run))
    lines[0] += f"; {len(allowed)} did not, as {allow_file} allows" if is_proof and allowed else ""
    lines += ["", f"{allow_file} is out of date:", *stale] if stale else []
    if incomplete := [name for name, job in jobs.items() if not job.complete]:
        lines += ["", f"not all tests were collected: {', '.join(incomplete)}"]
    return is_proof, "\n".join(map(escaped, lines))


def _lines(jobs: int, tests: int, allowed: int, not_run: Mapping[str, Mapping[str, Outcome]]) -> Iterator[str]:
    if not tests:
        yield f"no test was collected in {count_text(jobs, 'job')}"
    elif not not_run:
        where = "the job" if jobs == 1 else f"one of {jobs} jobs"
        yield f"{tests - allowed} of {count_text(tests, 'test')} ran in {where}"
    else:
        where = "did not run in the job" if jobs == 1 else f"ran in none of {jobs} jobs"
        yield f"{len(not_run)} of {count_text(tests, 'test')} {where}"
    by_cause = sorted((_causes(found), test) for test, found in not_run.items())
    for causes, group in groupby(by_cause, key=lambda pair: pair[0]):
        yield ""
        yield from causes
        yield from (f"    {test}" for _, test in group)


def _causes(found: Mapping[str, Outcome]) -> list[str]:
    """Return why a test with the outcomes `found` (by job) ran in no job, in lines."""
    by_cause: dict[Outcome, list[str]] = {}
    for name, outcome in found.items():
        by_cause.setdefault(outcome, []).append(name)
    return [f"{': '.join(filter(None, cause))} ({', '.join(names)})" for cause, names in sorted(by_cause.items())]
