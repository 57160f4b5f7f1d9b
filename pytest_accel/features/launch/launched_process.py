"""The process of a launch: start it, show its output, and terminate it with all its descendants."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.kill import KILL_TIMEOUT
from pytest_accel.features.launch import reaper
from pytest_accel.features.launch.launch_commands import Job, Plan
from pytest_accel.features.launch.launch_result import LaunchResult, result_of

_POLL_INTERVAL = 0.1
"""Seconds between two checks for new output of the ranks."""
_STACK_TIMEOUT = 10.0
"""Seconds for the ranks to write their stacks, and again for the launcher to forward them and exit."""
_CHUNK = 1 << 20
"""Maximum number of bytes read at once. A longer line is shown in pieces."""
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
Show = Callable[[str, str], None]
"""A function of a stream, ``stdout`` or ``stderr``, and a text to show."""


class ReaperDied(Exception):
    """The process that supervises the launch (`reaper`) has ended without a result."""


class _Follower:
    """Shows a file while it grows: whole lines, each with a prefix."""

    def __init__(self, path: Path, prefix: str, stream: str, show: Show) -> None:
        self._path = path
        self._prefix = prefix
        self._stream = stream
        self._show = show
        self._offset = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pump(self) -> bool:
        """Show new data, at most one chunk; return True if there was any."""
        data = self._read()
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        text = "".join(f"{self._prefix}{line}\n" for line in lines)
        if len(self._rest) > _CHUNK:
            piece, self._rest = self._rest[:_CHUNK], self._rest[_CHUNK:]
            text += f"{self._prefix}{piece}\n" if self._prefix else piece
        if text:
            self._show(self._stream, text)
        return bool(data)

    def finish(self) -> None:
        """Show the rest of the file, including an incomplete last line."""
        while self.pump():
            pass
        if self._rest:
            self._show(self._stream, f"{self._prefix}{self._rest}\n")
            self._rest = ""

    def _read(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_CHUNK)
        except OSError:
            return b""
        self._offset += len(data)
        return data


class LaunchedProcess:
    """A context manager that runs a launch; no process of it is left after the ``with`` block."""

    def __init__(self, job: Job, plan: Plan, show: Show) -> None:
        self._job = job
        self._plan = plan
        self._show = show
        self._folder = Path(job.folder)
        self._own = {name: self._folder / f"launcher.{name[3:]}" for name in ("stdout", "stderr")}
        self._followers: dict[Path, _Follower] = {}

    def __enter__(self) -> LaunchedProcess:
        os.makedirs(self._job.ranks_folder, exist_ok=True)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, self._control = os.pipe()
            theirs.callback(os.close, control)
            ours.callback(os.close, self._control)
            self._status, status = os.pipe()
            ours.callback(os.close, self._status)
            theirs.callback(os.close, status)
            out, err = (theirs.enter_context(open(self._own[stream], "wb")) for stream in ("stdout", "stderr"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(control), str(status), *self._plan.command],
                env=dict(self._plan.environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(control, status),
                # The reaper must outlive a kill of the test's process group, to kill the launch's processes.
                start_new_session=True,
            )
            ours.pop_all()  # `__exit__` closes these.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._control)
        try:
            self._process.wait(2 * KILL_TIMEOUT)
        except subprocess.TimeoutExpired:  # The reaper is stopped.
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT)
        os.close(self._status)

    def wait(self, timeout: float | None) -> int | None:
        """Return the launcher's exit status once all processes have ended, or None after `timeout` seconds."""
        began, more = monotonic(), False
        while True:
            rest = math.inf if timeout is None else began + timeout - monotonic()
            left = 0.0 if more else min(_POLL_INTERVAL, max(0.0, rest))
            if select.select([self._status], [], [], left)[0]:
                return self._read_status()
            more = self.follow()
            if timeout is not None and monotonic() >= began + timeout:
                return None

    def terminate(self) -> int:
        """Have the ranks write their stacks, kill all processes, and return the launcher's exit status."""
        ranks = list(self._ranks())
        # Stop the launcher: when it sees one rank end, it would terminate the others before they have written stacks.
        launcher = {parent for rank in ranks for parent in _parents(rank, self._process.pid)}
        _send(launcher, signal.SIGSTOP)
        _send(ranks, signal.SIGABRT)
        deadline = monotonic() + _STACK_TIMEOUT
        while any(map(_is_alive, ranks)) and monotonic() < deadline:
            time.sleep(0.02)
        _send(launcher, signal.SIGCONT)
        if ranks:
            select.select([self._status], [], [], _STACK_TIMEOUT)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, b"e")  # Any byte ends the launch.
        return self._read_status()

    def follow(self) -> bool:
        """Show new data of all files, at most one chunk of each; return True if there was any."""
        many = self._job.nproc > 1
        for stream in ("stdout", "stderr"):
            for rank, path in self._files(stream):
                if path not in self._followers:
                    prefix = f"[rank {rank}] " if many else ""
                    self._followers[path] = _Follower(path, prefix, stream, self._show)
            own = self._own[stream]
            if own not in self._followers:
                self._followers[own] = _Follower(own, "", stream, self._show)
        shown = [follower.pump() for follower in self._followers.values()]
        return any(shown)

    def finish(self) -> None:
        """Show the rest of all files, after all processes have ended."""
        self.follow()  # There may be new files.
        for follower in self._followers.values():
            follower.finish()

    def result(self, status: int) -> LaunchResult:
        """Return the result for the launcher's exit status, with the content of all files."""
        texts = {stream: {rank: _text(path) for rank, path in self._files(stream)} for stream in self._own}
        of_ranks = {path for stream in self._own for _, path in self._files(stream)}
        out, err = ("" if path in of_ranks else _text(path) for path in self._own.values())
        return result_of(self._plan.command, status, texts["stdout"], texts["stderr"], (out, err), self._folder)

    def _read_status(self) -> int:
        data = os.read(self._status, 64)
        if not data:
            raise ReaperDied("the process that supervises the launch has ended without a result")
        return int(data)

    def _files(self, stream: str) -> Iterator[tuple[int, Path]]:
        pattern = self._plan.stdout if stream == "stdout" else self._plan.stderr
        if pattern is None:
            return
        for path in sorted(self._folder.rglob("*")):
            match = re.fullmatch(pattern, path.relative_to(self._folder).as_posix())
            if match is not None:
                yield int(match[1] or 0), path

    def _ranks(self) -> Iterator[psutil.Process]:
        """Yield the ranks: on each branch of the process tree, the first process with a rank variable."""
        try:
            children = psutil.Process(self._process.pid).children()
            # The reaper first starts the launcher; its other children are orphans of the launch.
            launcher = min(children, key=lambda child: (child.create_time(), child.pid))
        except (psutil.Error, ValueError):
            return
        if self._plan.depth is not None:
            found = [launcher]
            for _ in range(self._plan.depth):
                found = [child for process in found for child in _children(process)]
            yield from found
            return
        yield from _ranks_below(launcher)


def _ranks_below(process: psutil.Process) -> Iterator[psutil.Process]:
    for child in _children(process):
        environ: dict[str, str] = {}
        with contextlib.suppress(psutil.Error):
            environ = child.environ()
        if any(name in environ for name in _RANK_VARIABLES):
            yield child
        else:
            yield from _ranks_below(child)


def _parents(process: psutil.Process, end: int) -> Iterator[psutil.Process]:
    """Yield the ancestors of `process` below the process with id `end`."""
    with contextlib.suppress(psutil.Error):
        yield from itertools.takewhile(lambda parent: parent.pid != end, process.parents())


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:
        return []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
