"""Tests of the inspection of ranks on another node."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from pathlib import Path

from pytest_accel.core.paths import log_path
from pytest_accel.diagnostics.inspector import Inspection, NodeInspector, answer


def test_an_inspection_is_answered_for_the_ranks_that_have_a_result(tmp_path: Path) -> None:
    Path(log_path(str(tmp_path), 3, 1)).write_text("the log")
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer, args=(theirs, str(tmp_path)))
    thread.start()
    with ours:
        ours.send(Inspection(NodeInspector.pieces, 3, {1: (log_path, 4, 2), 2: (log_path, 0, 2)}))
        assert ours.recv() == {1: b"lo"}
    thread.join()
