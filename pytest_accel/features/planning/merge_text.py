"""The text about the jobs of a pipeline for people. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from pytest_accel.core.needs import Needs
from pytest_accel.core.terminal_lines import escaped
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.planning.census_file import DevicesThere, Outcome, Status
from pytest_accel.features.planning.job_merge import Jobs, Merged


def text(merged: Merged, allow: str | None) -> str:
    """Return one line if all is well, else the list of what is not. `allow` is the name of the file of ``--allow``."""
    return "\n".join(map(escaped, _lines(merged, allow)))


def _lines(merged: Merged, allow: str | None) -> Iterator[str]:
    count = sum(not census.collect_only for census in merged.jobs.values())
    incomplete = [name for name, census in merged.jobs.items() if not census.complete and not census.collect_only]
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
    alike = {need._replace(kind="none", backend=()) for need in needs}
    kinds = {need.kind for need in needs} - {"none"}
    if len(alike) == 1 and len(kinds) <= 1 and len(there) == len(missing) and _is_short(needs[0], there):
        counts = ", ".join(map(str, sorted({one.devices for one in there})))
        jobs = "the job" if len(there) == 1 else "the jobs"
        return [f"needs {_in_words(needs[0], next(iter(kinds), None))}; {jobs} had {counts}"]
    return sorted({outcome.reason or "missing hardware" for outcome in missing.values()})


def _is_short(need: Needs, there: Iterable[DevicesThere]) -> bool:
    """Return whether each of the jobs had fewer devices than a test needs, so that the numbers explain the skips."""
    return need.share == 1 and need.nodes == 1 and all(one.devices < need.devices for one in there)


def _in_words(need: Needs, kind: str | None) -> str:
    """Return `need` as text: ``8 cuda devices with >= 40 GiB``. `kind` is the kind of the devices, None if unknown."""
    words = [str(need.devices), *([kind] if kind else []), "device" if need.devices == 1 else "devices"]
    return (
        " ".join(words)
        + (f" with >= {format_memory(need.memory)}" if need.memory else "")
        + (f" for {need.world_size} ranks" if need.world_size not in (1, need.devices) else "")
    )
