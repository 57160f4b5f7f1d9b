"""Tests of pytest sessions that a test starts: they use the devices of the rank in which they run."""

from __future__ import annotations

from tests.features.conftest import Suite

_HELPERS = """
    import os
    import subprocess
    import sys


    def start(folder, environment=os.environ):
        command = [sys.executable, "-m", "pytest", "-rsP", "-v", "-p", "accel", "-p", "no:cacheprovider"]
        return subprocess.Popen(
            [*command, "--accel", "sim:3,shared", f"--rootdir={folder}", folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


    def run(folder, environment=os.environ):
        text, _ = start(folder, environment).communicate()
        print(text)
        return text
"""

_INNER = """
    import pytest


    @pytest.mark.devices(1, share=0.5)
    def test_one(accel):
        print("sees", [one.id for one in accel.devices])


    @pytest.mark.devices(2)
    def test_two(): ...


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_ranks(rank): ...
"""

_LIMIT = """
    from importlib.util import find_spec
    from pathlib import Path

    from pytest_accel import is_rank

    def pytest_configure(config):
        if find_spec("torch") is not None and is_rank(config):
            from torch import cpu

            # The simulated devices are torch's CPU, whose memory torch does not limit.
            cpu.set_per_process_memory_fraction = lambda fraction, _: Path("fraction").write_text(f"{fraction}\\n")
"""

_EXCLUSIVE = """
    import os
    from pathlib import Path

    import pytest
    from tests.deadline import eventually


    @pytest.mark.devices(1)
    def test_begins_after_the_other_session_has_ended():
        if not Path("ended").exists():
            wishes = Path(os.environ["TMPDIR"])
            eventually("the other session to wait", lambda: list(wishes.glob("accel-*/w*.locks/*.wish")))
            Path("ended").touch()
"""

_OUTER = """
    import os
    from pathlib import Path

    import pytest
    from starting import run, start

    @pytest.mark.devices(1, share=0.5)
    def test_session(accel):
        path = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if "without_torch" not in folder]
        text = run("inner", {**os.environ, "PYTHONPATH": os.pathsep.join(path)})
        assert "2 passed, 1 skipped" in text
        assert f"sees ['{accel.devices[0].id}']" in text
        assert Path("fraction").read_text() == "0.25\\n"


    @pytest.mark.devices(1)
    def test_two_sessions_without_variables():
        removed = ("PYTEST_ACCEL_SESSION", "SIM_VISIBLE_DEVICES")
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        for session in [start("exclusive", environment), start("exclusive", environment)]:
            text, _ = session.communicate()
            print(text)
            assert "1 passed" in text


    def test_in_the_driver():
        assert "3 passed" in run("inner")
"""


def test_a_session_inside_a_test_leases_the_devices_of_the_test(suite: Suite) -> None:
    suite.write("starting.py", _HELPERS)
    suite.write("inner/test_inner.py", _INNER)
    suite.write("inner/conftest.py", _LIMIT)
    suite.write("exclusive/test_exclusive.py", _EXCLUSIVE)
    suite.write("test_outer.py", _OUTER)
    suite.without_torch()
    run = suite.run("--accel=sim:3,shared", "-rP", "test_outer.py")
    assert run.ret == 0, run.text
    assert "3 passed in" in run.text
    assert (
        "needs 2 sim devices; there is 1: sim (SIM_VISIBLE_DEVICES=sim-0 leaves 1 of 3, this session runs inside "
        "test_outer.py::test_session of another session, which holds 1 sim device)" in run.text
    )
