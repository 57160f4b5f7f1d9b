"""The whole text of a few reports, which `whole_reports.txt` has."""

from __future__ import annotations

import signal
from pathlib import Path

from pytest_accel.core.rank_names import DEFAULT_GROUP
from pytest_accel.diagnostics.collectives import Collective
from pytest_accel.diagnostics.diagnosis import Findings
from pytest_accel.diagnostics.rank_state import RankEvent
from pytest_accel.messages.rank_messages import Finished, Leak, LeakKind
from tests.verdict.phases import STACK, died, failed, hung, judged, passed, skipped, terminated


def barrier(number: int, *, done: bool) -> dict[str, dict[int, Collective]]:
    return {DEFAULT_GROUP: {number: Collective(DEFAULT_GROUP, number, "barrier", (), (), done, (0, 1, 2))}}


DEATH = judged(
    failed(0, "Connection closed by peer [127.0.0.1]:1"),
    passed(1),
    died(2, at=2, number=signal.SIGKILL, sections=(("Captured stderr setup", "the last words"),)),
    when="setup",
    findings=Findings(at_death={1: STACK}),
)
HANG = judged(
    hung(0),
    hung(1, STACK.replace("line 12", "line 30")),
    passed(2),
    findings=Findings({0: barrier(2, done=False), 1: barrier(1, done=True)}),
)
FAILURE = judged(*(failed(rank, at=rank) for rank in (0, 1)), failed(2, "ValueError: x", at=9, line=8), passed(3))
DISAGREEMENT = judged(skipped(0), passed(1), terminated(2, RankEvent(0, "skipped")))
END = judged(
    passed(0),
    passed(1),
    when="teardown",
    finished={
        0: Finished(1, {"0": ((0, 1), 4)}, leaks=(Leak(LeakKind.THREAD, "mine"),)),
        1: Finished(1, {"0": ((0, 1), 5)}),
    },
)


def test_the_text_of_whole_reports() -> None:
    reports = {"death": DEATH, "hang": HANG, "failure": FAILURE, "disagreement": DISAGREEMENT, "end of test": END}
    text = "\n".join(f"===== {name}: {verdict.cause}\n{verdict.plain_text()}\n" for name, verdict in reports.items())
    assert text == Path(__file__).with_name("whole_reports.txt").read_text(encoding="utf-8")
