"""Tests of the leak checks in ``tests/conftest.py``, with suites that leak something."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

CONFTEST = Path(__file__).parent.joinpath("conftest.py").read_text(encoding="utf-8")
CHANGES = {
    "_TIMEOUT = 15.0\n": "_TIMEOUT = 0.0\n",
    # Without a timeout, short-lived files of other processes in /dev/shm would count as leaks.
    '_SHARED_MEMORY = Path("/dev/shm")\n': '_SHARED_MEMORY = Path(__file__).with_name("shm")\n',
}


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a pytester whose suite has the checks, without their timeout, and with a folder as shared memory."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    conftest = CONFTEST
    for old, new in CHANGES.items():
        assert conftest.count(old) == 1
        conftest = conftest.replace(old, new)
    pytester.makeconftest(conftest)
    pytester.mkdir("shm")
    return pytester


def run(inner: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return inner.runpytest_subprocess("-p", "accel", "-p", "xdist", *arguments)


def test_changes_of_a_test_are_an_error_of_that_test(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os

        HERE, PATH = os.getcwd(), os.environ["PATH"]

        def test_sets():
            os.environ["LEFT"] = "1"

        def test_removes():
            del os.environ["PATH"]

        def test_replaces():
            os.environ["PATH"] = "elsewhere"

        def test_goes():
            os.chdir("/")

        def test_next():
            assert (os.getcwd(), os.environ["PATH"], os.environ.get("LEFT")) == (HERE, PATH, None)
        """
    )
    result = run(inner)
    result.assert_outcomes(passed=5, errors=4)
    for test, text in (
        ("sets", "LEFT='1', which was None"),
        ("removes", "PATH=None, which was '*'"),
        ("replaces", "PATH='elsewhere', which was '*'"),
        ("goes", "another working directory"),
    ):
        result.stdout.fnmatch_lines([f"*ERROR at teardown of test_{test}*", "the test has left behind", text])


def test_leaks_of_the_session_are_reported_at_its_end(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os
        import subprocess
        import sys
        import tempfile
        import time

        from pytest_accel.leases.holder import Holder
        from pytest_accel.leases.device_locks import DeviceLocks

        LEFT = []

        def start(number):
            LEFT.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600 + {number})"]))

        def test_child():
            start(1)

        def test_orphan():
            # Its parent is gone, and this process is not among its forebears.
            pid = os.fork()
            if pid == 0:
                start(2)
                os._exit(0)
            os.waitpid(pid, 0)

        def test_fork():
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)

        def test_folder():
            tempfile.mkdtemp(prefix="accel-", dir=os.environ["TMPDIR"])

        def test_lock():
            LEFT.append(DeviceLocks())
            assert LEFT[-1].acquire("GPU-1", Holder.here("this"))

        def test_shared_memory():
            open("shm/accel-1", "a").close()

        def test_last():
            pass
        """
    )
    result = run(inner, "-W", "ignore")
    result.assert_outcomes(passed=7, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_last*", "the tests of this process have left behind"])
    result.stdout.fnmatch_lines_random(
        [
            "process *: * -c import time; time.sleep(600 + 1)",
            "process *: * -c import time; time.sleep(600 + 2)",
            "process *: * -mpytest *",
            "session folder */accel-*",
            "held lock */pytest-accel-GPU-1.lock: {*}",
            "shared memory accel-1",
        ]
    )
    # A set, because under CI pytest's summary repeats the error.
    assert len({line for line in result.outlines if line.startswith("process ")}) == 3
