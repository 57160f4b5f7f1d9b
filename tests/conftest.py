"""Fixtures of all tests: separate folders and variables, and checks that tests leak no processes or files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_accel.leases.shared_folder import VARIABLE
from pytest_accel.rank.context import RANK

with contextlib.suppress(ImportError):  # The tests for GPUs do not need Hypothesis.
    from hypothesis import HealthCheck, settings

    # On a machine that is busy with other tests, the duration of an example means nothing.
    settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

_MARK = "ACCEL_TESTED_BY"
"""Environment variable that marks every process that a test starts, orphans included."""
_TIMEOUT = 15.0
"""Seconds within which processes that are ending must exit."""
_PYTESTS_OWN = {"PYTEST_CURRENT_TEST"}
_SHARED_MEMORY = Path("/dev/shm")


class Surroundings:
    """Folder and environment of the tests that one pytest process runs; finds what they have leaked."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.environment = {
            _MARK: uuid.uuid4().hex,
            VARIABLE: str(temporary / "locks"),
            "TMPDIR": str(temporary),
            # Else each session would compile the plugin again: images for containers often set this variable.
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._shared_memory = _names(_SHARED_MEMORY)

    def leaks(self) -> list[str]:
        """Return descriptions of the leaked resources that remain after a timeout."""
        start = time.monotonic()
        # `tests.deadline` is not used, because tests copy this file into suites without it.
        while (found := self._find_leaks()) and time.monotonic() - start < _TIMEOUT * max(1.0, os.getloadavg()[0]):
            time.sleep(0.1)
        return found

    def processes(self) -> list[psutil.Process]:
        """Return every living process that a test has started or forked."""
        this = psutil.Process()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE or process == this:
                    continue
                command = process.cmdline()
                child = process.ppid() == this.pid
                # The resource tracker of this process exits with it.
                if child and any("multiprocessing.resource_tracker" in part for part in command):
                    continue
                forked = child and command == this.cmdline()
                if forked or process.environ().get(_MARK) == self.environment[_MARK]:
                    found.append(process)
        return found

    def _find_leaks(self) -> list[str]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        found += [f"session folder {path}" for path in self.temporary.glob("accel-*")]
        for folder, _, names in os.walk(self.temporary):  # Unlike rglob, it ignores folders that are being removed.
            for path in (Path(folder, name) for name in names if name.endswith(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and _is_held(path):  # Opening a pipe would block.
                        found.append(f"held lock {path}: {path.read_text()}")
        new = _names(_SHARED_MEMORY) - self._shared_memory
        return found + [f"shared memory {name}" for name in sorted(new - _in_use(new))]


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _is_held(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _in_use(names: set[str]) -> set[str]:
    """Return the files in shared memory that a process has mapped or open: they may belong to another session.

    Files are compared by their inodes: the C library maps a semaphore before the file has its name.
    """
    inodes: dict[int, str] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[(_SHARED_MEMORY / name).stat().st_ino] = name
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(errors="replace").splitlines()
            used |= {int(line.split()[4]) for line in maps if f" {_SHARED_MEMORY}/" in line}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # It has been closed.
                    if os.readlink(descriptor).startswith(f"{_SHARED_MEMORY}/"):
                        used.add(descriptor.stat().st_ino)
    return {name for inode, name in inodes.items() if inode in used}


@pytest.fixture(scope="session", autouse=True)
def surroundings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    """Yield the surroundings of this pytest process. If its tests have leaked anything, the last of them fails."""
    made = Surroundings(tmp_path_factory.mktemp("own"))
    yield made
    if RANK in request.config.stash:
        return
    leaks = made.leaks()
    for process in made.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    if leaks:
        pytest.fail("\n".join(["the tests of this process have left behind", *leaks]), pytrace=False)


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest, surroundings: Surroundings) -> Iterator[None]:
    """Set the variables of the surroundings; fail a test that changes the environment or the working directory."""
    if RANK in request.config.stash:  # torch sets variables when it starts a device's runtime.
        yield
        return
    before, folder = dict(os.environ), os.getcwd()
    os.environ.update(surroundings.environment)
    given = dict(os.environ)
    yield
    names = {name for name in given.keys() | os.environ if given.get(name) != os.environ.get(name)} - _PYTESTS_OWN
    left = [f"{name}={os.environ.get(name)!r}, which was {given.get(name)!r}" for name in sorted(names)]
    for name in names | surroundings.environment.keys():
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    if not os.path.exists(folder) or not os.path.exists(".") or not os.path.samefile(folder, "."):
        left.append("another working directory")
        os.chdir(folder)
    if left:
        pytest.fail("\n".join(["the test has left behind", *left]), pytrace=False)


@pytest.fixture
def without_torch(request: pytest.FixtureRequest) -> None:
    """Hide torch from all sessions of a test that has nothing to do with it."""
    request.getfixturevalue("suite").without_torch()
