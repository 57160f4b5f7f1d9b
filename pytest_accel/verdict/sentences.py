"""All sentences about ranks that a user reads: in reports of failures, on the terminal, and in the session's summary.

The other modules have causes, outcomes and records as data, and ask this module for the text when a report is made.
Pure functions, except that the source lines at which ranks stand are read from their files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from pytest_accel.compat.pytest_shims import reason_of_skip
from pytest_accel.core.frames import PACKAGE, Folders
from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import DEFAULT_GROUP, cut_end, cut_gloo, group_label, ranks_text
from pytest_accel.diagnostics.collectives import GroupWait, lacking, unlike, waiting_in, waits
from pytest_accel.diagnostics.outside_errors import Interrupted, OutsideError, RankProblem
from pytest_accel.diagnostics.python_stacks import frames_of_rank, has_finished, stack_text, threads_text, where
from pytest_accel.diagnostics.rank_state import Hang, HangCause, RankOutcome
from pytest_accel.messages.flight_record import FlightRecord, RankWait
from pytest_accel.messages.rank_messages import (
    ExceptionSketch,
    ExitCause,
    ExitRequest,
    ExpectedEnd,
    Finished,
    Leak,
    LeakKind,
    RankExit,
    When,
    exited,
)
from pytest_accel.verdict.causes import Consequence, consequence
from pytest_accel.verdict.mismatches import uneven_collectives, uneven_groups

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_WIDTH = 200
"""Characters of a line. Longer lines are truncated."""
ALONE = "the test's process"
"""The name of the only rank of a test in its message."""
_MORE_LINES = 6
"""Lines of a rank's failure message that are shown after the first."""
_MISSING_FIXTURE = (pytest.FixtureLookupError.__module__, pytest.FixtureLookupError.__qualname__)

COULD_RUN = "could run the test"
"""Text on a rank that could run the test, in the report of a rank that could not."""

# Why a world is killed although its test has passed

OTHER_GROUPS = "some ranks have process groups that others have not"
UNMET_MESSAGES = "a message between ranks (send, recv) has not been received, or has not been sent"

# The end of a rank

_OUT_OF_MEMORY = "out of memory (the oom_kill counter of the control group went up)"
_EXITS = {
    ExitCause.SERVER_ENDED: "ended with the fork server, which is gone",
    ExitCause.MACHINE_LOST: "lost with the machine",
    ExitCause.JOB_ENDED: "ended with its MPI job, since a rank has called MPI_Abort or has died",
}
_LOST_CONNECTION = "lost its connection to the driver (exit status unknown)"
"""The predicate of a rank that died, and whose end is unknown."""
_SILENT = "not respond to signals"
_EVENTS = {
    "died": "died",
    "hung": "timed out",
    "unstarted": "could not run the test",
    "failed": "failed",
    "skipped": "skipped",
    "passed": "finished the call",
}
"""Words for the end of a rank, by its kind."""


def describe_exit(end: RankExit, be: str = "") -> str:
    """Return the predicate of a sentence about a rank that ended like this: ``exited with status 3``.

    `be` (``was`` or ``were``) is put before a participle such as ``killed``; leave it empty for a list.
    """
    be = f"{be} " if be else ""
    if end.cause in _EXITS:
        text = f"{be if end.cause is ExitCause.MACHINE_LOST else ''}{_EXITS[end.cause]}"
        return f"{text} {end.about}" if end.about else text
    assert end.status is not None
    text = f"exited with status {end.status}" if end.status >= 0 else f"{be}killed by {signal_name(-end.status)}"
    return f"{text}: {_OUT_OF_MEMORY}" if end.cause is ExitCause.OUT_OF_MEMORY else text


def describe_hang(hang: Hang, be: str = "was") -> str:
    """Return the predicate of a rank that hung: ``timed out after 5 s``, ``was stopped 3 s after rank 1 failed``.

    `be` is the verb for one rank or for several.
    """
    match hang.cause:
        case HangCause.PHASE_TIMEOUT:
            phase = f" in the {hang.when} phase" if hang.when != "call" else ""
            return f"timed out{phase} after {hang.seconds:g} s"
        case HangCause.START_TIMEOUT:
            return f"did not become ready within {hang.seconds:g} s"
        case HangCause.COLLECTION_TIMEOUT:
            return f"did not import and collect the test's file within {hang.seconds:g} s"
        case HangCause.OTHER_RANK:
            assert hang.event is not None
            event = _EVENTS.get(hang.event.ending, "ended")
            return f"{be} stopped {hang.seconds:g} s after rank {hang.event.rank} {event}"
        case HangCause.DEADLOCK:
            return f"{be} in a deadlock"


def session_end(request: ExitRequest, test: str) -> str:
    """Return why the session ends, as a rank has requested in `test`, the id of a test."""
    return f"{request.reason} ({test}, rank {request.rank} at {request.place})"


def exit_request(reason: str) -> str:
    """Return the predicate of a rank in which ``pytest.exit`` was called."""
    return f"asked for the end of the session: {reason}"


def describe_end(end: RankOutcome, *, named: bool = True) -> str:
    """Return a sentence on the end of a rank: why its world is killed, for the record. `named`: it names the rank."""
    how = _describe_death(end) if end.hang is None else describe_hang(end.hang)
    return f"rank {end.rank} {how}" if named else how


def late_teardowns(errors: Mapping[int, str]) -> list[str]:
    """Return a text for each of the `errors` by rank in the teardown of fixtures after the last test of a world.

    The first line names the error.
    """
    ranks = _grouped((error.partition("\n"), rank) for rank, error in errors.items())
    why = "fixtures were torn down after this test, since its processes are replaced"
    return [f"{ranks_text(same)}: {first} ({why})\n{rest}" for (first, _, rest), same in ranks.items()]


def problem_lines(problem: RankProblem | str) -> str:
    """Return the text of an error outside of any test."""
    if isinstance(problem, str):
        return problem
    end = "" if problem.exit is None else describe_exit(problem.exit, "was")
    match problem.error:
        case OutsideError.DIED_BETWEEN_TESTS:
            what = f"{end} after its last test had passed"
        case OutsideError.DIED_IN_TEARDOWN:
            what = f"{end} before the end of its session"
        case OutsideError.NOT_TORN_DOWN:
            what = "was killed by SIGKILL and may not have torn down its session fixtures"
        case OutsideError.FAILED_BY_HOOK:
            what = (
                "has ended its session with a failing exit status although no test had failed in it: a hook has set it "
                "(session.exitstatus in pytest_sessionfinish)"
            )
        case OutsideError.NOT_ENDED:
            frame = where(frames_of_rank(problem.stack))
            place = f"; it was at {frame.where(Folders())}" if frame is not None else ""
            what = f"did not end its session within {problem.seconds:.0f} s and was killed{place}"
    about = f"rank {problem.rank} of a world of {problem.size} {what}"
    return "\n".join(filter(None, (about, stack_text(problem.stack, Folders()), problem.output)))


# The message of a failure


def failure_message(
    root: RankOutcome,
    ranks: Sequence[int],
    size: int,
    outcomes: Sequence[RankOutcome],
    when: When,
    records: Mapping[int, FlightRecord],
    folders: Folders,
) -> tuple[str, list[str]]:
    """Return the summary line and the text for `ranks`, which ended like `root` and did not report it themselves.

    `size` is the number of ranks of the world.
    """
    who = ranks_text(ranks) if size > 1 else ALONE
    if root.hang is not None and root.hang.cause in (HangCause.PHASE_TIMEOUT, HangCause.DEADLOCK):
        ends = [one.later or one for one in outcomes]
        hung = [one for one in ends if one.hang is not None and one.hang.cause is root.hang.cause]
        message = _describe_timeout(outcomes, hung, size, records, folders)
        return message, [message]
    if root.hang is not None:
        message = f"{who}: {_describe_stop(root, folders, len(ranks))}"
        return message, [message]
    if root.headline:
        return f"{who}: {root.headline}", root.text.splitlines()
    if root.ending == "unstarted":
        *before, last = root.text.strip().splitlines() or [f"it sent no report of the {when} phase"]
        message = f"{who} could not run the test: {last}"
        return message, root.text.splitlines() if before else [message]
    if root.ending == "failed":
        first, *rest = root.text.splitlines()
        message = f"{who} failed in the {when} phase: {first}"
        return message, [message, *rest]
    when = root.when or when
    phase = f" in the {when} phase" if when != "call" else ""
    if when == "call" and root.exit == exited(0):  # Status 0 alone would read like a success.
        phase = f" before {'it' if len(ranks) == 1 else 'they'} had finished the test"
    be = "was" if len(ranks) == 1 else "were"
    message = f"{who} {_describe_death(root, be)}{phase}{_place(root, folders)}"
    return message, [message]


# The ends that a test has announced


def announcement(ends: Sequence[ExpectedEnd]) -> str:
    """Return a clause on the announced `ends`: ``announced: rank 1 exits with status 7``."""
    return f"announced: {', '.join(map(_describe_announced, ends)) or 'nothing'}"


def _describe_announced(end: ExpectedEnd) -> str:
    if end.status is not None:
        how = f"exits with status {end.status}" if end.status >= 0 else f"is killed by {signal_name(-end.status)}"
    elif end.after is not None:
        how = f"hangs for {end.after:g} s"
    elif end.text is not None:
        how = f"fails with an error of its device{f' with the text {end.text!r}' if end.text else ''}"
    else:
        return "the ranks issue different numbers of collectives"
    return f"rank {end.rank} {how}"


def no_agreement(announced: Sequence[Sequence[ExpectedEnd]]) -> str:
    """Return the message for announcements that are not the same on all ranks, or leave no rank to report."""
    each = [f"rank {rank} {announcement(ends)}" for rank, ends in enumerate(announced)]
    return f"the ranks must announce the same ends, and leave a rank to report: {'; '.join(each)}"


def missing_faults(faults: Mapping[int, Sequence[str]]) -> str:
    """Return the message for planned faults that have not come, by rank."""
    each = "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in faults.items())
    return f"planned faults have not come in the test's own thread: {each}"


def disagreement(outcomes: Sequence[RankOutcome], when: When, *, is_subtest: bool) -> str:
    """Return the message for a phase or subtest that some ranks skipped, or did not report, and others ran."""
    did = {"passed": "ran", "hung": "ran"}
    ranks = _grouped(
        (one.text if one.ending == "absent" else did.get(one.ending, one.ending), one.rank)
        for one in sorted(outcomes, key=lambda one: (one.ending != "skipped", one.ending != "absent"))
    )
    where = "this subtest" if is_subtest else f"the {when} phase"
    return f"the ranks disagree in {where}: {', '.join(f'{ranks_text(who)} {what}' for what, who in ranks.items())}"


def failed_subtests(numbers: Mapping[str, int]) -> str:
    """Return the message for failed subtests and checks; `numbers` has how many there are of each, by this word."""
    parts = [f"{number} failed {what}{'s' if number > 1 else ''}" for what, number in numbers.items()]
    return f"contains {' and '.join(parts)}"


# The end of a test


def uneven_collectives_lines(finished: Mapping[int, Finished]) -> list[str]:
    """Return a line for each process group in which the ranks issued different numbers of collectives."""
    return [
        f"the ranks issued different numbers of collectives in {group_label(name)} ({ranks_text(members)}), "
        f"counted since the group was made: {_by_rank(numbers)}"
        for (name, members), numbers in uneven_collectives(finished).items()
    ]


def uneven_groups_lines(finished: Mapping[int, Finished]) -> list[str]:
    """Return a line if the ranks made different numbers of process groups."""
    if not (numbers := uneven_groups(finished)):
        return []
    return [
        f"the ranks made different numbers of process groups: {_by_rank(numbers)}; every rank must call "
        "dist.new_group, also one that is no member, unless use_local_synchronization=True"
    ]


def _by_rank(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {number}" for rank, number in sorted(numbers.items()))


def unawaited_lines(finished: Mapping[int, Finished], folders: Folders) -> list[str]:
    """Return lines on collectives that a test has not waited for, and that did not succeed."""
    ranks = _grouped((one, rank) for rank, message in sorted(finished.items()) for one in message.unawaited)
    return [
        f"{ranks_text(unsure)}: {one.function} at {folders.shown(one.path)}:{one.line}, for which the test did not "
        f"wait, {'has not completed' if one.error is None else f'failed: {one.error}'}"
        for one, unsure in ranks.items()
    ]


def leak_lines(finished: Mapping[int, Finished]) -> list[str]:
    """Return a line for each leak of a test, with the ranks in which it occurred, and what was done about it."""
    ranks = _grouped((leak, rank) for rank, message in sorted(finished.items()) for leak in message.leaks)
    return [f"{ranks_text(leaking)} {_describe_leak(leak)}{_remedy(leak)}" for leak, leaking in ranks.items()]


def _describe_leak(leak: Leak) -> str:
    match leak.kind:
        case LeakKind.SETTING:
            text = f"left {leak.name} changed from {leak.old} to {leak.new}"
        case LeakKind.PROCESS:
            text = f"left process {leak.number} running ({leak.name})"
        case LeakKind.THREAD:
            text = f"left the thread {leak.name!r} running"
        case LeakKind.GROUP:
            text = f"did not destroy {group_label(leak.name)}"
        case LeakKind.RPC:
            text = "left torch.distributed.rpc running"
        case LeakKind.MEMORY:
            text = f"left {leak.number / (1 << 20):.0f} MiB more allocated on {leak.name} than it had found"
        case LeakKind.UNCHECKED:
            text = (
                f"could not be checked for leftovers ({leak.name}): it may have replaced a function that its process "
                "needs"
            )
    return text


def _remedy(leak: Leak) -> str:
    if leak.lasting:
        return "; its processes have been replaced"
    return "; it has been put back" if leak.kind is LeakKind.SETTING else ""


def kill_reason(finished: Finished) -> str | None:
    """Return why a rank must be killed after a test that it has finished like this, or None."""
    if finished.device_error:
        return f"the test left a device unusable: {finished.device_error}"
    if lasting := next((leak for leak in finished.leaks if leak.lasting), None):
        return f"the test {_describe_leak(lasting)}"
    return None


# A line for each rank


def alike(root: RankOutcome, outcomes: Sequence[RankOutcome], folders: Folders) -> list[int]:
    """Return the ranks with the same outcome as `root`."""
    text = _describe(root, folders, 1)
    return [outcome.rank for outcome in outcomes if _describe(outcome, folders, 1) == text]


def summary(root: RankOutcome, same: Sequence[int], outcomes: Sequence[RankOutcome], folders: Folders) -> list[str]:
    """Return lines on all ranks: first `root`, then other outcomes, last the consequences of a lost rank.

    `same` are the ranks `alike`. The line on `root` does not repeat the message above it.
    """
    rest = [outcome for outcome in outcomes if outcome.rank not in same]
    consequences = [outcome for outcome in rest if consequence(root) is None and consequence(outcome) is not None]
    rest = [outcome for outcome in rest if outcome not in consequences]
    cause = f"{ranks_text(same)} {_EVENTS.get(root.ending, root.ending)}"
    return [
        f"{ranks_text(same)}: {_describe_root(root, folders, len(same))}",
        *outcome_lines(rest, folders),
        # The texts of these errors contain addresses, and so differ between ranks.
        *_shared_lines(consequences, lambda one, number: [_describe_consequence(one, cause, folders, number)]),
    ]


def outcome_lines(outcomes: Sequence[RankOutcome], folders: Folders) -> list[str]:
    """Return lines on `outcomes`."""
    return _shared_lines(outcomes, lambda one, number: _describe(one, folders, number))


def _shared_lines(outcomes: Sequence[RankOutcome], describe: Callable[[RankOutcome, int], list[str]]) -> list[str]:
    """Return the lines with which `describe` describes each outcome of a number of ranks; equal ones share them."""
    lines = []
    for group in _grouped((tuple(describe(one, 1)), one) for one in outcomes).values():
        first, *more = describe(group[0], len(group))
        lines += [f"{ranks_text([one.rank for one in group])}: {first}", *(f"    {line}" for line in more)]
    return lines


def _describe_consequence(outcome: RankOutcome, cause: str, folders: Folders, number: int) -> str:
    """Return the text of a line about this `number` of ranks, which failed because of the `cause`: ``rank 1 died``."""
    meaning, place = consequence(outcome), _crash_place(outcome, folders)
    if meaning is Consequence.JOB_ENDED and outcome.exit is not None:
        return f"failed as a consequence: {describe_exit(outcome.exit)}"
    if meaning is Consequence.FAILED_EXAMPLE:
        return f"stopped because an example failed on another rank{place}"
    if meaning is Consequence.LOST_CONNECTION:
        text = "lost its connection" if number == 1 else "lost their connection"
    else:
        broken = meaning is Consequence.BROKEN_BARRIER
        text = "found a broken barrier" if broken else "timed out waiting for another rank"
    return f"{text} after {cause}{',' if place else ''}{place}"


def _crash_place(outcome: RankOutcome, folders: Folders) -> str:
    """Return the place of the failure, after "at", or "" if the report has none."""
    if (place := place_of(outcome)) is None:
        return ""
    path, line = place
    return f" at {folders.shown(path)}:{line}"


def place_of(outcome: RankOutcome) -> tuple[str, int] | None:
    """Return the file and line of the failure that the rank has reported; None if it has reported none."""
    if outcome.report is None:
        return None
    if (place := outcome.report.report.get("accel_place")) is not None:
        return place[0], place[1]
    crash = _crash_of(outcome)
    return None if crash is None else (crash["path"], crash["lineno"])


def _describe_root(root: RankOutcome, folders: Folders, number: int) -> str:
    """Return the text of `_describe` without the message of the failure."""
    text = _EVENTS.get(root.ending, root.ending) if root.report is None else _without_message(root, folders)
    if wasxfail(root) is not None:
        text = _describe_briefly(root, folders, number)
    elif root.hang is not None:
        text = describe_hang(root.hang, "was" if number == 1 else "were")
    return text if root.later is None else f"{text}; {_describe_end(root.later, folders, number)}"


def _without_message(outcome: RankOutcome, folders: Folders) -> str:
    """Return the outcome and its place; the messages of this package's fixtures are enough without a place."""
    crash = _crash_of(outcome)
    place = "" if crash is not None and crash["path"].startswith(PACKAGE) else _crash_place(outcome, folders)
    return f"{outcome.ending}{place}"


def _crash_of(outcome: RankOutcome) -> Mapping[str, Any] | None:
    longrepr = outcome.report.report.get("longrepr") if outcome.report is not None else None
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return crash or None


def _describe(outcome: RankOutcome, folders: Folders, number: int) -> list[str]:
    """Return a line on the outcome of this `number` of ranks, and for a failure the next lines of its message."""
    first, *more = _describe_report(outcome, folders, number)
    if outcome.later is not None:
        first += f"; {_describe_end(outcome.later, folders, number)}"
    return [first, *more]


def _describe_report(outcome: RankOutcome, folders: Folders, number: int) -> list[str]:
    """Return the lines of `_describe`, without the end of the rank in a later phase."""
    if outcome.expected:
        return [f"{_describe_briefly(outcome, folders, number)}, as announced"]
    if outcome.report is not None and outcome.ending == "failed" and wasxfail(outcome) is None:
        if (crash := _crash_of(outcome)) is not None:
            first, *more = [line for line in crash["message"].splitlines() if line.strip()] or [""]
            lines = [f"{_without_message(outcome, folders)}: {first}", *more[:_MORE_LINES]]
            return [cut_end(line, _WIDTH) for line in lines]
        if text := headline(outcome.report.exception):
            return [f"{_without_message(outcome, folders)}: {text}"]
    return [_describe_briefly(outcome, folders, number)]


def headline(error: ExceptionSketch | None) -> str:
    """Return type and first line of an exception, like the last line of a traceback; empty if there is none.

    Without the type for a missing fixture, as in pytest's report of it.
    """
    if error is None:
        return ""
    name, first = error.qualname.rpartition(".")[2], next(iter(cut_gloo(error.text).splitlines()), "")
    if (error.module, error.qualname) == _MISSING_FIXTURE:
        return cut_end(first, _WIDTH)
    return cut_end(f"{name}: {first}" if first else name, _WIDTH)


def _describe_briefly(outcome: RankOutcome, folders: Folders, number: int) -> str:
    if outcome.report is None:
        if outcome.hang is not None:
            return _describe_stop(outcome, folders, number)
        if outcome.ending == "died":
            return f"{_describe_death(outcome)}{_place(outcome, folders)}"
        if outcome.headline:
            return outcome.headline
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {reason_of_skip(longrepr)}"
    return outcome.ending


def _describe_end(outcome: RankOutcome, folders: Folders, number: int) -> str:
    """Return how a rank ended in a later phase than the judged phase."""
    text = _describe_briefly(outcome, folders, number)
    return text if outcome.hang is not None or outcome.ending == "died" else f"{outcome.ending}: {text}"


def _place(outcome: RankOutcome, folders: Folders) -> str:
    """Return `` at file:line in function`` of a rank with a stack; empty if there is no such place."""
    frame = where(frames_of_rank(outcome.stack), folders)
    # Without a crash or a hang, only the place of the last collective is known.
    known = outcome.hang is not None or outcome.exit is None or outcome.exit.is_crash
    return "" if frame is None else f"{' at' if known else ', after the collective at'} {frame.where(folders)}"


def _describe_death(outcome: RankOutcome, be: str = "") -> str:
    """Return the predicate of a rank that has ended; see `describe_exit` for `be`."""
    if outcome.exit is not None:
        return describe_exit(outcome.exit, be)
    unknown = _LOST_CONNECTION if outcome.ending == "died" else outcome.ending
    return next(iter(outcome.text.strip().splitlines()), unknown)


def _describe_stop(outcome: RankOutcome, folders: Folders, number: int) -> str:
    """Return the predicate of this `number` of ranks that hung."""
    assert outcome.hang is not None
    text, place = describe_hang(outcome.hang, "was" if number == 1 else "were"), _place(outcome, folders)
    if not outcome.stack:
        return f"{text}; {_describe_silence(number)}"
    if outcome.secondary and place:
        return f"still running{place} when {'it' if number == 1 else 'they'} {text}"
    return f"{text}{place}"


def _describe_silence(number: int) -> str:
    """Return the predicate of this `number` of ranks whose stacks could not be taken."""
    return f"{'does' if number == 1 else 'do'} {_SILENT}"


def _describe_timeout(
    outcomes: Sequence[RankOutcome],
    hung: Sequence[RankOutcome],
    size: int,
    records: Mapping[int, FlightRecord],
    folders: Folders,
) -> str:
    """Return the message for ranks that timed out or are in a deadlock.

    It says where each of `hung` is, those first that wait in no collective. If all wait in collectives that differ, it
    says only how.
    """
    assert hung[0].hang is not None
    is_deadlock = hung[0].hang.cause is HangCause.DEADLOCK
    about = "deadlock" if is_deadlock else describe_hang(hung[0].hang)
    found = [_describe_difference(one) for one in waits(records) if one.different]
    if found and all(_awaited(one.rank, records) is None and waiting_in(records.get(one.rank)) for one in hung):
        return f"{about}: {'; '.join(found)}"
    by_position = _grouped((_position(one, records, folders), one.rank) for one in hung)
    parts = [
        f"{ranks_text(ranks) if size > 1 else ALONE} {one if len(ranks) == 1 else several} {rest}"
        for (_, one, several, rest), ranks in sorted(by_position.items(), key=lambda item: item[0][0])
    ]
    for ending, what in (("passed", "finished"), ("skipped", "skipped")):
        if ranks := [one.rank for one in outcomes if one.ending == ending and one.later not in hung]:
            has = "had" if not is_deadlock else "has" if len(ranks) == 1 else "have"
            parts.append(f"{ranks_text(ranks)} {has} {what}{' the test' if is_deadlock else ''}")
    return f"{about}: {'; '.join(parts + found)}"


def _awaited(rank: int, records: Mapping[int, FlightRecord]) -> RankWait | None:
    """Return the message or exchange that `rank` waits for; None if it waits for none, or if that is unknown."""
    wait = records[rank].wait if rank in records else None
    return None if wait is None or wait.kind == "collective" else wait


def _position(
    outcome: RankOutcome, records: Mapping[int, FlightRecord], folders: Folders
) -> tuple[bool, str, str, str]:
    """Return whether a rank that hung waits for others, and its predicate: the verb for one and several, the rest."""
    frame = where(frames_of_rank(outcome.stack), folders)
    at = "" if frame is None else f"at {frame.place(folders)}"
    if (wait := _awaited(outcome.rank, records)) is not None:
        return True, "waits", "wait", f"{at} for {_describe_wait(wait, lacking(outcome.rank, records))}".lstrip()
    if (one := waiting_in(records.get(outcome.rank))) is not None:
        return True, "is", "are", f"stuck in {one.name} {at}".rstrip()
    if not outcome.stack:
        return False, "does", "do", _SILENT
    return False, "is", "are", at or "in no code of the test"


def _describe_wait(wait: RankWait, issued: Mapping[int, int]) -> str:
    """Return a text for the message or exchange of `wait`, with how few operations ranks have `issued` for it."""
    peers = ranks_text(tuple(issued) or wait.peers)
    count = sum(issued.values()) if wait.kind == "receive" else max(issued.values(), default=0)
    has, about = "has" if len(issued) == 1 else "have", f"(tag {wait.tag}){_of_group(wait.group)}"
    match wait.kind:
        case "receive":
            what, done = f"message #{wait.number} from {peers} {about}", "sent"
        case "send":
            what, done = f"{peers} to receive message #{wait.number} {about}", "received"
        case _:
            what, done = f"{wait.group} #{wait.number} of {peers}", "made"
    return f"{what}, which {has} {done} {count or 'none'}" if issued else what


def wasxfail(outcome: RankOutcome) -> str | None:
    """Return the reason of an xfail mark that the rank added while the test ran; None if there is none."""
    return None if outcome.report is None else outcome.report.report.get("wasxfail")


def collective_lines(stacks: Mapping[int, str], records: Mapping[int, FlightRecord], folders: Folders) -> list[str]:
    """Return lines on the collectives in which ranks wait, and on the ranks that have not reached them."""
    if old := next((one.unrecorded_by for one in records.values() if one.unrecorded_by), ""):
        return [f"the collectives are unknown: torch {old} does not record them; torch 2.8 does"]
    frames = {rank: where(frames_of_rank(stack), folders) for rank, stack in stacks.items()}
    places = {rank: frame.where(folders) for rank, frame in frames.items() if frame is not None}
    return _wait_lines(records, places)


def _wait_lines(records: Mapping[int, FlightRecord], places: Mapping[int, str]) -> list[str]:
    """Return lines on each group in which a rank waits. `places` has the ranks' known places in the code.

    The lines say "unknown" about a rank without a record, such as a dead rank.
    """
    lines: list[str] = []
    for wait in waits(records):
        if wait.different:
            hint = "with TORCH_DISTRIBUTED_DEBUG=DETAIL, such a call raises an error on every rank"
            lines += [_describe_difference(wait), hint]
        complete = not wait.missing and not wait.unknown and len(wait.inside) == 1
        suffix = f"{_of_group(wait.group)}{'; all ranks of the group have reached it' if complete else ''}"
        for one, ranks in wait.inside.items():
            lines.append(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {one}{suffix}")
        wanted = next(iter(wait.inside)).name
        for rank, last in wait.missing.items():
            at = f"; is at {places[rank]}" if places.get(rank) else ""
            before = "none" if last is None else last.name
            lines.append(f"rank {rank} has not reached {wanted} (last collective: {before}){at}")
        if wait.unknown:
            lines.append(f"unknown whether {ranks_text(wait.unknown)} reached {wanted}")
    return lines


def _describe_difference(wait: GroupWait) -> str:
    calls, group = wait.different, _of_group(wait.group)
    what, first = unlike(calls.values()), next(iter(calls.values()))
    if what == ("operations",):
        each = [
            f"rank {rank} {call.operation}{f' ({call.tensors})' if call.types else ''}" for rank, call in calls.items()
        ]
        return f"the ranks called different operations as collective #{first.number}{group}: {', '.join(each)}"
    each = [f"rank {rank} {call.tensors}" for rank, call in calls.items()]
    return f"the ranks called {first.name}{group} with different {' and '.join(what)}: {', '.join(each)}"


def _of_group(group: str) -> str:
    return "" if group == DEFAULT_GROUP else f" of {group_label(group)}"


def stacks(
    outcomes: Sequence[RankOutcome], shown: RankOutcome | None, size: int, folders: Folders
) -> list[tuple[str, str]]:
    """Return title and text of each place at which ranks hung or crashed.

    The frames of the rank of `shown` are left out: they are the traceback of the failure.
    """
    ends = [outcome.later or outcome for outcome in outcomes]
    own = {end.rank: stack_text(end.stack, folders) for end in ends if end.stack}
    threads = {end.rank: text for end in ends if (text := threads_text(end.stack, folders))}
    if shown is not None:
        above = stack_text(shown.stack, folders)
        own = {rank: text for rank, text in own.items() if text != above}
    found = (("stacks", own), ("stacks of other threads and tasks", threads))
    return [
        (f"[{ranks_text(ranks)}] {title}" if size > 1 else title, texts[ranks[0]])
        for title, texts in found
        for ranks in _alike(texts)
    ]


def interrupted_lines(world: Interrupted, folders: Folders) -> list[str]:
    """Return the lines about a test that ran when the session was interrupted."""
    by_text: dict[str, list[int]] = {}
    finished = {rank for rank, stack in world.stacks.items() if has_finished(frames_of_rank(stack))}
    for rank in sorted({**world.ends, **world.stacks}):
        stack = world.stacks.get(rank, "")
        frame = where(frames_of_rank(stack), folders)
        at = "in no code of the test" if frame is None else f"at {frame.where(folders)}"
        at = "finished the test" if rank in finished else at
        text = describe_exit(world.ends[rank]) if rank in world.ends else at if stack else ""
        by_text.setdefault(text, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text or _describe_silence(len(ranks))}" for text, ranks in by_text.items()]
    lines += collective_lines(world.stacks, world.records, folders)
    texts = {rank: stack_text(stack, folders) for rank, stack in world.stacks.items() if stack and rank not in finished}
    for ranks in _alike(texts):
        lines += [f"--- [{ranks_text(ranks)}] stacks ---", texts[ranks[0]]]
    return lines


def progress_parts(
    places: Mapping[int, str], finished: Sequence[int], records: Mapping[int, FlightRecord], folders: Folders
) -> list[str]:
    """Return texts on the places of ranks in the code, the ranks that have finished, and the collectives of ranks."""
    by_text = _grouped((folders.shown(place), rank) for rank, place in places.items())
    parts = [f"{ranks_text(ranks)} at {place}" for place, ranks in by_text.items()]
    if finished:
        parts.append(f"{ranks_text(finished)} {'has' if len(finished) == 1 else 'have'} finished the test")
    return parts + _wait_lines(records, {})


def _alike(texts: Mapping[int, str]) -> list[list[int]]:
    """Return groups of ranks whose texts are the same."""
    return list(_grouped((text, rank) for rank, text in sorted(texts.items())).values())


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the second values of `pairs` by the first, in the order of the pairs."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
