"""Tests of named resources that xdist's workers, and sessions at the same time, share."""

from __future__ import annotations

import signal

import pytest

from tests.background_suite import BackgroundSuite, suite

__all__ = ["suite"]

_CONFTEST = """
import os
from contextlib import contextmanager

from pytest_accel.pool import pool

pool.WAITING_SHOWN_AFTER = 0.0
pool._TICK_INTERVAL = 0.1


@contextmanager
def alone(name):
    os.close(os.open(name, os.O_CREAT | os.O_EXCL))  # An error if another test is between this line and the next.
    yield
    os.unlink(name)
"""


def prepare(suite: BackgroundSuite, files: dict[str, str], resources: str = "license: 1", accel: str = "none") -> None:
    suite.without_torch()
    suite.write("conftest.py", _CONFTEST)
    suite.write("pytest.ini", f"[pytest]\naccel = {accel}\naccel_preload = none\naccel_resources = {resources}\n")
    for name, text in files.items():
        suite.write(name, text)


_ALONE = """
    import pytest
    from conftest import alone
    from tests.inner import wait_for


    @pytest.mark.needs("license")
    @pytest.mark.parametrize("number", range(3))
    def test_alone(number, accel_resources):
        assert accel_resources == {"license": (0,)}
        with alone("license.held"):
            if number == 0:
                wait_for("plain")


    def test_plain():
        open("plain", "w").close()
"""


def test_workers_hold_a_license_one_after_the_other_and_run_other_tests_meanwhile(suite: BackgroundSuite) -> None:
    """No worker waits for the license as long as other tests can run."""
    prepare(suite, {"test_alone.py": _ALONE})
    run = suite.run("-n2")
    run.expect({**{f"test_alone[{number}]": "PASSED" for number in range(3)}, "test_plain": "PASSED"})
    assert "waits for" not in run.text


def test_two_sessions_never_hold_one_license_at_the_same_time(suite: BackgroundSuite) -> None:
    prepare(
        suite,
        {
            "test_alone.py": _ALONE,
            "test_holding.py": """
                import pytest
                from conftest import alone
                from tests.inner import note, wait_for


                @pytest.mark.needs("license")
                def test_hold():
                    with alone("license.held"):
                        note("holding", "license")
                        wait_for("go")
                """,
        },
    )
    (suite.path / "plain").touch()
    holder = suite.start("-n1", "test_holding.py")
    suite.read("holding")
    limited = suite.run("test_alone.py", "-k", "test_alone and 0", "--accel-wait=0.1")
    limited.expect({"test_alone[0]": "ERROR"})
    assert "no devices came free within 0.1 s (--accel-wait)\nlicense-0 is held by pid " in limited.text
    sessions = [suite.start("test_alone.py") for _ in range(2)]
    for session in sessions:
        session.wait_for_line("waits for 1 license: license-0 is held by pid ")
    sessions[1].process.send_signal(signal.SIGINT)
    assert sessions[1].finish().ret == pytest.ExitCode.INTERRUPTED
    (suite.path / "go").touch()
    holder.finish().expect({"test_hold": "PASSED"})
    run = sessions[0].finish()
    assert run.ret == pytest.ExitCode.OK, run.text


def test_a_driver_gives_its_world_back_before_it_waits_for_a_resource(suite: BackgroundSuite) -> None:
    """Otherwise `test_second` waits for `a` with the device, and `test_both` waits for the device with `a`."""
    prepare(
        suite,
        {
            "test_kept.py": """
                import pytest


                @pytest.mark.devices(1)
                def test_first():
                    pass


                @pytest.mark.needs("a")
                @pytest.mark.devices(1)
                def test_second():
                    pass
                """,
            "test_both.py": """
                import pytest


                @pytest.mark.needs("a", "b")
                @pytest.mark.devices(1)
                def test_both():
                    pass
                """,
            "test_holding.py": """
                import pytest
                from tests.inner import note, wait_for


                @pytest.mark.needs("b")
                def test_hold():
                    note("holding", "b")
                    wait_for("go")
                """,
        },
        resources="a: 1, b: 1",
        accel="sim:1,shared",
    )
    holder = suite.start("test_holding.py")
    suite.read("holding")
    sessions = []
    for name, line in (
        ("test_both.py", "test_both waits for 1 b: b-0 is held"),
        ("test_kept.py", "test_second waits for 1 a: a-0 is held"),
    ):
        sessions.append(suite.start(name))
        sessions[-1].wait_for_line(line)
    (suite.path / "go").touch()
    holder.finish().expect({"test_hold": "PASSED"})
    for session in sessions:
        run = session.finish()
        assert run.ret == pytest.ExitCode.OK, run.text
