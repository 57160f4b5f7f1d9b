"""Outcomes of ranks, and the verdicts on them, for the tests of this folder."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from pytest_accel.core.frames import Folders
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.rank_state import Ending, Hang, HangCause, RankOutcome
from pytest_accel.messages.rank_messages import Announced, ExceptionSketch, PhaseReport, When, exited
from pytest_accel.verdict.expected_ends import marked
from pytest_accel.verdict.judgement import Phase, judge, plain_pass, text_longrepr
from pytest_accel.verdict.phase_verdict import Verdict

PLACE = ("test_it.py", 3)
FOLDERS = Folders("/home/me", "/home/me")
OUTPUT = ("Captured stdout call", "the last words\n")
STACK = """Thread 0x00007f (most recent call first):
  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/home/me/test_it.py", line 12 in test_it
"""


def reported(rank: int, ending: Ending, at: float, exception: ExceptionSketch | None, **report: Any) -> RankOutcome:
    return RankOutcome(rank, ending, at, PhaseReport(1, "call", {"outcome": ending, **report}, at, exception))


def passed(rank: int, **report: Any) -> RankOutcome:
    return reported(rank, "passed", 1.0, None, **report)


def failed(rank: int, text: str = "assert 0 == 1", at: float = 1.0, line: int = 7, **report: Any) -> RankOutcome:
    longrepr = text_longrepr(text, ["the traceback"], ("test_it.py", line))
    error = "AssertionError" if text.startswith("assert ") else "RuntimeError"
    return reported(rank, "failed", at, ExceptionSketch("builtins", error, text), longrepr=longrepr, **report)


def skipped(rank: int, reason: str = "no network", **report: Any) -> RankOutcome:
    return reported(rank, "skipped", 1.0, None, longrepr=("test_it.py", 5, f"Skipped: {reason}"), **report)


def died(rank: int, at: float = 1.0, number: signal.Signals = signal.SIGSEGV, **more: Any) -> RankOutcome:
    return RankOutcome(rank, "died", at, exit=exited(-number), **more)


def hung(rank: int, stack: str = STACK) -> RankOutcome:
    return RankOutcome(rank, "hung", 9.0, stack=stack, hang=Hang(HangCause.PHASE_TIMEOUT, 5, "call"))


def terminated(rank: int, event: RankOutcome) -> RankOutcome:
    """Return the outcome of a rank that was terminated after `event`, that of another rank."""
    hang = Hang(HangCause.OTHER_RANK, 3, event=event)
    return RankOutcome(rank, "hung", 9.0, stack=STACK, sections=(OUTPUT,), hang=hang)


def world_key(size: int) -> WorldKey:
    return WorldKey("sim", None, size, grouped=True, devices_per_rank=0)


def judged(*outcomes: RankOutcome, when: When = "call", announced: Sequence[Announced] = (), **more: Any) -> Verdict:
    """Return the verdict on a phase with `outcomes`, one of each rank. `more` are further fields of the phase."""
    seen = marked(outcomes, announced) if when == "call" else outcomes
    more = {"key": world_key(len(outcomes)), "place": PLACE, "folders": FOLDERS, **more}
    phase = Phase(when=when, outcomes=seen, announced=announced, **more)
    verdict = judge(phase)
    plain = plain_pass(outcomes, announced, phase.finished)
    # The driver asks for a plain pass only if there is none of these.
    assert plain in (None, verdict) or phase.failed_subtests or phase.late_errors
    return verdict


def traceback_lines(verdict: Verdict) -> list[str]:
    """Return the lines of the failure's traceback, with the places of its frames."""
    lines: list[str] = []
    for traceback, *_ in verdict.longrepr["chain"]:
        for entry in traceback["reprentries"]:
            place = entry["data"].get("reprfileloc")
            lines += [f"{place['path']}:{place['lineno']}: {place['message']}"] if place else []
            lines += [line.rstrip("\n") for line in entry["data"]["lines"]]
        lines += traceback["extraline"].split("\n") if traceback["extraline"] else []
    return lines


def sections(verdict: Verdict) -> dict[str, str]:
    """Return title and text of each section that a failure shows below its traceback."""
    return {name: text for name, text, _ in verdict.longrepr["sections"]}


def summary(verdict: Verdict) -> tuple[str, list[str]]:
    """Return the first section: its title, and its lines, each about one rank or several."""
    name, text, _ = verdict.longrepr["sections"][0]
    return name, text.splitlines()
