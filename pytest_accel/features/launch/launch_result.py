"""The result of a launched script, and the errors for a launch that failed."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_accel.core.signals import signal_name

LAUNCHER = "launcher"
"""Name of the files ``launcher.out`` and ``launcher.err``; for those of ranks see `rank_program`."""
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
        texts: dict[str, dict[str, str]] = {"out": {}, "err": {}}
        for name, stream, path in outputs(folder):
            texts[stream][name] = path.read_text(encoding="utf-8", errors="replace")
        whole = ["".join(written.values()) for written in texts.values()]
        out, err = ({int(name): text for name, text in of.items() if name != LAUNCHER} for of in texts.values())
        return cls(command, returncode, whole[0], whole[1], out, err, folder)


def outputs(folder: Path) -> list[tuple[str, str, Path]]:
    """Return name, stream and path of each file with output: those of the ranks in order, and of the launcher."""
    ranks = sorted((path.stem for path in folder.glob("*.err") if path.stem.isdecimal()), key=int)
    return [(name, end, folder / f"{name}.{end}") for name in (*ranks, LAUNCHER) for end in ("out", "err")]


class LaunchError(Exception):
    """A launched script failed; the message has its last output and the command line."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.

    def __init__(self, text: str, result: LaunchResult) -> None:
        super().__init__(text)
        self.result = result
        """The result up to the failure."""


class LaunchTimeout(LaunchError):
    """A launched script timed out; all its processes were killed."""

    __module__ = "pytest_accel"

    def __init__(self, text: str, result: LaunchResult, stacks: Mapping[int, str]) -> None:
        super().__init__(text, result)
        self.stacks = stacks
        """The Python stacks of the ranks at the timeout, as far as they could be taken."""


class NoOutput(LaunchError):
    """A launched script succeeded, but no rank wrote the required output."""

    __module__ = "pytest_accel"


def error_of(launcher: str, result: LaunchResult, passed: float | None, *, output: bool) -> LaunchError | None:
    """Return the error for a launch that has failed, None for one that has not.

    `passed` is the timeout if it has passed, else None. With `output`, a launch without any is an error.
    """
    if passed is not None:
        text = f"{launcher} did not end within {passed:g} s (timeout={passed:g}); all its processes were killed"
        parts = {rank: err.rpartition(f"{_FATAL}Aborted") for rank, err in result.rank_stderr.items()}
        stacks = {rank: stack.strip() for rank, (_, found, stack) in parts.items() if found}
        return LaunchTimeout(_report(text, result), result, stacks)
    if result.returncode != 0:
        workers = {int(rank): int(code) for rank, code in _TORCHRUN_WORKER.findall(result.stderr)}
        # torchrun's agent terminates the other workers with SIGTERM, so these are not the cause.
        causes = {rank: code for rank, code in workers.items() if code != -signal.SIGTERM} or workers
        of_ranks = ", ".join(f"rank {rank} {_status(launcher, code)}" for rank, code in sorted(causes.items()))
        text = f"{launcher} ended {_status(launcher, result.returncode)}{': ' if causes else ''}{of_ranks}"
        return LaunchError(_report(text, result), result)
    if output and not any((*result.rank_stdout.values(), *result.rank_stderr.values())):
        return NoOutput(_report(f"{launcher} succeeded, but no rank wrote anything (output=True)", result), result)
    return None


def _status(launcher: str, code: int) -> str:
    if code < 0:
        return f"by {signal_name(-code)}"
    # DeepSpeed exits with the negative return code that `subprocess` gave it.
    number = {"mpirun": code - 128, "srun": code - 128, "deepspeed": 256 - code}.get(launcher, 0)
    return f"with exit status {code}" + (f" ({signal_name(number)} in a rank)" if 0 < number < 65 else "")


def _report(text: str, result: LaunchResult) -> str:
    """Return `text` with the command line, and the last output of each rank and of the launcher, with all stacks."""
    parts = [text, f"command: {shlex.join(result.command)}", f"files: {result.folder}"]
    for name, stream, path in outputs(result.folder):
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        fatal = (at for at, line in enumerate(lines) if line.startswith(_FATAL) and at > len(lines) - _STACK_LINES)
        shown = lines[max(0, max(fatal, default=len(lines)) - _LINES) :]
        if shown:
            more = f" (the last {len(shown)} lines of {len(lines)})" if len(shown) < len(lines) else ""
            who = "the launcher" if name == LAUNCHER else f"rank {name}"
            parts += [f"--- {who}, std{stream}{more}", *shown]
    return "\n".join(parts)
