"""What a test leaves behind in its rank: found after each test, put back or ended, and told.

What a fixture of a wider scope makes or sets, and ends or puts back later, is its own business and no test's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from gc import collect
from typing import TYPE_CHECKING, NamedTuple

from pytest_accel.rank import leaked_processes, process_group, process_state, rpc

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

MEMORY = 64 << 20
"""Bytes by which what torch has allocated on a device may grow in a test.

Libraries keep memory of their own there: cuBLAS takes a workspace of 32 MiB for each handle and stream on Hopper
(https://docs.nvidia.com/cuda/cublas/#cublassetworkspace), which torch counts as allocated.
"""
_REPLACED = "its processes have been replaced"


class Left(NamedTuple):
    """What a test has left behind in one rank."""

    lines: tuple[str, ...] = ()
    """What is told of it."""
    harm: str | None = None
    """Why the next test must not run in this process; None: it may."""
    worn: bool = False
    """Whether the process should not run another test, although nothing is wrong with it."""


CLEAN = Left()


def unknown(error: Exception) -> Left:
    """Return the leftovers of a test after which the process could not be checked."""
    what = f"{type(error).__name__}: {error}"
    cause = f"could not be checked for leftovers ({what}): it may have replaced a function that its process needs"
    return Left((f"{cause}; {_REPLACED}",), f"the test {cause}")


class Hygiene:
    """What a rank's tests are held to."""

    def __init__(self, context: RankContext) -> None:
        self.closed_streams = False
        """Whether the test closed the streams that pytest captures with."""
        self._context = context
        self._counts_memory = context.session.leaks != "off"
        self._settings: process_state.Settings = {}
        self._settled = False
        """Whether the last test has ended, and has left everything as it was."""
        self._activity = 0
        self._wider: set[tuple[str | bytes, object]] = set()
        """Settings that fixtures of a wider scope have made, and those that they found, which they may put back."""
        self._known = leaked_processes.find()
        self._rpc = 0
        """How often RPC was initialised when the test began, or a fixture of a wider scope had been set up."""
        self._memory: dict[str, int] = {}
        self._kept_memory: dict[str, int] = {}

    def begin(self, activity: int) -> None:
        """A test begins. `activity` differs from the last test's if other code than that test's has run meanwhile."""
        self._memory = self._allocated()
        self._kept_memory = {}
        self._known |= leaked_processes.find()
        self._rpc = rpc.initialisations()
        undisturbed = self._settled and activity == self._activity
        self._settled, self._activity = False, activity
        if undisturbed:
            return  # Settings are as the last test's end has found them, and to look costs more than many a test.
        if self._context.spec.grouped:
            process_group.end_left_groups(self._context)
        self._settings = process_state.look(self._context.variables)

    @contextlib.contextmanager
    def wider_fixture(self) -> Iterator[None]:
        """A fixture of a wider scope is set up."""
        grouped = self._context.spec.grouped
        settings, known, memory = (
            process_state.look(self._context.variables),
            leaked_processes.find(),
            self._allocated(),
        )
        groups = process_group.group_names() if grouped else set()
        initialised = rpc.initialisations()
        try:
            yield
        finally:
            for name, values in process_state.changed(settings, process_state.look(self._context.variables)).items():
                self._wider.update((name, value) for value in values)
            self._known |= leaked_processes.find() - known
            for device, size in self._allocated().items():
                self._kept_memory[device] = self._kept_memory.get(device, 0) + max(0, size - memory.get(device, 0))
            if (now := rpc.initialisations()) != initialised:
                self._rpc = now
            if grouped:
                self._context.kept_groups |= process_group.group_names() - groups

    def end(self) -> Left:
        """Put back and end what the test has left since it began."""
        told: list[str] = []
        harms: list[str] = []
        settings = process_state.look(self._context.variables)
        if self.closed_streams:
            harms.append("closed its standard streams, which are pytest's own files")
        different = process_state.changed(self._settings, settings)
        for name, (old, new) in different.items():
            if (name, new) in self._wider:
                continue
            change = (
                f"left {process_state.label(name)} changed from {process_state.text(old)} to {process_state.text(new)}"
            )
            if process_state.put_back(name, old):
                told.append(f"{change}; it has been put back")
            else:
                harms.append(change)
        ended, running = leaked_processes.end(self._known, self._context.session.kept_processes)
        told += ended
        harms += running
        harms += self._grown_memory()
        initialised = rpc.initialisations()
        runs = initialised > 0 and rpc.is_running()
        if runs and initialised != self._rpc:
            harms.append("left torch.distributed.rpc running")
        try:
            process_group.wait_for_devices(self._context)
        except RuntimeError as error:
            return Left((), str(error))  # It has failed the test already.
        groups = process_group.left_groups(self._context) if self._context.spec.grouped else process_group.LeftGroups()
        told += groups.lines
        same = not different and settings.keys() == self._settings.keys()  # torch's are there once it is imported.
        self._settled = same and not (told or harms or groups.endable)
        told += [f"{harm}; {_REPLACED}" for harm in harms]
        harm = f"the test {harms[0]}" if harms else groups.harm
        return Left(tuple(told), harm, worn=initialised > 0 and not runs)

    def _allocated(self) -> dict[str, int]:
        return process_group.allocated_memory(self._context) if self._counts_memory else {}

    def _grown_memory(self) -> list[str]:
        grown = self._growth()
        if any(size > MEMORY for size in grown.values()):
            collect()  # A cycle is no leak: it would have gone by itself.
            grown = self._growth()
        return [
            f"left {size / (1 << 20):.0f} MiB more allocated on {device} than it had found"
            for device, size in grown.items()
            if size > MEMORY
        ]

    def _growth(self) -> dict[str, int]:
        return {
            device: size - self._memory.get(device, 0) - self._kept_memory.get(device, 0)
            for device, size in self._allocated().items()
        }
