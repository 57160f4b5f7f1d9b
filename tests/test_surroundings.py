"""The checks of ``conftest.py`` on suites that do leave something behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")

CONFTEST = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
IMPATIENT = CONFTEST.replace("_PATIENCE = 15.0\n", "_PATIENCE = 0.0\n")


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty suite with the project's own checks, which do not wait."""
    assert IMPATIENT != CONFTEST
    pytester.makeconftest(IMPATIENT)
    return pytester


TIDY = """
    import os
    import subprocess
    import sys
    import tempfile

    import pytest


    @pytest.mark.parametrize("number", range(2))
    def test_tidy(number, monkeypatch, tmp_path, capfd):
        monkeypatch.setenv("SET", "1")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.chdir(tmp_path)
        subprocess.run([sys.executable, "-c", ""], check=True)
        with open("/dev/shm/accel-test", "a"):
            os.unlink("/dev/shm/accel-test")
    """


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_tidy_tests_pass(inner: pytest.Pytester, workers: tuple[str, ...]) -> None:
    inner.makepyfile(TIDY)
    inner.runpytest_subprocess(*workers).assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("os.environ['LEFT'] = '1'", "LEFT='1', which was None"),
        ("del os.environ['PATH']", "PATH=None, which was '*"),
        ("os.environ['PATH'] += ':'", "PATH='*:', which was '*'"),
        ("os.chdir('/')", "another working directory"),
    ],
)
def test_what_a_test_changes_is_its_own_error(inner: pytest.Pytester, code: str, text: str) -> None:
    inner.makepyfile(
        f"""
        import os

        HERE = os.getcwd()

        def test_changes():
            {code}

        def test_next():
            assert "LEFT" not in os.environ and os.environ["PATH"]
            assert os.getcwd() == HERE
        """
    )
    result = inner.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_changes*", "the test has left behind", text])


STARTED = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (f"LEFT.append({STARTED})", "process *: *python* -c import time*"),
        # Its parent is gone, and this process is not among its forebears.
        (f"os.fork() or ({STARTED}, os._exit(0)); os.wait()", "process *: *python* -c import time*"),
        ("os.fork() or (time.sleep(600), os._exit(0))", "process *: *python* -mpytest *"),
        ("tempfile.mkdtemp(prefix='accel-', dir=os.environ['TMPDIR'])", "session folder */accel-*"),
        ("LEFT.append(open(f'/dev/shm/accel-{os.getpid()}', 'a')); LEFT[0].close()", "shared memory accel-*"),
        ("LEFT.append(DeviceLocks()); LEFT[0].try_acquire('GPU-1', Holder.here('this'))", "held lock *GPU-1.lock: {*}"),
    ],
)
def test_what_all_tests_leave_is_told_at_the_end(inner: pytest.Pytester, code: str, text: str) -> None:
    inner.makepyfile(
        f"""
        import os
        import subprocess
        import sys
        import tempfile
        import time

        from pytest_accel.leases.locks import DeviceLocks, Holder

        LEFT = []

        def test_leaves_something():
            {code}

        def test_last():
            pass
        """
    )
    try:
        result = inner.runpytest_subprocess("-p", "no:randomly", "-W", "ignore")
    finally:
        for path in Path("/dev/shm").glob("accel-[0-9]*"):
            path.unlink()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_last*", "the tests of this process have left behind", text]
    )


def test_workers_look_each_after_their_own(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os
        import tempfile

        import pytest

        @pytest.mark.parametrize("number", range(2))
        def test_leaves_a_folder(number, worker_id):
            tempfile.mkdtemp(prefix=f"accel-{worker_id}-", dir=os.environ["TMPDIR"])
        """
    )
    result = inner.runpytest_subprocess("-n2", "--dist=each", "-p", "no:randomly")
    result.assert_outcomes(passed=4, errors=2)
    for worker in ("gw0", "gw1"):
        result.stdout.fnmatch_lines_random([f"session folder *accel-{worker}-*"])
