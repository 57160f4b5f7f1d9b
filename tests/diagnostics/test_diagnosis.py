"""Tests of the examination of ranks, with records in place of ranks."""

from __future__ import annotations

import json
from typing import cast

from pytest_accel.diagnostics.diagnosis import Examiner
from pytest_accel.diagnostics.inspector import WorldInspector


class FakeInspector:
    """An inspector that returns given records."""

    def __init__(self, records: dict[int, bytes]) -> None:
        self._records = records

    def ask(self, method: object, given: object) -> dict[int, bytes]:
        return self._records


def test_the_progress_of_a_test_names_the_ranks_that_have_finished_it() -> None:
    records = {
        rank: json.dumps({"entries": [], "place": "test_x.py:3 in test_it", "finished": rank > 0}).encode()
        for rank in range(3)
    }
    examiner = Examiner(cast(WorldInspector, FakeInspector(records)), grouped=True)
    progress = examiner.progress({})
    assert (progress.places, progress.finished) == ({0: "test_x.py:3 in test_it"}, [1, 2])
