"""Tests of the lock files of devices, and of the wait files in which sessions publish their requests."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.holder import Holder, parse_holder
from pytest_accel.leases.request_queue import parse_waits, wait_files
from pytest_accel.leases.shared_folder import (
    PREFIX,
    VARIABLE,
    LockFolderError,
    default_folder,
    file_name,
    lock_path,
)

ME = Holder.here("tests/test_x.py::test_one")
NOW = time.time()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


Make = Callable[[], DeviceLocks]


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Yield a function that makes the locks of one session; close all of them at the end."""
    made: list[DeviceLocks] = []

    def one() -> DeviceLocks:
        made.append(DeviceLocks(folder))
        return made[-1]

    yield one
    for locks in made:
        locks.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def created(process: subprocess.Popen[bytes]) -> float:
    return psutil.Process(process.pid).create_time()


def test_a_device_is_locked_by_one_session_at_a_time(make: Make) -> None:
    one, two = make(), make()
    assert one.acquire("GPU-1", ME)
    assert not two.acquire("GPU-1", ME)
    assert two.acquire("GPU-2", ME)
    one.unlock("GPU-1")
    assert two.acquire("GPU-1", ME)
    two.close()
    assert one.acquire("GPU-1", ME)
    assert one.acquire("GPU-2", ME)
    one.close()


def test_the_holder_is_known_while_it_holds_the_lock(folder: Path, make: Make, child: subprocess.Popen[bytes]) -> None:
    one, two = make(), make()
    assert two.holder("GPU-1") is None
    one.acquire("GPU-1", ME)
    assert two.holder("GPU-1") == one.holder("GPU-1") == ME
    changed = replace(ME, test="t::x", processes=((child.pid, created(child)),))
    one.describe("GPU-1", changed)
    assert two.holder("GPU-1") == changed
    one.describe("GPU-1", ME)
    assert two.holder("GPU-1") == ME
    one.unlock("GPU-1")
    assert two.holder("GPU-1") is None
    assert lock_path(folder, "GPU-1").read_bytes() == b""


def test_a_device_is_blocked_while_a_process_of_its_last_lease_lives(
    make: Make, child: subprocess.Popen[bytes]
) -> None:
    one, two = make(), make()
    one.acquire("GPU-1", replace(ME, processes=((child.pid, created(child)),)))
    one.unlock("GPU-1")
    assert not two.acquire("GPU-1", ME)
    assert not one.acquire("GPU-1", ME)
    child.kill()
    # The killed process remains a zombie until its exit status is read. A zombie must not block the device.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert two.acquire("GPU-1", ME)
    two.close()


def test_a_record_of_any_length_shows_the_living_process_of_a_lease(make: Make, child: subprocess.Popen[bytes]) -> None:
    """The id of a parametrized test may have any length, and a lease thousands of processes."""
    one, two = make(), make()
    others = tuple((2**31 - 1 - number, 1764209738.12) for number in range(8000))
    holder = replace(ME, test="é" * 300_000, processes=(*others, (child.pid, created(child))))
    assert one.acquire("GPU-1", ME)
    one.describe("GPU-1", holder)
    one.unlock("GPU-1")
    assert not two.acquire("GPU-1", ME)
    shown = two.holder("GPU-1")
    assert shown is not None
    assert shown.processes == holder.processes
    assert shown.test == "é" * 299 + "…"
    child.kill()
    child.wait()
    assert two.acquire("GPU-1", ME)


@pytest.mark.parametrize("cut", [slice(60), slice(-9)])
def test_an_incomplete_record_holds_the_device_while_a_process_in_it_lives(
    folder: Path, make: Make, child: subprocess.Popen[bytes], cut: slice
) -> None:
    one, two = make(), make()
    one.acquire("GPU-1", replace(ME, processes=((child.pid, created(child)),)))
    one.unlock("GPU-1")
    path = lock_path(folder, "GPU-1")
    path.write_bytes(path.read_bytes()[cut])
    assert not two.acquire("GPU-1", ME)
    assert str(two.holder("GPU-1")) == f"an unknown session, whose record names pid {child.pid}"
    child.kill()
    child.wait()
    assert two.holder("GPU-1") is None
    assert two.acquire("GPU-1", ME)


def test_another_process_with_the_pid_of_a_dead_one_blocks_nothing(make: Make, child: subprocess.Popen[bytes]) -> None:
    locks = make()
    locks.acquire("GPU-1", replace(ME, processes=((child.pid, created(child) - 60),)))
    locks.unlock("GPU-1")
    assert locks.acquire("GPU-1", ME)
    locks.close()


def plant(folder: Path, content: bytes) -> None:
    path = lock_path(folder, "GPU-1")
    path.write_bytes(content)
    path.chmod(0o666)


def lock_content(**changes: str) -> bytes:
    """Return the content of a lock file with `changes`, which need not be JSON."""
    fields = {"pid": "7", "user": '"u"', "test": '"t"', "since": "5.0", "processes": "[]"} | changes
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


@pytest.mark.parametrize(
    "content",
    [
        b"garbage\xff",
        b"[]",
        b'{"pid": 1}',
        b"[" * 9999,
        lock_content(processes="[[1]]"),
        lock_content(processes="[7]"),
        lock_content(pid="-5"),
        lock_content(pid="1e400"),
        lock_content(pid="1" + "0" * 400),
        lock_content(since="Infinity"),
        lock_content(since="NaN"),
        lock_content(since="1" + "0" * 400),
    ],
)
def test_invalid_content_of_a_lock_file_is_ignored(folder: Path, make: Make, content: bytes) -> None:
    one, two = make(), make()
    plant(folder, content)
    assert one.acquire("GPU-1", ME)
    plant(folder, content)
    shown = two.holder("GPU-1")
    assert shown is not None
    assert shown.pid == 0
    one.close()


def test_text_of_another_user_is_made_printable_and_truncated() -> None:
    holder = parse_holder(lock_content(user='"\\u001b[2J"', test='"a\\nb\\ud800' + "x" * 9999 + '"'))
    assert holder is not None
    assert holder.user == "?[2J"
    assert holder.test.startswith("a?b?xxx")
    assert len(holder.test) == 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.integers(10**300, 10**310),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
holder_like = st.fixed_dictionaries(
    {},
    optional={
        "pid": st.integers() | json_values,
        "user": st.text() | json_values,
        "test": st.text() | json_values,
        "since": st.floats() | st.integers() | json_values,
        "processes": st.lists(st.tuples(st.integers() | json_values, st.floats() | json_values)) | json_values,
    },
)


@given(st.binary() | (holder_like | json_values).map(lambda value: json.dumps(value).encode()))
def test_values_from_any_lock_file_are_printable_and_in_range(data: bytes) -> None:
    holder = parse_holder(data)
    if holder is not None:
        assert 0 <= holder.pid < 2**31, "0: it is not known"
        time.localtime(holder.since)
        assert (holder.user + holder.test).isprintable()
        for pid, created in holder.processes:
            assert 0 < pid < 2**31
            assert 0 <= created < 1e12


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_times_from_any_wait_file_are_in_range(data: bytes) -> None:
    now = 1e9
    assert all(abs(since - now) <= 30 * 24 * 3600 for since in parse_waits(data, now).values())


def test_files_are_writable_for_all_users_whatever_the_umask(folder: Path, make: Make) -> None:
    before = os.umask(0o077)
    try:
        locks = make()
        locks.acquire("GPU-1", ME)
        locks.wait_file.publish({"GPU-2": NOW})
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE(lock_path(folder, "GPU-1").stat().st_mode) == 0o666
    (wait_file,) = wait_files(folder)
    assert stat.S_IMODE(wait_file.stat().st_mode) == 0o644
    locks.close()
    assert [path.name for path in folder.iterdir()] == ["pytest-accel-GPU-1.lock"]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # A path of a socket must be short.


def _closed_file(path: Path) -> None:
    path.touch(0o644)


OTHER_ENTRIES: dict[str, Callable[[Path], object]] = {
    "a symbolic link": lambda path: path.symlink_to(path.with_name("precious")),
    "a directory": Path.mkdir,
    "a socket": _socket,
    "no regular file": os.mkfifo,
    "its mode is 0644, and not 0666": _closed_file,
}


@pytest.mark.parametrize("what", OTHER_ENTRIES)
@pytest.mark.parametrize("dangling", [False, True])
def test_something_else_with_the_name_of_a_lock_file_holds_the_device(
    folder: Path, make: Make, what: str, dangling: bool
) -> None:
    """Any user can make it. A named pipe does not block the session, and a symbolic link is not followed."""
    locks = make()
    path = lock_path(folder, "GPU-1")
    target = folder / "precious"
    if not dangling:
        target.write_text("precious")
        target.chmod(0o666)
    OTHER_ENTRIES[what](path)
    assert not locks.acquire("GPU-1", ME)
    assert locks.acquire("GPU-2", ME)
    assert str(locks.holder("GPU-1")) == f"{path}, which is no lock file ({what})"
    assert target.exists() != dangling
    assert dangling or target.read_text() == "precious"
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    assert locks.acquire("GPU-1", ME)


def test_a_folder_that_is_a_symbolic_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LockFolderError, match=r"locks is not a directory \(symbolic links are not allowed\)"):
        DeviceLocks(folder)


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with pytest.raises(LockFolderError, match=rf"missing/locks: No such file.*{VARIABLE}"):
        DeviceLocks(tmp_path / "missing" / "locks")


def test_a_folder_that_is_not_writable_is_named(open_folder: Path) -> None:
    locked = open_folder / "locks"
    locked.mkdir()
    locked.chmod(0o555)
    found = as_another_user(
        "import sys, pathlib\n"
        "from pytest_accel.leases.shared_folder import LockFolderError\n"
        "from pytest_accel.leases.device_locks import DeviceLocks\n"
        "try: DeviceLocks(pathlib.Path(sys.argv[1]))\n"
        "except LockFolderError as error: print(error)",
        str(locked),
    )
    assert f"{locked} is not writable for this user" in found


def test_the_lock_folder_is_the_same_for_all_sessions_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("TMPDIR", "TEMP", "TMP", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_folder() == Path("/tmp").resolve()
    monkeypatch.setenv(VARIABLE, "/named/folder")
    assert default_folder() == Path("/named/folder")


def test_published_requests_are_seen_by_other_sessions(folder: Path, make: Make) -> None:
    one, two, three = (make() for _ in range(3))
    one.wait_file.publish({"GPU-1": NOW + 20, "GPU-2": NOW + 20})
    two.wait_file.publish({"GPU-1": NOW + 10})
    assert three.wait_file.others() == {"GPU-1": NOW + 10, "GPU-2": NOW + 20}
    assert one.wait_file.others() == {"GPU-1": NOW + 10}
    assert "GPU-2" in two.wait_file.others()
    assert "GPU-2" not in one.wait_file.others()
    two.wait_file.publish({"GPU-3": NOW + 10})
    assert one.wait_file.others() == {"GPU-3": NOW + 10}
    two.wait_file.publish({})
    assert three.wait_file.others() == {"GPU-1": NOW + 20, "GPU-2": NOW + 20}
    one.close()
    two.close()
    assert three.wait_file.others() == {}
    assert wait_files(folder) == []


@pytest.mark.parametrize("offset", [-10.0, 10.0])
def test_a_published_request_that_is_not_refreshed_is_ignored(folder: Path, make: Make, offset: float) -> None:
    one, two = make(), make()
    one.wait_file.publish({"GPU-1": NOW})
    (wait_file,) = wait_files(folder)
    os.utime(wait_file, (time.time() + offset,) * 2)
    assert "GPU-1" not in two.wait_file.others()
    assert wait_file.exists()
    os.utime(wait_file, (time.time() - 100,) * 2)
    assert "GPU-1" not in two.wait_file.others()
    assert not wait_file.exists(), "the file of a dead session is removed"
    one.close()


def test_an_invalid_published_request_is_ignored(folder: Path, make: Make) -> None:
    locks = make()
    planted = ["garbage", "[]", '{"GPU-1": "soon"}', '{"GPU-1": null}', json.dumps([[]]), "[" * 9999]
    numbers = ["Infinity", "-Infinity", "NaN", "1e400", "-1e400", "0", "1e300", "-5", "1" + "0" * 400, "true"]
    planted += [f'{{"GPU-1": {number}}}' for number in numbers]
    for number, content in enumerate(planted):
        (folder / f"{PREFIX}{number}.wish").write_text(content)
    (folder / f"{PREFIX}link.wish").symlink_to(folder / f"{PREFIX}0.wish")
    assert locks.wait_file.others() == {}
    (folder / f"{PREFIX}real.wish").write_text(f'{{"GPU-1": {NOW}, "GPU-2": -Infinity}}')
    assert locks.wait_file.others() == {"GPU-1": NOW}


def test_a_session_takes_over_a_device_that_it_has_locked(make: Make) -> None:
    one, two = make(), make()
    for device in ("GPU-1", "GPU-2"):
        one.acquire(device, ME)
    assert not two.acquire("GPU-1", ME)
    assert one.acquire("GPU-1", replace(ME, test="the next one"))
    one.unlock("GPU-2")
    shown = two.holder("GPU-1")
    assert shown is not None
    assert shown.test == "the next one"
    assert not two.acquire("GPU-1", ME)
    assert two.acquire("GPU-2", ME)


def test_a_deleted_lock_file_allows_no_second_lock(folder: Path, make: Make) -> None:
    one, two = make(), make()
    one.acquire("GPU-1", ME)
    one.unlock("GPU-1")
    lock_path(folder, "GPU-1").unlink()
    assert two.acquire("GPU-1", ME)
    assert not one.acquire("GPU-1", ME)
    two.unlock("GPU-1")
    assert one.acquire("GPU-1", ME)


def test_a_lock_file_that_is_deleted_or_moved_while_it_is_held_is_created_again(folder: Path, make: Make) -> None:
    one, two = make(), make()
    for device in ("GPU-1", "GPU-2", "GPU-3"):
        assert one.acquire(device, replace(ME, test=device))
    assert one.renew_missing() == {}
    lock_path(folder, "GPU-1").unlink()
    folder.rename(folder.with_name("moved"))
    # Another session locks one of the devices before the first session checks its files.
    assert two.acquire("GPU-3", ME)
    lost = one.renew_missing()
    assert lost.keys() == {"GPU-3"}
    assert lost["GPU-3"].startswith("the lock of GPU-3 was lost, since its lock file was deleted or moved: ")
    assert re.search(rf"GPU-3\.lock: it was replaced.*held by pid {os.getpid()} .*test_one", lost["GPU-3"])
    assert one.renew_missing() == {}
    assert "GPU-3" not in one.locked
    for device in ("GPU-1", "GPU-2"):
        assert not two.acquire(device, ME)
        shown = two.holder(device)
        assert shown is not None
        assert shown.test == device
        one.unlock(device)
        assert two.acquire(device, ME)


FORK = """
import os, sys, pathlib
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.device_locks import DeviceLocks
locks = DeviceLocks(pathlib.Path(sys.argv[1]))
assert locks.acquire("GPU-1", Holder.here("forks"))
if os.fork() == 0:
    print("forked", flush=True)
sys.stdin.read()
"""


def test_a_forked_process_keeps_no_lock(folder: Path, make: Make) -> None:
    command = [sys.executable, "-c", FORK, str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == b"forked\n"
        locks = make()
        assert not locks.acquire("GPU-1", ME)
        session.kill()
        session.wait()
        assert locks.acquire("GPU-1", ME)
        session.communicate()


@given(st.text(min_size=1), st.text(min_size=1))
def test_file_names_are_safe_and_distinct(one: str, two: str) -> None:
    name = file_name(one)
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
    assert not name.startswith(".")
    assert len(name) <= 120
    assert (name == file_name(two)) == (one == two)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a temporary folder that every user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_another_user(script: str, *arguments: str) -> str:
    """Run `script` as another user and return its output; skip the test unless this user is root."""
    if os.getuid() != 0:
        pytest.skip("needs root, to run a process as another user")
    # The user changes after the import, because only root may be able to read the interpreter's files.
    drop = (
        "import os, pwd, pytest_accel.leases.device_locks; them = pwd.getpwnam('nobody')\n"
        "os.setgroups([]); os.setgid(them.pw_gid); os.setuid(them.pw_uid)\n"
    )
    command = [sys.executable, "-c", drop + script, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def publishing(locks: DeviceLocks, since: dict[str, float]) -> Iterator[None]:
    """Publish what a session waits for, as often as a session does, as long as the context lasts."""
    done = threading.Event()

    def publish() -> None:
        while not done.wait(0.5):
            locks.wait_file.publish(since)

    locks.wait_file.publish(since)
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


TAKE = """
import sys, pathlib
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.device_locks import DeviceLocks
locks = DeviceLocks(pathlib.Path(sys.argv[1]))
seen, taken = locks.holder("GPU-1") is not None, locks.acquire("GPU-1", Holder.here("theirs"))
print(seen, taken, "GPU-1" in locks.wait_file.others())
locks.wait_file.publish({"GPU-1": float(sys.argv[2])})
locks.close()
"""


def test_two_users_share_the_temporary_directory(open_folder: Path) -> None:
    open_folder.chmod(0o1777)
    assert as_another_user(TAKE, str(open_folder), str(NOW)) == "False True False"
    mine = DeviceLocks(open_folder)
    assert lock_path(open_folder, "GPU-1").stat().st_uid != os.getuid()
    assert mine.acquire("GPU-1", ME)
    with publishing(mine, {"GPU-1": NOW}):
        assert as_another_user(TAKE, str(open_folder), str(NOW)) == "True False True"
    mine.close()
    assert as_another_user(TAKE, str(open_folder), str(NOW)) == "False True False"


REFUSED = """
import os, sys, pathlib
from pytest_accel.leases.shared_folder import LockFolderError
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.device_locks import DeviceLocks
try:
    locks = DeviceLocks(pathlib.Path(sys.argv[1]))
    if not locks.acquire("GPU-1", Holder.here("theirs")):
        print(locks.holder("GPU-1"))
except LockFolderError as error:
    print(error)
"""


def test_a_folder_or_file_that_another_user_could_replace_is_refused(open_folder: Path) -> None:
    folder = open_folder / "locks"
    open_folder.chmod(0o1777)
    assert as_another_user(REFUSED, str(folder)) == "", "the folder belongs to the user who made it"
    with pytest.raises(
        LockFolderError, match=rf"locks belongs to nobody.*install -d -m 1777.*{VARIABLE} names another"
    ):
        DeviceLocks(folder)
    for path in folder.iterdir():
        path.unlink()
    os.chown(folder, 0, 0)
    assert as_another_user(REFUSED, str(folder)) == ""
    folder.chmod(0o777)
    assert "locks has mode 0777: other users may write to it" in as_another_user(REFUSED, str(folder))
    folder.chmod(0o1777)
    path = lock_path(folder, "GPU-1")
    # Like a hard link to a file of another user, which some systems allow (sysctl fs.protected_hardlinks).
    path.chmod(0o644)
    os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    assert as_another_user(REFUSED, str(folder)) == f"{path}, which is no lock file (its mode is 0644, and not 0666)"
    path.chmod(0o600)
    os.chown(path, 0, -1)
    assert as_another_user(REFUSED, str(folder)) == f"{path}, which is no lock file (this user may not open it)"
