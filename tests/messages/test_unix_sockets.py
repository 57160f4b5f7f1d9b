"""Tests of Unix sockets, and of their folders' protection against another user. They need root to become that user."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_accel.core import session_folder
from pytest_accel.core.launcher_env import LauncherEnv
from pytest_accel.features.launchers import rendezvous
from pytest_accel.features.launchers.agent_messages import Hello
from pytest_accel.features.launchers.rendezvous import RendezvousError, gather, join, rendezvous_path
from pytest_accel.messages import unix_sockets
from tests.other_user import NEEDS_ROOT, OTHER_USER, run_as_other_user

pytestmark = NEEDS_ROOT


@pytest.fixture
def common() -> Iterator[Path]:
    """Provide a folder like that of the locks: all users may write to it. It belongs to the other user."""
    made = Path(tempfile.mkdtemp(prefix="common-", dir="/tmp"))
    try:
        os.chown(made, OTHER_USER, OTHER_USER)
        made.chmod(0o1777)
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def temporary(common: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a folder that replaces /tmp and belongs to root."""
    made = common / "tmp"
    made.mkdir()
    made.chmod(0o1777)
    os.chown(common, 0, 0)
    monkeypatch.setattr(rendezvous, "TEMPORARY", str(made))
    return made


WORLD = LauncherEnv("torchrun", 0, 3, 0, 3, ("a", "b"))


def hello(rank: int) -> Hello:
    """Return the message with which the process of `rank` joins the rendezvous."""
    return Hello(rank, os.getpid(), {})


def test_connections_ignore_the_default_socket_timeout(tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    with unix_sockets.listen(str(tmp_path / "a.sock"), 1) as listener:
        socket.setdefaulttimeout(30)
        try:
            with (
                unix_sockets.connect(str(tmp_path / "a.sock")) as connection,
                unix_sockets.accept(listener) as accepted,
            ):
                assert os.get_blocking(connection.fileno())
                assert os.get_blocking(accepted.fileno())
        finally:
            socket.setdefaulttimeout(before)


def test_a_rendezvous_folder_that_another_user_could_replace_is_refused(temporary: Path) -> None:
    """Rank 0 looks for its socket in the temporary folder alone, since the owner of the lock folder could rename it."""
    path = temporary / f"pytest-accel-{os.getuid()}"
    with run_as_other_user("os.mkdir(sys.argv[1], 0o700)", str(path)) as other:
        other.wait()
    requirement = "must be a folder of user 0 with mode 0700; remove it, or have its owner or root remove it"
    text = rf"^{path}, where the processes .* it is a folder of user {OTHER_USER} with mode 0700, and {requirement}$"
    for call in (lambda: gather(WORLD, 1), lambda: join(WORLD, hello(1), 1)):
        with pytest.raises(RendezvousError, match=text):
            call()
    path.rmdir()
    path.symlink_to("/root")
    with pytest.raises(RendezvousError, match="it is no folder of user 0"):
        gather(WORLD, 1)
    path.unlink()
    path.mkdir()
    path.chmod(0o750)
    with pytest.raises(RendezvousError, match="with mode 0750"):
        gather(WORLD, 1)
    path.rmdir()
    assert stat.S_IMODE(os.stat(os.path.dirname(rendezvous_path(WORLD))).st_mode) == 0o700
    # The owner of the parent folder could replace the folder.
    os.chown(temporary, OTHER_USER, OTHER_USER)
    with pytest.raises(RendezvousError, match=rf"^{temporary}, .*: it belongs to user {OTHER_USER}, who can replace"):
        gather(WORLD, 1)


def test_a_session_creates_its_folder_where_no_other_user_can_replace_it(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(common))
    for owner, parent in ((OTHER_USER, "/tmp"), (0, str(common))):
        os.chown(common, owner, owner)
        made = session_folder.create()
        session_folder.remove(made)
        assert os.path.dirname(made) == parent
