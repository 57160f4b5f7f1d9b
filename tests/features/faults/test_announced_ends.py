"""Tests of the announcements of the fixture `faults`, each kind of end announced rightly and wrongly."""

from __future__ import annotations

import importlib.util

import pytest

from tests.features.conftest import Suite
from tests.run import CAUSES

_HEAD = """
    import datetime
    import os
    import signal
    import threading

    import pytest
    from tests.lazy_torch import dist, torch

    distributed = pytest.mark.distributed


    def kill_myself():
        os.kill(os.getpid(), signal.SIGKILL)


    def hang():
        threading.Event().wait()


    @pytest.fixture
    def group():
        group = dist.new_group()  # With the short timeout, it would be an error if a rank came here later than another.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), group)
        return group


    def reduce_alone(group):
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)


    def break_device():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\\nCUDA kernel errors might be late")
    """
_ANNOUNCED = {
    "exit": "faults.expect_exit(1, status=7)",
    "kill": "faults.expect_exit(1, signal='SIGKILL')",
    "hang": "faults.expect_hang(1, after=0.3)",
    "device": "faults.expect_device_error(1, 'device-side assert')",
    "uneven": "faults.expect_uneven_collectives()",
}
_ENDS = {
    "pass": "pass",
    "exit": "os._exit(7)",
    "other": "os._exit(8)",
    "kill": "kill_myself()",
    "hang": "hang()",
    "device": "break_device()",
    "uneven": "reduce_alone(group)",
}
_OTHERS = """
    @distributed(3)
    def test_survivors_notice_at_different_times(faults, rank, group):
        faults.expect_exit(2, status=7)
        if rank == 2:
            os._exit(7)
        for _ in range(rank + 1):
            reduce_alone(group)
    """
_WRONG = {
    ("exit", "other"): "FAILED died: status 8; rank 1",
    ("hang", "pass"): "FAILED failed: announced end; rank 1",
    ("uneven", "exit"): "FAILED died: status 7; rank 1",
}
"""Wrong announcements whose tests end at once, and their verdicts. `tests/verdict` has all of them."""


_MISUSES = """
    @pytest.fixture
    def announced_in_setup(faults):
        faults.expect_exit(1, status=7)


    @distributed(2)
    def test_in_setup(announced_in_setup):
        pass


    @distributed(2)
    def test_values(faults, rank):
        for named in ({"status": 256}, {"signal": "KILL"}, {"status": 7, "signal": "SIGKILL"}):
            with pytest.raises(ValueError):
                faults.expect_exit(1, **named)
        faults.expect_exit(1, status=7)
        with pytest.raises(ValueError, match="the end of rank 1 was announced before"):
            faults.expect_exit(1, status=8)
        if rank == 1:
            os._exit(7)


    @distributed(2)
    def test_different(faults, rank):
        faults.expect_exit(1, status=7 + rank)
        if rank == 1:
            os._exit(7)


    @pytest.mark.devices(1)
    def test_only_rank(faults):
        for announce in (faults.expect_hang, faults.expect_uneven_collectives):
            with pytest.raises((TypeError, ValueError)):
                announce()
        with pytest.raises(ValueError, match="at least one rank must be left to report"):
            faults.expect_exit(0, status=7)
        faults.expect_device_error()
        break_device()


    RUN = []


    @distributed(2)
    def test_all_devices(faults):
        RUN.append("this test")
        faults.expect_device_error(text="errors might be late")
        break_device()


    @distributed(2)
    def test_after_all_devices():
        assert RUN == []


    def test_unmarked(faults):
        pass
    """
_VERDICTS_ON_MISUSES = {
    "test_in_setup": "ERROR failed: RuntimeError; ranks 0-1",
    "test_values": "PASSED",
    "test_different": "FAILED died: status 7; rank 1",
    "test_only_rank": "PASSED",
    "test_all_devices": "PASSED",
    "test_after_all_devices": "PASSED",
    "test_unmarked": "ERROR",
}


def test_each_end_passes_only_if_it_was_announced(suite: Suite) -> None:
    verdicts = dict.fromkeys(((one, one) for one in _ANNOUNCED), "PASSED") | _WRONG
    tests = [
        f"""
    @distributed(2, timeout=20)
    def test_{announced}_{end}(faults, rank{", group" if end == "uneven" else ""}):
        {_ANNOUNCED[announced]}
        if rank == 1:
            {_ENDS[end]}
    """
        for announced, end in verdicts
    ]
    suite.write("test_ends.py", _HEAD + "".join(tests) + _OTHERS)
    suite.write("test_misuses.py", _HEAD + _MISUSES)
    suite.ini("accel_leaks = off")  # The groups of collectives that differ.
    run = suite.run(CAUSES)
    ends = {f"test_{announced}_{end}": verdict for (announced, end), verdict in verdicts.items()}
    run.expect(ends | {"test_survivors_notice_at_different_times": "PASSED"} | _VERDICTS_ON_MISUSES)
    assert "ends can be announced, and faults planned, only in the first run of a test's own code" in run.text


@pytest.mark.skipif(importlib.util.find_spec("pytest_rerunfailures") is None, reason="needs pytest-rerunfailures")
def test_an_announcement_counts_for_one_run_of_its_test(suite: Suite) -> None:
    suite.without_torch()
    suite.plugin("rerunfailures")
    suite.write(
        "test_it.py",
        _HEAD
        + """
    @pytest.mark.flaky(reruns=1)
    @pytest.mark.parametrize("announces", [[True, False], [False, True]])
    @distributed(2, init=False)
    def test_rerun(faults, rank, announces, gather):
        runs = f"runs{announces}"
        run = gather(os.path.exists(runs))[0]
        if announces[run]:
            faults.expect_exit(1, status=7 if run else 8)
        if rank == 0:
            open(runs, "w").close()
        gather(None)
        if rank == 1:
            os._exit(7)
        """,
    )
    run = suite.run()
    run.expect({"test_rerun[announces0]": "RERUN FAILED", "test_rerun[announces1]": "RERUN PASSED"})
