"""Tests of the conclusions that the ranks of a property-based test draw from the steps of all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_accel.features.properties.example_steps import (
    Conclusion,
    Draw,
    ExampleEnd,
    Failure,
    Fetch,
    Leave,
    Opening,
    Outcome,
    Step,
    conclude,
    from_record,
    to_record,
)

FAILURE = Failure("builtins", "ValueError", "low", "test_x.py", 3, "ValueError at test_x.py:3")


def end(outcome: Outcome = "passed", drawn: str = "5", **options: Any) -> ExampleEnd:
    failure = FAILURE if outcome == "failed" else None
    return ExampleEnd(0.0, drawn, drawn, outcome, options.pop("seconds", 0.0), options.pop("targets", {}), failure)


def draw(drawn: str = "5") -> Draw:
    return Draw(0.0, drawn, drawn)


def opening(name: str, constants: int = 0) -> Opening:
    return Opening(0.0, name, 7, True, constants)


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([end(), end()], "passed"),
        ([end("stopped"), end("stopped")], "stopped"),
        ([end(), end("failed")], "failed"),
        ([end("rejected"), end("failed")], "failed"),
        ([end("skipped"), end("failed")], "failed"),
        ([draw(), end("failed")], "failed"),
        ([end("rejected"), end()], "rejected"),
        ([end("rejected"), draw()], "rejected"),
        ([end("skipped"), end("skipped")], "skipped"),
        ([draw(), draw()], "continues"),
        ([opening("test_x"), opening("test_x", constants=1)], "continues"),
        ([Fetch(0.0, ["a"]), Fetch(1.0, [])], "continues"),
        # The ranks cannot shrink the failure together.
        ([end(drawn="6"), end("failed")], "broken"),
        ([draw("6"), end("failed")], "broken"),
        ([end("stopped"), end("failed")], "broken"),
        ([end("skipped"), end()], "broken"),
        ([end("skipped"), draw()], "broken"),
        # The ranks have different examples.
        ([end(drawn="6"), end()], "different"),
        ([draw("6"), draw()], "different"),
        ([draw(), end()], "different"),
        ([draw(), end("stopped")], "different"),
        ([end("stopped"), end()], "different"),
        ([opening("test_x"), opening("test_y")], "different"),
        ([opening("test_x"), end()], "different"),
        ([Fetch(0.0, []), end()], "different"),
        ([Leave(0.0, None), end()], "left"),
        ([end("failed"), Leave(0.0, FAILURE)], "left"),
    ],
)
def test_steps_of_all_ranks_lead_to_one_conclusion(steps: list[Step], outcome: str) -> None:
    found = conclude(steps)
    assert found.outcome == outcome
    if found.failure is not None:
        assert found.rank == 1
    if outcome in ("different", "left"):
        assert found.text


def test_a_conclusion_has_the_highest_targets_and_the_slowest_rank() -> None:
    ends = [end(seconds=0.1, targets={"loss": 1.0}), end(seconds=0.3, targets={"loss": -1.0, "size": 2.0})]
    found = conclude(ends)
    assert found == Conclusion("passed", targets={"loss": 1.0, "size": 2.0}, seconds=0.3, slowest=1)


def test_differences_between_ranks_are_described() -> None:
    assert conclude([end(drawn="6"), end(), end()]).text == (
        "the ranks drew different examples (rank 0 drew 6; ranks 1-2 drew 5): "
        "what a test draws must not depend on the rank"
    )
    assert "rank 0 drew 5 and draws more; rank 1 drew 5)" in conclude([draw(), end()]).text
    same = [Draw(0.0, digest, "…5") for digest in ("a", "b")]
    assert "rank 0 drew …5 and draws more [a]; rank 1 drew …5 and draws more [b])" in conclude(same).text
    same = [Draw(0.0, digest, "…5") for digest in ("a", "a", "b", "a")]
    assert "ranks 0-1, 3 drew …5 and draws more [a]; rank 2 drew …5 and draws more [b])" in conclude(same).text
    assert "ranks 0, 2 drew 5 [passed]; rank 1 drew 5 [stopped])" in conclude([end(), end("stopped"), end()]).text
    assert conclude([end("skipped"), end(), end()]).text == (
        "the ranks disagree about an example: rank 0 skipped, ranks 1-2 ran"
    )


@pytest.mark.parametrize("step", [opening("test_x"), Fetch(1.0, ["YQ=="]), draw(), end("failed"), Leave(1.0, FAILURE)])
def test_steps_are_unchanged_after_json(step: Step) -> None:
    assert from_record(json.loads(json.dumps(to_record(step)))) == step


@pytest.mark.parametrize("record", [{}, {"kind": "Other"}, {"kind": "Draw"}, {"kind": "Fetch", "at": 0, "examples": 1}])
def test_an_invalid_record_of_a_step_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not a step of a test"):
        from_record(record)
