"""Tests of the locks between sessions: devices, wishes for them, and what other users put in their place."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.leases.demand import Holder, decode
from pytest_accel.leases.locks import SessionLocks, who_holds, who_keeps
from pytest_accel.leases.shared_folder import VARIABLE, LockFolderError, default_folder, file_name, lock_path
from tests.other_user import NEEDS_ROOT, OTHER_USER, run_as_other_user

ROOT = Path(__file__).parents[2]
ME = Holder.here("tests/test_x.py::test_one")
Make = Callable[[], SessionLocks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """Yield a function that makes the locks of one session; close all of them at the end."""
    made: list[SessionLocks] = []

    def one() -> SessionLocks:
        made.append(SessionLocks(folder))
        return made[-1]

    yield one
    for locks in made:
        locks.close()


@contextmanager
def program(script: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a Python program with the argument `folder` until the end of the block; yield it and its first line."""
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode()
        finally:
            process.kill()


def test_a_device_is_locked_by_one_session_at_a_time(folder: Path, make: Make) -> None:
    one, two = make(), make()
    assert one.lock("GPU-1")
    assert not two.lock("GPU-1")
    assert two.lock("GPU-2")
    one.describe("GPU-1", ME)
    assert who_holds(folder, "GPU-1") == ME
    one.describe("GPU-1", replace(ME, test="t"))
    assert who_holds(folder, "GPU-1") == replace(ME, test="t"), "also if the new line is shorter"
    one.unlock("GPU-1")
    assert who_holds(folder, "GPU-1") is None
    assert two.lock("GPU-1")
    two.close()
    assert one.lock("GPU-1")
    assert one.lock("GPU-2")


def test_the_locks_of_a_killed_session_are_free_at_once_although_it_has_forked(folder: Path, make: Make) -> None:
    fork = (
        "import os, sys; from pathlib import Path; from pytest_accel.leases.demand import Holder\n"
        "from pytest_accel.leases.locks import SessionLocks\n"
        "locks = SessionLocks(Path(sys.argv[1])); assert locks.lock('GPU-1')\n"
        "locks.wish({'GPU-1': Holder.here('a'), 'GPU-2': Holder.here('a')})\n"
        "if os.fork() == 0: print('forked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with program(fork, folder) as (session, line):
        assert line == "forked\n"
        locks = make()
        assert not locks.lock("GPU-1")
        assert locks.is_wished_elsewhere("GPU-2")
        session.kill()
        session.wait()
        assert locks.lock("GPU-1")
        assert not locks.is_wished_elsewhere("GPU-2")
        session.communicate()


# Wishes


def wishes(locks: SessionLocks, devices: Sequence[str]) -> str:
    """Wish for `devices`; return those for which the session has the wish."""
    locks.wish(dict.fromkeys(devices, ME))
    return "".join(device for device in devices if locks.wishes(device))


def test_sessions_that_wait_for_a_device_are_the_next_in_the_order_in_which_they_have_come(make: Make) -> None:
    first, second, third, holder = (make() for _ in range(4))
    assert wishes(first, "ab") == "ab"
    assert wishes(second, "ab") == ""
    assert wishes(third, "ab") == ""
    assert holder.is_wished_elsewhere("a")
    assert second.is_wished_elsewhere("b")
    assert not first.is_wished_elsewhere("b"), "it is its own"
    first.step_back("ab")
    assert wishes(first, "ab") == "", "it has had its turn, and the second session waits"
    assert wishes(third, "ab") == ""
    assert wishes(second, "ab") == "ab"
    second.wish({})
    assert wishes(third, "ab") == "ab", "the other one has no right to be first, and has not tried"
    for locks in (first, second, third):
        locks.wish({})
    assert not holder.is_wished_elsewhere("a")


def test_no_two_sessions_wait_for_each_others_wishes(make: Make) -> None:
    one, two = make(), make()
    assert wishes(one, "b") == "b"
    assert wishes(two, "a") == "a"
    assert wishes(one, "ab") == "", "the later one is dropped, since the earlier one is not to be had"
    assert wishes(two, "ab") == "ab"
    two.wish({})
    assert wishes(one, "ab") == "ab"


# Lock files, and what has their names


def content(**changes: str) -> bytes:
    """Return the content of a lock file with `changes`, which need not be JSON."""
    fields = {"pid": "7", "user": '"u"', "test": '"t"', "since": "5.0"} | changes
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


def test_invalid_content_of_a_lock_file_is_ignored(folder: Path, make: Make) -> None:
    changes = [{"pid": "-5"}, {"pid": "0"}, {"pid": "1e400"}, {"pid": "1" + "0" * 400}]
    changes += [{"since": "Infinity"}, {"since": "NaN"}, {"since": "1" + "0" * 400}, {"test": "7"}]
    invalid = [b"", b"garbage\xff", b"[]", b'{"pid": 1}', b"[" * 9999, *(content(**one) for one in changes)]
    one, two, path = make(), make(), lock_path(folder, "GPU-1")
    assert decode(content()) == Holder(7, "u", "t", 5.0)
    for line in invalid:
        path.write_bytes(line)
        path.chmod(0o666)
        assert one.lock("GPU-1")
        assert str(who_holds(folder, "GPU-1")) == "an unknown session", line
        assert not two.lock("GPU-1")
        one.unlock("GPU-1")


def test_texts_are_printable_and_truncated(folder: Path, make: Make) -> None:
    holder = decode(content(user='"\\u001b[2J"', test='"a\\nb' + "x" * 9999 + '"'))
    assert holder is not None
    assert holder.user == "?[2J"
    assert holder.test.startswith("a?bxxx")
    assert len(holder.test) == 300
    locks = make()
    locks.lock("GPU-1")
    locks.describe("GPU-1", replace(ME, test="\udcff" + "é" * 300_000))
    shown = who_holds(folder, "GPU-1")
    assert shown is not None
    assert shown.test == "?" + "é" * 298 + "…"


def test_files_are_writable_for_all_users_whatever_the_umask(folder: Path, make: Make) -> None:
    before = os.umask(0o077)
    try:
        locks, other = make(), make()
        locks.lock("GPU-1")
        locks.wish({"GPU-1": ME})
        other.wish({"GPU-1": ME})
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {f"pytest-accel-GPU-1.{what}": 0o666 for what in ("lock", "wish", "next")}


def _socket(path: Path) -> None:
    # A path of a socket must be short.
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory(dir="/tmp") as short:
        listener.bind(f"{short}/socket")
        os.rename(f"{short}/socket", path)


OTHER_ENTRIES: dict[str, Callable[[Path], object]] = {
    "lrwxrwxrwx": lambda path: path.symlink_to(path.with_name("precious")),
    "drwxr-xr-x": Path.mkdir,
    "srwxr-xr-x": _socket,
    "prw-r--r--": os.mkfifo,
    "-rw-r--r--": lambda path: path.touch(0o644),
}


@pytest.mark.parametrize("what", OTHER_ENTRIES)
@pytest.mark.parametrize("dangling", [False, True])
def test_something_else_with_the_name_of_a_lock_file_holds_the_device(
    folder: Path, make: Make, what: str, dangling: bool
) -> None:
    """Any user can make it. A named pipe does not block the session, and a symbolic link is not followed."""
    locks = make()
    path, target = lock_path(folder, "GPU-1"), folder / "precious"
    if not dangling:
        target.write_text("precious")
        target.chmod(0o666)
    OTHER_ENTRIES[what](path)
    OTHER_ENTRIES[what](lock_path(folder, "GPU-2", "wish"))
    assert not locks.lock("GPU-1")
    assert locks.lock("GPU-2")
    assert not locks.is_wished_elsewhere("GPU-2")
    assert wishes(locks, ["GPU-2"]) == ""
    about = f"{path}, which is no lock file (its mode is {what}, and not -rw-rw-rw-)"
    assert str(who_holds(folder, "GPU-1")) == str(who_keeps(folder, "GPU-1")) == about
    assert target.exists() != dangling
    assert dangling or target.read_text() == "precious"
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    assert locks.lock("GPU-1")


def test_a_deleted_lock_file_allows_no_second_lock(folder: Path, make: Make) -> None:
    one, two = make(), make()
    assert one.lock("GPU-1")
    lock_path(folder, "GPU-1").unlink()
    one.unlock("GPU-1")
    assert two.lock("GPU-1")
    assert not one.lock("GPU-1")


def test_a_lock_file_that_is_deleted_or_moved_is_an_error(folder: Path, make: Make) -> None:
    one = make()
    for device in ("GPU-1", "GPU-2"):
        assert one.lock(device)
    one.check()
    path = lock_path(folder, "GPU-2")
    for change in (path.unlink, lambda: path.rename(folder / "moved")):
        change()
        with pytest.raises(LockFolderError, match=f"the lock of GPU-2 was lost, since .* deleted or moved: {path};"):
            one.check()
        one.unlock("GPU-2")
        one.check()
        assert one.lock("GPU-2")


@given(st.text(min_size=1), st.text(min_size=1))
def test_file_names_are_safe_and_distinct(one: str, two: str) -> None:
    name = file_name(one)
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
    assert not name.startswith(".")
    assert len(name) <= 120
    assert (name == file_name(two)) == (one == two)


# The folder, and other users


def test_a_folder_that_is_a_symbolic_link_or_cannot_be_created_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LockFolderError, match=r"locks is not a directory \(symbolic links are not allowed\)"):
        SessionLocks(folder)
    with pytest.raises(LockFolderError, match=rf"missing/locks: No such file.*{VARIABLE}"):
        SessionLocks(tmp_path / "missing" / "locks")


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


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a temporary folder that every user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_another_user(script: str, folder: Path) -> str:
    """Run `script` as another user and return its output; `folder` is the path of the locks."""
    head = (
        "import os, sys, pathlib\n"
        "from pytest_accel.leases.shared_folder import LockFolderError\n"
        "from pytest_accel.leases.demand import Holder\n"
        "from pytest_accel.leases.locks import SessionLocks, who_holds\n"
    )
    with run_as_other_user(f"folder = pathlib.Path(sys.argv[1])\n{script}", str(folder), head=head) as process:
        output, _ = process.communicate()
        assert process.returncode == 0
    return output.strip()


TAKE = """
locks = SessionLocks(folder)
print(who_holds(folder, "GPU-1"), got := locks.lock("GPU-1"), locks.is_wished_elsewhere("GPU-1"))
if got:
    locks.describe("GPU-1", Holder.here("theirs"))
locks.wish({"GPU-1": Holder.here("theirs")})
locks.close()
"""


@NEEDS_ROOT
def test_two_users_share_the_temporary_directory(open_folder: Path) -> None:
    open_folder.chmod(0o1777)
    assert as_another_user(TAKE, open_folder) == "None True False"
    mine = SessionLocks(open_folder)
    assert lock_path(open_folder, "GPU-1").stat().st_uid != os.getuid()
    assert mine.lock("GPU-1")
    mine.describe("GPU-1", ME)
    mine.wish({"GPU-1": ME})
    assert as_another_user(TAKE, open_folder) == f"{ME} False True"
    mine.close()
    assert as_another_user(TAKE, open_folder) == "None True False"


REFUSED = """
try:
    locks = SessionLocks(folder)
    if not locks.lock("GPU-1"):
        print(who_holds(folder, "GPU-1"))
except LockFolderError as error:
    print(error)
"""


@NEEDS_ROOT
def test_a_folder_or_file_that_another_user_could_replace_is_refused(open_folder: Path) -> None:
    folder = open_folder / "locks"
    open_folder.chmod(0o1777)
    assert as_another_user(REFUSED, folder) == "", "the folder belongs to the user who made it"
    with pytest.raises(
        LockFolderError, match=rf"locks belongs to nobody.*install -d -m 1777.*{VARIABLE} names another"
    ):
        SessionLocks(folder)
    for path in folder.iterdir():
        path.unlink()
    os.chown(folder, 0, 0)
    assert as_another_user(REFUSED, folder) == ""
    folder.chmod(0o777)
    assert "locks has mode 0777: other users may write to it" in as_another_user(REFUSED, folder)
    folder.chmod(0o755)
    assert f"{folder} is not writable for this user" in as_another_user(REFUSED, folder)
    folder.chmod(0o1777)
    path = lock_path(folder, "GPU-1")
    # Like a hard link to a file of another user, which some systems allow (sysctl fs.protected_hardlinks).
    path.chmod(0o644)
    os.chown(path, OTHER_USER, -1)
    assert (
        as_another_user(REFUSED, folder)
        == f"{path}, which is no lock file (its mode is -rw-r--r--, and not -rw-rw-rw-)"
    )
    path.chmod(0o600)
    os.chown(path, 0, -1)
    assert (
        as_another_user(REFUSED, folder)
        == f"{path}, which is no lock file (its mode is -rw-------, and not -rw-rw-rw-)"
    )
