"""The result of a launched script, and the errors for a launch that failed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_accel.core.signals import signal_name

LAUNCHER = "launcher"
"""Name of the files ``launcher.out`` and ``launcher.err``; for the files of ranks see `rank_program`."""
_LINES, _STACK_LINES = 20, 200  # maximum number of lines of each stream in an error's text, and of stacks at its end
_TORCHRUN_WORKER = re.compile(r"\brank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)")  # In the summary of its agent.
_FATAL = "Fatal Python error: "
"""Python's fault handler writes this before the stacks of all threads, and what C++ has to say is before it."""


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch that has ended."""

    command: tuple[str, ...]
    """The command line of the launcher."""
    returncode: int
    """The launcher's exit status, or the negated number of the signal that terminated it."""
    stdout: str
    """The output of the ranks, in order of rank, and then of the launcher itself."""
    stderr: str
    rank_stdout: Mapping[int, str]
    """The output of each rank."""
    rank_stderr: Mapping[int, str]
    folder: Path
    """The folder with the files of all output."""

    @classmethod
    def read(cls, command: tuple[str, ...], returncode: int, folder: Path) -> LaunchResult:
        """Return the result, with the output from the files in `folder`."""
        files = [(name, end, path.read_text(encoding="utf-8", errors="replace")) for name, end, path in outputs(folder)]
        out, err = ({name: text for name, end, text in files if end == stream} for stream in ("out", "err"))
        rank_out, rank_err = ({int(name): text for name, text in of.items() if name != LAUNCHER} for of in (out, err))
        return cls(command, returncode, "".join(out.values()), "".join(err.values()), rank_out, rank_err, folder)


def outputs(folder: Path) -> list[tuple[str, str, Path]]:
    """Return name, stream and path of each file with output: first of the ranks in order, then of the launcher."""
    ranks = sorted((path.stem for path in folder.glob("*.err") if path.stem.isdecimal()), key=int)
    return [(name, end, folder / f"{name}.{end}") for name in (*ranks, LAUNCHER) for end in ("out", "err")]


class LaunchError(Exception):
    """A launched script failed; the message has its last output and the command line."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.

    def __init__(self, text: str, result: LaunchResult) -> None:
        super().__init__(_report(text, result))
        self.result = result
        """The result up to the failure."""


class LaunchTimeout(LaunchError):
    """A launched script timed out; its ranks have written their stacks, and all its processes were killed."""

    __module__ = "pytest_accel"


def describe_exits(result: LaunchResult) -> str:
    """Return how the launcher has ended, and under torchrun the rank that its agent names last, as the root cause."""
    causes = (f"rank {rank} {_status(int(code))}" for rank, code in _TORCHRUN_WORKER.findall(result.stderr)[-1:])
    return ": ".join((_status(result.returncode), *causes))


def _status(code: int) -> str:
    return f"by {signal_name(-code)}" if code < 0 else f"with exit status {code}"


def _report(text: str, result: LaunchResult) -> str:
    """Return `text` with the command line, and the last output of each rank and of the launcher, with all stacks."""
    parts = [text, f"command: {shlex.join(result.command)}", f"files: {result.folder}"]
    for name, stream, path in outputs(result.folder):
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        fatal = (at for at, line in enumerate(lines) if line.startswith(_FATAL) and at > len(lines) - _STACK_LINES)
        if shown := lines[max(0, max(fatal, default=len(lines)) - _LINES) :]:
            more = f" (the last {len(shown)} lines of {len(lines)})" if len(shown) < len(lines) else ""
            who = "the launcher" if name == LAUNCHER else f"rank {name}"
            parts += [f"--- {who}, std{stream}{more}", *shown]
    return "\n".join(parts)
