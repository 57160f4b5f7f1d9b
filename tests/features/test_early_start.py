"""Tests of the fork server that starts before conftests are imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.background_suite import suite

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite

__all__ = ["suite"]

_CONFTEST = """
    import os
    from pathlib import Path

    import psutil

    def note(name, value):
        Path(__file__).with_name(name).write_text(f"{value}\\n")

    if not os.environ.get("PYTEST_XDIST_WORKER"):  # Ranks have it, too.
        # Not Process.children(), which compares times that change with the clock of the machine. Each process is read
        # once, since others end meanwhile.
        processes = [process.info for process in psutil.process_iter(["pid", "ppid", "cmdline"])]
        children = [process for process in processes if process["ppid"] == os.getpid()]
        servers = [child["pid"] for child in children if "server import main" in " ".join(child["cmdline"] or ())]
        note("early", servers)
    """
_TESTS = """
    import os

    import pytest

    from conftest import note

    @pytest.mark.distributed(1, init=False)
    def test_it():
        note("used", [os.getppid()])
        note("variables", [os.environ.get("VARIABLE"), os.environ.get("CUDA_LAUNCH_BLOCKING")])

    def test_unmarked(): ...
    """


@pytest.mark.parametrize(("name", "is_read_later"), [("FOR_TORCH", False), ("NCCL_DEBUG", True)])
def test_the_early_server_becomes_the_fork_server_unless_a_conftest_changes_what_torch_reads_at_its_import(
    suite: BackgroundSuite, name: str, is_read_later: bool
) -> None:
    suite.write(
        "conftest.py",
        f"{_CONFTEST}\n    os.environ[{name!r}] = 'set'\n    os.environ.pop('CUDA_LAUNCH_BLOCKING', None)\n",
    )
    suite.write("test_it.py", _TESTS.replace("VARIABLE", name))
    run = suite.start(environment={"CUDA_LAUNCH_BLOCKING": "1"}).finish()
    assert run.count() == {"PASSED": 2}
    assert suite.read("variables") == "['set', None]"
    assert suite.read("early") != "[]"
    assert (suite.read("used") == suite.read("early")) == is_read_later


def test_a_module_of_the_suite_is_found_before_one_of_the_same_name(suite: BackgroundSuite) -> None:
    # All modules of the server are imported with the suite's folders on the path, as without an early server.
    (suite.path / "tests").mkdir()
    suite.write("tests/bisect.py", "from _bisect import *\n\nbisect, insort, ours = bisect_right, insort_right, True\n")
    suite.write("tests/conftest.py", _CONFTEST)
    suite.write(
        "tests/test_it.py",
        """
        import bisect

        import pytest

        @pytest.mark.distributed(1, init=False)
        def test_it():
            assert bisect.ours
        """,
    )
    assert suite.run("tests").count() == {"PASSED": 1}
    assert suite.read("tests/early") != "[]"


@pytest.mark.parametrize("options", [("-k", "unmarked"), ("--collect-only",)], ids="".join)
def test_an_unused_early_server_ends_with_the_session(suite: BackgroundSuite, options: tuple[str, ...]) -> None:
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_it.py", _TESTS)
    run = suite.run(*options)
    assert run.ret == 0
    assert (suite.read("early") != "[]") == (options[0] == "-k")  # The other options tell that no server is needed.
    suite.expect_nothing_left()


_IDLE = """
    import time

    server = psutil.Process(servers[0])
    used = []
    while len(used) < 10 or used[-1] < 0.5 or used[-10] != used[-1]:
        used.append(sum(server.cpu_times()[:2]))
        time.sleep(0.05)
    """


_FORK = """
    if os.fork() == 0:  # The process keeps the controller's connections open, and ends after the server.
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
        os._exit(0)
    """


def test_the_early_server_ends_with_a_killed_controller(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", f"{_CONFTEST}\n{_IDLE}{_FORK}\n    os.kill(os.getpid(), 9)\n")
    suite.write("test_it.py", _TESTS)
    assert suite.run().ret == -signal.SIGKILL
    assert suite.read("early") != "[]"
    suite.expect_nothing_left()


def test_the_early_server_ends_if_a_conftest_fails(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", f"{_CONFTEST}\n    raise RuntimeError\n")
    suite.write("test_it.py", _TESTS)
    assert suite.run().ret == pytest.ExitCode.USAGE_ERROR
    suite.expect_nothing_left()


_DEMOTE = """
    import ctypes
    import os

    import pytest


    def demote():
        \"\"\"Become nobody, who may still read all files: those of the interpreter may be closed to others.\"\"\"
        libc, capability, read = ctypes.CDLL(None, use_errno=True), 2, 1 << 2  # CAP_DAC_READ_SEARCH
        assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(read, read, read)) == 0
        assert libc.prctl(47, 2, capability, 0, 0) == 0  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE
    """
_DEMOTED_TESTS = """
    import os

    import pytest


    def test_unmarked(tmp_path):
        assert os.getuid() == 65534


    @pytest.mark.distributed(2, init=False)
    def test_ranks(rank, shared_tmp_path):
        assert os.getresuid() == (65534,) * 3
        assert os.getresgid() == (65534,) * 3
        assert os.getgroups() == []
        (shared_tmp_path / str(rank)).touch()
    """
_gives_up_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can give up root")


@_gives_up_root
@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("    if os.getuid() == 0:\n        demote()\n", ()),
        ("    def pytest_configure():\n        if os.getuid() == 0:\n            demote()\n", ("-n1",)),
    ],
    ids=["import", "configure-n1"],
)
def test_a_conftest_that_gives_up_root(suite: BackgroundSuite, call: str, options: tuple[str, ...]) -> None:
    """The session cannot kill the early server, which is root's, and cannot use its folder."""
    suite.temporary.chmod(0o1777)
    suite.write("conftest.py", f"{_DEMOTE}\n\n{call}")
    suite.write("test_it.py", _DEMOTED_TESTS)
    run = suite.run(*options)
    run.expect({"test_unmarked": "PASSED", "test_ranks": "PASSED"})
    suite.expect_nothing_left()
