"""The device locks of one session, with its file in the wait queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from os import register_at_fork
from pathlib import Path

from pytest_accel.leases.device_lock import DeviceLock, LockState, who_holds
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lock_dir import LockFolderError, default_folder, prepare_folder
from pytest_accel.leases.wait_queue import WaitQueue


class DeviceLocks:
    """The device locks of one session. Not thread-safe: the broker calls it under its own lock.

    A process that is forked from this one inherits no lock: there, the object holds nothing.
    """

    def __init__(self, folder: Path | None = None, refuses: Callable[[str], str | None] | None = None) -> None:
        """Create the folder if it is missing; its parent must exist.

        A device is not acquired as long as ``refuses(device_id)`` returns a reason. To the broker, it then looks like
        one that another session holds, so the broker tries again.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the folder cannot be created or must not be
        used.
        """
        self.folder = folder or default_folder()
        prepare_folder(self.folder)
        self.wait_queue = WaitQueue(self.folder)
        self._refuses = refuses
        self._locks: dict[str, DeviceLock] = {}
        _INSTANCES.add(self)

    @property
    def retained(self) -> list[str]:
        """The devices that were released and are still locked."""
        return self._in_state(LockState.RETAINED)

    def holds(self, device_id: str) -> bool:
        """Return True if a lease of this session holds the device."""
        return device_id in self._locks and self._locks[device_id].state is LockState.HELD

    def holder(self, device_id: str) -> Holder | None:
        """Return the holder of the device in any session, see :func:`~pytest_accel.leases.device_lock.who_holds`."""
        mine = self._locks[device_id].holder if device_id in self._locks else None
        return mine or who_holds(self.folder, device_id)

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """Acquire the lock, see :meth:`DeviceLock.acquire`; return False also if the device is refused."""
        if self._refuses is not None and self._refuses(device_id) is not None:
            return False
        if device_id not in self._locks:
            self._locks[device_id] = DeviceLock(self.folder, device_id)
        return self._locks[device_id].acquire(holder)

    def try_acquire_all(self, devices: Iterable[str], holder: Holder) -> str | None:
        """Acquire the locks of all of `devices` or of none; return the first that cannot be acquired, or None.

        A device that this session holds already, because other parts of it are leased, needs no lock.
        """
        with ExitStack() as undo:
            for device_id in dict.fromkeys(devices):
                if not self.holds(device_id):
                    if not self.try_acquire(device_id, holder):
                        return device_id
                    undo.callback(self.retain, device_id)
            undo.pop_all()
        return None

    def update(self, device_id: str, holder: Holder) -> None:
        """Replace the recorded holder of a device; no-op if this session does not hold it, since its lock was lost.

        Raises :class:`~pytest_accel.leases.lock_dir.LockFolderError` if the file cannot be written.
        """
        if self.holds(device_id):
            self._locks[device_id].update(holder)

    def retain(self, device_id: str) -> None:
        """Release a device but keep it locked; no-op if this session does not hold it, since its lock was lost."""
        if self.holds(device_id):
            self._locks[device_id].retain()

    def unlock(self, reserved: Mapping[str, Holder] | None = None) -> None:
        """Unlock all retained devices but those that are `reserved` for a holder, and record these holders."""
        for device_id in self.retained:
            if reserved is not None and device_id in reserved:
                self._locks[device_id].reserve(reserved[device_id])
            else:
                self._locks[device_id].unlock()

    def renew_missing(self) -> dict[str, str]:
        """Create and lock new lock files in place of those that were deleted, moved or replaced.

        Return the devices for which that fails, with the reason. The session does not hold them any more.
        """
        lost: dict[str, str] = {}
        for device_id in (*self._in_state(LockState.HELD), *self._in_state(LockState.RETAINED)):
            lock = self._locks[device_id]
            try:
                if not lock.is_in_place():
                    lock.renew()
            except LockFolderError as error:
                lost[device_id] = f"the lock of {device_id} was lost, since its lock file was deleted or moved: {error}"
        return lost

    def close(self) -> None:
        """Unlock all devices and delete the wait file. The object can be used again."""
        self.wait_queue.close()
        for device_id in self._in_state(LockState.HELD):
            self.retain(device_id)
        self.unlock()
        self._forget()

    def _in_state(self, state: LockState) -> list[str]:
        return [device_id for device_id, lock in self._locks.items() if lock.state is state]

    def _forget(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()
        self.wait_queue.forget()


_INSTANCES: weakref.WeakSet[DeviceLocks] = weakref.WeakSet()


def _forget_all() -> None:
    # A forked process shares the open files, and so the locks: it would keep them when the session has ended.
    for locks in tuple(_INSTANCES):
        locks._forget()


register_at_fork(after_in_child=_forget_all)
