"""Tests of the sentences about ranks: each is asserted here once, and tests of sessions assert causes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_accel.core.frames import PACKAGE
from pytest_accel.core.truncation import DEFAULT_GROUP, ranks_text
from pytest_accel.diagnostics.outside_errors import Interrupted, OutsideError, RankProblem
from pytest_accel.diagnostics.rank_state import Hang, HangCause, RankOutcome
from pytest_accel.messages.flight_record import FlightRecord
from pytest_accel.messages.rank_messages import (
    ExitCause,
    Finished,
    GroupUse,
    Leak,
    LeakKind,
    RankExit,
    UnawaitedCollective,
    exited,
)
from pytest_accel.verdict import sentences
from tests.flight_records import entry, record
from tests.verdict.phases import FOLDERS, STACK, hung, judged, passed

OUT_OF_MEMORY = "out of memory (the oom_kill counter of the control group went up)"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([3, 1], "ranks 1, 3"),
        ([7, 5, 2, 6, 0], "ranks 0, 2, 5-7"),
        ([9, 10, 11], "ranks 9-11"),
    ],
)
def test_consecutive_ranks_are_written_as_a_range(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (exited(0), "exited with status 0"),
        (exited(-signal.SIGSEGV), "{}killed by SIGSEGV"),
        (exited(-250), "{}killed by signal 250"),
        (RankExit(ExitCause.OUT_OF_MEMORY, -signal.SIGKILL), f"{{}}killed by SIGKILL: {OUT_OF_MEMORY}"),
        (RankExit(ExitCause.SERVER_ENDED), "ended with the fork server, which is gone"),
        (
            RankExit(ExitCause.MACHINE_LOST, about="far (its agent has ended)"),
            "{}lost with the machine far (its agent has ended)",
        ),
        (
            RankExit(ExitCause.JOB_ENDED),
            "ended with its MPI job, since a rank has called MPI_Abort or has died",
        ),
    ],
)
def test_the_end_of_a_rank(end: RankExit, text: str) -> None:
    assert sentences.describe_exit(end) == text.format("")
    assert sentences.describe_exit(end, "were") == text.format("were ")


@pytest.mark.parametrize(
    ("hang", "text"),
    [
        (Hang(HangCause.PHASE_TIMEOUT, 5, "call"), "timed out after 5 s"),
        (Hang(HangCause.PHASE_TIMEOUT, 0.5, "setup"), "timed out in the setup phase after 0.5 s"),
        (Hang(HangCause.START_TIMEOUT, 120), "did not become ready within 120 s"),
        (Hang(HangCause.COLLECTION_TIMEOUT, 9), "did not import and collect the test's file within 9 s"),
        (Hang(HangCause.OTHER_RANK, 3, event=RankOutcome(1, "failed")), "was stopped 3 s after rank 1 failed"),
        (Hang(HangCause.OTHER_RANK, 3, event=RankOutcome(0, "hung")), "was stopped 3 s after rank 0 timed out"),
        (Hang(HangCause.OTHER_RANK, 3, event=RankOutcome(0, "absent")), "was stopped 3 s after rank 0 ended"),
        (Hang(HangCause.DEADLOCK, 0), "was in a deadlock"),
    ],
)
def test_the_hang_of_a_rank(hang: Hang, text: str) -> None:
    assert sentences.describe_hang(hang) == text
    assert sentences.describe_end(RankOutcome(7, "hung", hang=hang)) == f"rank 7 {text}"


def test_the_end_of_a_rank_whose_exit_status_is_unknown() -> None:
    lost = RankOutcome(1, "died")
    assert judged(hung(0), lost).message == "rank 1 lost its connection to the driver (exit status unknown)"
    assert sentences.describe_end(lost) == "rank 1 lost its connection to the driver (exit status unknown)"
    asked = RankOutcome(1, "died", text=sentences.exit_request("enough"))
    assert sentences.describe_end(asked) == "rank 1 asked for the end of the session: enough"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OutsideError.DIED_BETWEEN_TESTS, "exited with status 3 after its last test had passed"),
        (OutsideError.DIED_IN_TEARDOWN, "exited with status 3 before the end of its session"),
        (OutsideError.NOT_TORN_DOWN, "was killed by SIGKILL and may not have torn down its session fixtures"),
        (
            OutsideError.FAILED_BY_HOOK,
            "has ended its session with a failing exit status although no test had failed in it: a hook has set it "
            "(session.exitstatus in pytest_sessionfinish)",
        ),
        (OutsideError.NOT_ENDED, "did not end its session within 5 s and was killed"),
    ],
)
def test_an_error_outside_of_any_test(error: OutsideError, text: str) -> None:
    problem = RankProblem(error, 1, 2, exited(3), 5.0, output="the last words")
    assert sentences.problem_lines(problem) == f"rank 1 of a world of 2 {text}\nthe last words"
    assert sentences.problem_lines("the lock of sim-0 was lost") == "the lock of sim-0 was lost"


PLACE = ("dist.isend", "test_a.py", 3)
IN_ALL = ", counted since the group was made: rank 0: 4, rank 1: 3"


@pytest.mark.parametrize(("name", "group"), [(DEFAULT_GROUP, "the default process group"), ("1", "process group 1")])
def test_different_numbers_of_collectives(name: str, group: str) -> None:
    finished = {rank: Finished(1, {name: GroupUse((0, 1), number)}) for rank, number in ((1, 3), (0, 4))}
    assert sentences.uneven_collectives_lines(finished) == [
        f"the ranks issued different numbers of collectives in {group} (ranks 0-1){IN_ALL}"
    ]


def test_different_numbers_of_process_groups() -> None:
    assert sentences.uneven_groups_lines({0: Finished(groups_by_test=1), 1: Finished()}) == [
        "the ranks made different numbers of process groups: rank 0: 1, rank 1: 0; every rank must call "
        "dist.new_group, also one that is no member, unless use_local_synchronization=True"
    ]


def test_a_collective_for_which_the_test_did_not_wait() -> None:
    at = "dist.isend at test_a.py:3, for which the test did not wait,"
    slow, failed = UnawaitedCollective(*PLACE, None), UnawaitedCollective(*PLACE, "Broken pipe")
    finished = {0: Finished(unawaited=(slow,)), 1: Finished(unawaited=(slow, failed))}
    assert sentences.unawaited_lines(finished, FOLDERS) == [
        f"ranks 0-1: {at} has not completed",
        f"rank 1: {at} failed: Broken pipe",
    ]


@pytest.mark.parametrize(
    ("leak", "text"),
    [
        (Leak(LeakKind.SETTING, "the mode", "1", "2"), "left the mode changed from 1 to 2; it has been put back"),
        (Leak(LeakKind.SETTING, "the mode", "1", "2", lasting=True), "left the mode changed from 1 to 2{}"),
        (Leak(LeakKind.PROCESS, "sleep 9", number=7), "left process 7 running (sleep 9)"),
        (Leak(LeakKind.THREAD, "mine"), "left the thread 'mine' running"),
        (Leak(LeakKind.GROUP, DEFAULT_GROUP, lasting=True), "did not destroy the default process group{}"),
        (Leak(LeakKind.RPC, lasting=True), "left torch.distributed.rpc running{}"),
        (
            Leak(LeakKind.MEMORY, "cuda:0", number=90 << 20, lasting=True),
            "left 90 MiB more allocated on cuda:0 than it had found{}",
        ),
        (
            Leak(LeakKind.UNCHECKED, "KeyError: 1", lasting=True),
            "could not be checked for leftovers (KeyError: 1): it may have replaced a function that its process "
            "needs{}",
        ),
    ],
)
def test_a_leak(leak: Leak, text: str) -> None:
    finished = Finished(1, {}, leaks=(leak,))
    replaced = "; its processes have been replaced"
    assert sentences.leak_lines({0: finished, 1: finished}) == [f"ranks 0-1 {text.format(replaced)}"]
    reason = f"the test {text.removesuffix('{}')}" if leak.lasting else None
    assert sentences.kill_reason(finished) == reason


def test_other_reasons_to_kill_a_rank() -> None:
    assert sentences.kill_reason(Finished(1, {})) is None
    unusable = Finished(1, {}, device_error="device-side assert")
    assert sentences.kill_reason(unusable) == "the test left a device unusable: device-side assert"


HINT = "with TORCH_DISTRIBUTED_DEBUG=DETAIL, such a call raises an error on every rank"
OPEN = record(entry(3), entry(4, done=False))


def wait_lines(records: Mapping[int, FlightRecord], stacks: dict[int, str]) -> list[str]:
    return sentences.collective_lines(stacks, records, FOLDERS)


@pytest.mark.parametrize(
    ("records", "lines"),
    [
        ({}, []),
        ({0: record(entry(4)), 1: record(entry(4))}, []),
        (
            {0: OPEN, 1: OPEN, 2: OPEN},
            ["ranks 0-2 are in all_reduce #4 (float32[2, 3]); all ranks of the group have reached it"],
        ),
        (
            {0: OPEN, 1: OPEN, 2: record(entry(3, "barrier"))},
            [
                "the ranks called different operations as collective #3: rank 0 all_reduce (float32[2, 3]), "
                "rank 1 all_reduce (float32[2, 3]), rank 2 barrier (float32[2, 3])",
                HINT,
                "ranks 0-1 are in all_reduce #4 (float32[2, 3])",
                "rank 2 has not reached all_reduce #4 (last collective: barrier #3); is at test_it.py:12 in test_it",
            ],
        ),
        (
            {0: OPEN, 2: record()},
            [
                "rank 0 is in all_reduce #4 (float32[2, 3])",
                "rank 2 has not reached all_reduce #4 (last collective: none); is at test_it.py:12 in test_it",
                "unknown whether rank 1 reached all_reduce #4",
            ],
        ),
        (
            {0: OPEN, 1: record(entry(4, "broadcast", done=False)), 2: OPEN},
            [
                "the ranks called different operations as collective #4: rank 0 all_reduce (float32[2, 3]), "
                "rank 1 broadcast (float32[2, 3]), rank 2 all_reduce (float32[2, 3])",
                HINT,
                "ranks 0, 2 are in all_reduce #4 (float32[2, 3])",
                "rank 1 is in broadcast #4 (float32[2, 3])",
            ],
        ),
        (
            {0: record(entry(2, done=False, group="7")), 1: record(entry(1, group="7")), 2: record()},
            [
                "rank 0 is in all_reduce #2 (float32[2, 3]) of process group 7",
                "rank 1 has not reached all_reduce #2 (last collective: all_reduce #1)",
            ],
        ),
    ],
)
def test_waiting_and_missing_ranks_are_described(records: dict[int, FlightRecord], lines: list[str]) -> None:
    assert sentences.collective_lines({2: STACK}, records, FOLDERS) == lines


def test_different_shapes_and_types_of_a_collective_are_described() -> None:
    waits = record(entry(1, done=False, input_sizes=[[4]]))
    start = "the ranks called all_reduce #1 with different "
    tail = [HINT, "rank 1 is in all_reduce #1 (float32[4]); all ranks of the group have reached it"]

    def first_lines(**rank_0: Any) -> list[str]:
        lines = wait_lines({0: record(entry(1, **rank_0)), 1: waits, 2: waits}, {})
        assert lines[1:] == [tail[0], tail[1].replace("rank 1 is", "ranks 1-2 are")]
        return lines[:1]

    assert first_lines(input_sizes=[[3]]) == [f"{start}shapes: rank 0 float32[3], rank 1 float32[4], rank 2 float32[4]"]
    assert first_lines(input_dtypes=["Double"], input_sizes=[[4]]) == [
        f"{start}types: rank 0 float64[4], rank 1 float32[4], rank 2 float32[4]"
    ]
    assert first_lines(input_dtypes=["Half"]) == [
        f"{start}shapes and types: rank 0 float16[2, 3], rank 1 float32[4], rank 2 float32[4]"
    ]


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [("all_gather", ([[3]], [[4]])), ("all_to_all", ([[3]], [[9]])), ("scatter", ([[2, 3]], []))],
)
def test_uneven_shapes_are_not_reported_if_the_operation_allows_them(
    operation: str, sizes: tuple[list[list[int]], list[list[int]]]
) -> None:
    types = [["Float"] * len(size) for size in sizes]
    records = {
        rank: record(entry(1, operation, done=False, input_sizes=size, input_dtypes=kinds))
        for rank, (size, kinds) in enumerate(zip(sizes, types, strict=True))
    }
    assert not [line for line in wait_lines(records, {}) if "different" in line]


def test_the_progress_of_a_test() -> None:
    parts = (
        "rank 0 at test_x.py:3 in test_it; ranks 1-2 have finished the test; rank 0 is in all_reduce #4 "
        "(float32[2, 3]); unknown whether ranks 1-2 reached all_reduce #4"
    )
    assert "; ".join(sentences.progress_parts({0: "test_x.py:3 in test_it"}, [1, 2], {0: OPEN}, FOLDERS)) == parts


def test_an_interrupt_says_where_the_ranks_are() -> None:
    """The stack of a rank that has finished the test is that of this package, which receives the next test.

    If the driver has closed its connection, the rank waits for another driver.
    """
    receives = f"""Thread 0x00007f (most recent call first):
  File "/venv/lib/python3.12/multiprocessing/connection.py", line 250 in recv
  File "{PACKAGE}rank/link_to_driver.py", line 31 in receive
"""
    accepts = receives.replace("31 in receive", "27 in __init__")
    world = Interrupted("test_it", {2: exited(3)}, {0: receives, 1: "", 3: STACK, 4: accepts}, {})
    assert sentences.interrupted_lines(world, FOLDERS)[:4] == [
        "ranks 0, 4: finished the test",
        "rank 1: does not respond to signals",
        "rank 2: exited with status 3",
        "rank 3: at test_it.py:12 in test_it",
    ]
    silent = Interrupted("test_it", {}, {0: "", 1: ""}, {})
    assert sentences.interrupted_lines(silent, FOLDERS) == ["ranks 0-1: do not respond to signals"]


@pytest.mark.parametrize(("status", "more"), [(0, " before it had finished the test"), (7, "")])
def test_a_rank_that_exits_with_status_0_does_not_read_like_a_success(status: int, more: str) -> None:
    died = [RankOutcome(rank, "died", 1.0, exit=exited(status)) for rank in range(2)]
    assert judged(passed(0), died[1]).message == f"rank 1 exited with status {status}{more}"
    assert judged(*died).message == f"ranks 0-1 exited with status {status}{more.replace('it', 'they')}"
