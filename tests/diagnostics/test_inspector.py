"""Tests of the inspection of ranks on another machine."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from pathlib import Path

from pytest_accel.core.paths import log_path
from pytest_accel.core.struct_messages import decode, encode
from pytest_accel.diagnostics.inspector import Inspection, answer


def test_an_inspection_is_answered_for_the_ranks_that_have_a_result(tmp_path: Path) -> None:
    Path(log_path(str(tmp_path), 3, 1)).write_text("the log")
    ours, theirs = Pipe()
    thread = threading.Thread(target=answer, args=(theirs, str(tmp_path)))
    thread.start()
    with ours:
        ours.send_bytes(encode(Inspection("pieces", 3, {1: ("log", 4, 2), 2: ("log", 0, 2)})))
        assert decode(ours.recv_bytes(), dict[int, bytes]) == {1: b"lo"}
    thread.join()
