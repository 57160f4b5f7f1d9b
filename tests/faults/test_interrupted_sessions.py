"""Tests of sessions that are interrupted or lose a process. The fixture `suite` checks for what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.core.processes import MARK
from pytest_accel.features.record.timeline import sessions_of
from tests.background_suite import BackgroundSession, BackgroundSuite, has_ended
from tests.deadline import eventually
from tests.run import CAUSES, Run

ENDLESS_TESTS = """
    import os
    import signal
    import subprocess
    import threading
    from multiprocessing import shared_memory
    from pathlib import Path

    import pytest

    HERE = Path(__file__).parent


    def leave_everything_behind(rank):
        shared_memory.SharedMemory(create=True, size=1 << 16, name=f"RUN-{rank}")
        subprocess.Popen(["sleep", "1000"])
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                os.write(write, b"here")
                while True:
                    signal.pause()
            os._exit(0)
        assert os.read(read, 4) == b"here"


    def wait_for_ever(rank):
        leave_everything_behind(rank)
        (HERE / f"rank-{rank}").write_text(f"{os.getpid()}\\n")
        threading.Event().wait()


    @pytest.mark.distributed(2, init=False)
    def test_passes(rank):
        pass


    @pytest.mark.devices(2)
    def test_other_shape():
        pass


    @pytest.fixture
    def ends_late(rank):
        yield
        wait_for_ever(rank)


    @pytest.mark.distributed(2, init=False)
    def test_endless(rank):
        wait_for_ever(rank)


    @pytest.mark.distributed(2, init=False)
    def test_next():
        pass
"""


def start_waiting_session(suite: BackgroundSuite, *args: str, in_teardown: bool = False) -> BackgroundSession:
    """Start a session and return it when its ranks wait forever in the call of ``test_endless``, or its teardown."""
    tests = ENDLESS_TESTS.replace("RUN-", f"{suite.run_id}-")
    if in_teardown:
        tests = tests.replace(
            "test_endless(rank):\n        wait_for_ever(rank)", "test_endless(ends_late):\n        pass"
        )
    suite.without_torch()
    suite.write("test_it.py", tests)
    session = suite.start(*args)
    for rank in range(2):
        suite.read(f"rank-{rank}")
    return session


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "send"),
    [
        pytest.param([], os.killpg, id="plain"),  # A terminal sends the signal to the process group.
        pytest.param(["-n2"], os.kill, id="xdist controller"),
    ],
)
def test_an_interrupt_leaves_nothing_behind(
    suite: BackgroundSuite, workers: list[str], send: Callable[[int, int], None]
) -> None:
    session = start_waiting_session(suite, *workers)
    send(session.process.pid, signal.SIGINT)
    run = session.finish()
    assert run.ret == pytest.ExitCode.INTERRUPTED
    check_places(run)


def write_driver_hooks(suite: BackgroundSuite, hooks: str) -> None:
    """Make `hooks` a plugin of the driver. Its ``wait()`` writes the file ``driver`` and waits forever."""
    suite.write(
        "conftest.py",
        """
        import os

        pytest_plugins = [] if "WORLD_SIZE" in os.environ else ["driver_hooks"]
        """,
    )
    suite.write(
        "driver_hooks.py",
        """
        import threading
        from pathlib import Path

        import pytest


        def wait():
            Path(__file__).with_name("driver").write_text("here\\n")
            threading.Event().wait()
        """
        + hooks,
    )


def test_an_interrupt_shows_the_ranks_although_the_driver_does_not_wait_for_them(suite: BackgroundSuite) -> None:
    write_driver_hooks(
        suite,
        """
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_teardown(item):
            if item.name == "test_endless":
                wait()
        """,
    )
    session = start_waiting_session(suite, "-k", "not test_other_shape", in_teardown=True)
    suite.read("driver")
    os.killpg(session.process.pid, signal.SIGINT)
    run = session.finish()
    check_places(run)
    assert "- accel: the interrupted ranks of test_it.py::test_endless -" in run.text


def check_places(run: Run) -> None:
    """Check that the output shows once where the interrupted ranks wait."""
    text, _ = run.text.split("KeyboardInterrupt !", 1)
    # The other worker may have been interrupted in a test, too.
    parts = text.split("- accel: the interrupted ranks")[1:]
    (report,) = [part for part in parts if "in wait_for_ever" in part]
    places = re.findall(r"^ranks? (.*): at test_it.py:\d+ in wait_for_ever$", report, re.MULTILINE)
    assert places in (["0-1"], ["0", "1"])
    assert re.search(r"^test_it.py:\d+ in wait_for_ever\n    .+$", report.partition("] stacks ---")[2], re.MULTILINE)


@pytest.mark.long
def test_a_second_interrupt_leaves_nothing_behind(suite: BackgroundSuite) -> None:
    suite.write(
        "conftest.py",
        """
        import os
        import threading
        from pathlib import Path

        if "WORLD_SIZE" not in os.environ:

            def pytest_keyboard_interrupt():
                Path(__file__).with_name("interrupted").write_text("yes\\n")
                threading.Event().wait()
        """,
    )
    session = start_waiting_session(suite)
    session.process.send_signal(signal.SIGINT)
    suite.read("interrupted")
    session.process.send_signal(signal.SIGINT)
    assert session.finish().ret != pytest.ExitCode.OK


@pytest.mark.long
@pytest.mark.parametrize(("workers", "number"), [((), signal.SIGTERM), (("-n2",), signal.SIGKILL)])
def test_a_terminated_or_killed_controller_leaves_nothing_behind(
    suite: BackgroundSuite, workers: tuple[str, ...], number: signal.Signals
) -> None:
    session = start_waiting_session(suite, *workers)
    session.process.send_signal(number)
    session.process.wait()
    suite.expect_nothing_left()
    assert session.process.returncode == -number


def test_a_killed_session_leaves_a_complete_record_and_nothing_else(suite: BackgroundSuite) -> None:
    session = start_waiting_session(suite, "--accel-record=record.jsonl", "--accel=sim:4")
    session.process.kill()
    assert session.finish().ret == -signal.SIGKILL
    path = suite.path / "record.jsonl"
    (recorded,) = sessions_of([read_record(path)])
    assert recorded.finished is None
    verdicts = {run.test.partition("::")[2]: run.verdict for run in recorded.tests}
    assert verdicts == {"test_passes": "passed", "test_other_shape": "passed", "test_endless": "unfinished"}
    *_, endless = recorded.tests
    assert len(endless.lanes) == 2
    assert endless.span.stop == recorded.span.stop
    assert main(["trace", str(path), "-o", str(suite.path / "trace.json")]) == 0
    assert "test_it.py::test_endless" in (suite.path / "trace.json").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_killed_controller_whose_child_lives_on_leaves_nothing_behind(suite: BackgroundSuite) -> None:
    """The forked child keeps the controller's end of every connection open."""
    suite.write(
        "test_first.py",
        """
        import os
        import time
        from pathlib import Path

        TEMPORARY = Path(os.environ["TMPDIR"])


        def test_forks():
            if os.fork() == 0:
                while list(TEMPORARY.glob("accel-*")):
                    time.sleep(0.01)
                os._exit(0)
        """,
    )
    session = start_waiting_session(suite, "test_it.py::test_passes", "test_first.py", "test_it.py::test_endless")
    session.process.kill()
    session.process.wait()


def test_a_controller_killed_while_the_server_starts_leaves_nothing_behind(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", ENDLESS_TESTS.replace("RUN-", f"{suite.run_id}-"))
    session = suite.start()
    session.fork_server()
    session.process.kill()


@pytest.mark.long
def test_a_killed_fork_server_is_reported_and_leaves_nothing_behind(suite: BackgroundSuite) -> None:
    session = start_waiting_session(suite, CAUSES)
    session.fork_server().kill()
    run = session.finish()
    passed = dict.fromkeys(("test_passes", "test_other_shape", "test_next"), "PASSED")
    run.expect({**passed, "test_endless": "FAILED died: server ended; ranks 0-1"})
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_pytest_exit_in_the_driver_ends_the_session_without_waiting_for_its_ranks(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", ENDLESS_TESTS.replace("RUN-", f"{suite.run_id}-"))
    write_driver_hooks(
        suite,
        """
        def pytest_runtest_call(item):
            if item.name == "test_endless":
                pytest.exit("enough", returncode=1)  # With a code of its own, pytest shows no summary.
        """,
    )
    suite.without_torch()
    run = suite.run("-k", "not test_next")
    assert run.outcomes() == {"test_passes": "PASSED", "test_other_shape": "PASSED"}
    assert "Exit: enough" in run.text
    assert "did not end its session" not in run.text


LEFT_BEHIND = """
import os
import time

import pytest
from tests.inner import note, wait_for


@pytest.mark.devices(1)
def test_is_killed():
    note("killed", os.environ["PYTEST_ACCEL_SESSION"])
    time.sleep(1000)


@pytest.mark.devices(1)
def test_lives():
    note("living", os.environ["PYTEST_ACCEL_SESSION"])
    wait_for("go")


@pytest.mark.devices(1)
def test_comes_next(): ...
"""


def kill_at_once(suite: BackgroundSuite, session: str) -> None:
    """Kill all processes of Python of the session with this mark, without giving any of them time to act."""
    found = []
    for process in suite.processes():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(os.path.dirname(session)):
                found += [process, *process.parents()[:1]]
    processes = [process for process in found if process.pid != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
    eventually("the session to end", lambda: all(map(has_ended, processes)))


def test_the_folder_of_a_session_whose_processes_were_killed_at_once_is_removed_by_the_next(
    suite: BackgroundSuite,
) -> None:
    suite.without_torch()
    suite.write("test_it.py", LEFT_BEHIND)
    killed, living = suite.start("-k", "test_is_killed"), suite.start("-k", "test_lives")
    mark, living_mark = suite.read("killed").strip(), suite.read("living").strip()
    folder, living_folder = Path(os.path.dirname(mark)), Path(os.path.dirname(living_mark))
    kill_at_once(suite, mark)
    killed.process.wait()
    assert folder.exists()
    # Folders that only look like those of a dead session of this user: a link, one of another user, one without a lock.
    link, victim, foreign, plain = (suite.temporary / f"{name}" for name in ("accel-l", "victim", "accel-f", "accel-p"))
    for path in (victim, foreign, plain):
        path.mkdir(mode=0o700)
    for path in (victim, foreign):
        (path / "session.lock").write_text("\n")
    link.symlink_to(victim)
    if os.geteuid() == 0:
        os.chown(foreign, 1002, -1)
    else:
        foreign.chmod(0o750)
    suite.run("-k", "test_comes_next").expect({"test_comes_next": "PASSED"})
    assert not folder.exists()
    assert living_folder.exists()
    suite.write("go", "")
    living.finish().expect({"test_lives": "PASSED"})
    link.unlink()
    for path in (victim, foreign, plain):
        shutil.rmtree(path)
