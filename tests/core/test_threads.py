"""Tests of the end of the plugin's threads."""

from __future__ import annotations

import signal
import subprocess
import sys

from pytest_accel.core import threads


def test_a_thread_that_waits_for_a_stopped_process_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        thread = threads.start(process.wait, "waits", 60)
        assert not threads.end(thread, 0.01)
        process.kill()
        assert threads.end(thread)
