"""The result of a launched script, and the errors for a launch that failed."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import cut_end

_LINES = 20
"""Maximum number of lines of each stream in an error's text."""
_WIDTH = 200
"""Maximum number of characters of the line about a C++ exception."""
_TORCHRUN_WORKER = re.compile(r"\brank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)")
"""The entry for one worker in the summary of torchrun's agent."""
_HYDRA_SIGNAL = re.compile(r"APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
"""A line of Hydra, MPICH's launcher, whose exit status is the signal's number."""
_STACKS = "Fatal Python error: Aborted"
"""Python's fault handler writes this line before the stacks of all threads."""
_TERMINATED = re.compile(
    r"^terminate called (?:without an active exception|"
    r"after throwing an instance of '(.+)'(?:\n\s*what\(\):\s*(.*))?)$",
    re.MULTILINE,
)
"""What `std::terminate` of libstdc++ writes before it aborts the process."""
_PYTHON_FRAME = '\n  File "'
_SIGNALS = 65
"""One more than the highest number of a signal on Linux."""


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
    """Empty texts under DeepSpeed, which writes both streams of a rank to one file."""
    folder: Path
    """The folder with the files of all output."""


def result_of(
    command: tuple[str, ...],
    returncode: int,
    rank_stdout: Mapping[int, str],
    rank_stderr: Mapping[int, str],
    own: tuple[str, str],
    folder: Path,
) -> LaunchResult:
    """Return the result for the given outputs; `own` has the stdout and stderr of the launcher itself."""
    ranks = sorted({*rank_stdout, *rank_stderr})
    stdout = {rank: rank_stdout.get(rank, "") for rank in ranks}
    stderr = {rank: rank_stderr.get(rank, "") for rank in ranks}
    return LaunchResult(
        command,
        returncode,
        "".join((*stdout.values(), own[0])),
        "".join((*stderr.values(), own[1])),
        MappingProxyType(stdout),
        MappingProxyType(stderr),
        folder,
    )


class LaunchError(Exception):
    """A launched script failed; the message has its last output and the command line."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.

    def __init__(self, text: str, result: LaunchResult) -> None:
        super().__init__(text)
        self.result = result
        """The result up to the failure."""


class LaunchTimeout(LaunchError):
    """A launched script timed out; all its processes were killed."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.

    def __init__(self, text: str, result: LaunchResult, stacks: Mapping[int, str]) -> None:
        super().__init__(text, result)
        self.stacks = stacks
        """The Python stacks of the ranks at the timeout, as far as they could be taken."""


class NoOutput(LaunchError):
    """A launched script succeeded, but no rank wrote the required output."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.


def failed(launcher: str, result: LaunchResult) -> LaunchError:
    """Return the error for an exit status other than 0."""
    text = f"{launcher} ended {_status(launcher, result.returncode)}"
    workers = {int(rank): int(code) for rank, code in _TORCHRUN_WORKER.findall(result.stderr)}
    # torchrun's agent terminates the other workers with SIGTERM, so these are not the cause.
    causes = {rank: code for rank, code in workers.items() if code != -signal.SIGTERM} or workers
    if causes:
        text += f": {', '.join(f'rank {rank} {_status(launcher, code)}' for rank, code in sorted(causes.items()))}"
    elif launcher == "mpirun" and (ending := _HYDRA_SIGNAL.search(result.stdout)) is not None:
        text += f" ({signal_name(int(ending[1]))} in a rank)"
    return LaunchError(_with_output("\n".join([text, *_aborts(result)]), result), result)


def timed_out(launcher: str, result: LaunchResult, timeout: float, nproc: int) -> LaunchTimeout:
    """Return the error for a timeout."""
    stacks = {rank: text for rank in range(nproc) if (text := _stacks(rank, result))}
    text = f"{launcher} did not end within {timeout:g} s (timeout={timeout:g}); it and all its descendants were killed"
    shown = [f"--- rank {rank}, stacks\n{stack}" for rank, stack in stacks.items()]
    return LaunchTimeout("\n".join([_with_output(text, result, stacks), *shown]), result, MappingProxyType(stacks))


def no_output(launcher: str, result: LaunchResult) -> NoOutput:
    """Return the error for missing output."""
    text = f"{launcher} succeeded, but no rank wrote anything (output=True)"
    return NoOutput(_with_output(text, result), result)


def _aborts(result: LaunchResult) -> list[str]:
    """Return a line for each different reason that C++ gave for the abort of a rank."""
    ranks: dict[str, list[int]] = {}
    for rank in result.rank_stdout:
        if reason := _reason_of_abort(result.rank_stderr[rank]) or _reason_of_abort(result.rank_stdout[rank]):
            ranks.setdefault(reason, []).append(rank)
    return [f"{ranks_text(those)}: {reason}" for reason, those in ranks.items()]


def _reason_of_abort(written: str) -> str:
    """Return why C++ code aborted the process that has `written` this; "" if it did not, or while Python code ran."""
    found = list(_TERMINATED.finditer(written))
    if not found:
        return ""
    kind, what = found[-1].groups(default="")
    if kind:
        return cut_end(f"nothing caught a C++ exception: {kind}{f': {what}' if what else ''}", _WIDTH)
    if _PYTHON_FRAME in written[found[-1].end() :]:
        return ""
    return (
        "aborted at the exit of Python, after the script's last line: a thread of a library was still running. The "
        "threads of a process group end with it: import torch.distributed.nn before init_process_group, and free the "
        "model before destroy_process_group"
    )


def _status(launcher: str, code: int) -> str:
    if code < 0:
        return f"by {signal_name(-code)}"
    ending = None
    if launcher in ("mpirun", "srun") and 128 < code < 128 + _SIGNALS:
        ending = code - 128
    elif launcher == "deepspeed" and 256 - _SIGNALS < code < 256:
        ending = 256 - code  # DeepSpeed exits with the negative return code that `subprocess` gave it.
    return f"with exit status {code}" + (f" ({signal_name(ending)} in a rank)" if ending is not None else "")


def _with_output(text: str, result: LaunchResult, stacks: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return `text` with the command line and the last output of each rank and of the launcher, without `stacks`."""
    parts = [text, f"command: {shlex.join(result.command)}", f"files: {result.folder}"]
    for rank in result.rank_stdout:
        for name, written in (("stdout", result.rank_stdout[rank]), ("stderr", result.rank_stderr[rank])):
            before, found, after = written.rpartition(_STACKS)
            shown = before if found and after.strip() == stacks.get(rank) else written
            if shown.strip():
                parts.append(f"--- rank {rank}, {name}{_last_lines(shown)}")
        if not (result.rank_stdout[rank] + result.rank_stderr[rank]).strip():
            parts.append(f"--- rank {rank} wrote nothing")
    ranks = "".join(result.rank_stdout.values()), "".join(result.rank_stderr.values())
    for name, whole, of_ranks in (("stdout", result.stdout, ranks[0]), ("stderr", result.stderr, ranks[1])):
        own = whole[len(of_ranks) :]
        if own.strip():
            parts.append(f"--- the launcher, {name}{_last_lines(own)}")
    return "\n".join(parts)


def _last_lines(text: str) -> str:
    lines = text.rstrip().splitlines()
    heading = f" (the last {_LINES} lines of {len(lines)})" if len(lines) > _LINES else ""
    return "\n".join([heading, *lines[-_LINES:]])


def _stacks(rank: int, result: LaunchResult) -> str:
    for written in (result.rank_stderr.get(rank, ""), result.rank_stdout.get(rank, "")):
        _, found, stacks = written.rpartition(_STACKS)
        if found:
            return stacks.strip()
    return ""
