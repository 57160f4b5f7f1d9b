"""Settings of a pytest session that all its ranks share: the driver sends them to each fork server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from pytest_accel.core.plugin_roles import RoleName
from pytest_accel.core.session_folder import ShownFile
from pytest_accel.messages.world_spec import WorldSpec


class SessionSpec(Struct, frozen=True):
    """Settings of the pytest session that all ranks share."""

    args: tuple[str, ...]
    """Command line of the controller, with additional options for the ranks."""
    invocation_dir: str
    sys_path: tuple[str, ...]
    directory: str
    """The session's private folder: sockets, logs and stack files of its ranks."""
    basetemp: str
    """The parent of every rank's base temporary directory: the controller's, as for xdist's workers."""
    preload: tuple[str, ...] | None
    """Modules that the fork server imports after torch and pytest's plugins; None if it imports none."""
    plugin_options: tuple[str, ...] | None
    """The options of the session that say which plugins pytest loads; None if the fork server loads none."""
    roles: tuple[tuple[str, RoleName], ...]
    """Roles that the user has given to plugins, by module or package."""
    markers: tuple[str, ...]
    """All registered marks of the controller's session, as lines of the ini option ``markers``."""
    hidden: tuple[tuple[str, str | None], ...]
    """Mask that hides the session's accelerators, for ranks that have no lease on any."""
    distributed: bool
    """True if xdist distributes the tests; its workers then are the drivers."""
    logs: str | None = None
    """Folder in which the ranks' logs are kept; None if they are not kept."""
    leaks: str = "warn"
    """Reaction to a test that leaks resources: ``warn``, ``fail`` or ``off``."""
    shows: ShownFile | None = None
    """The file of each rank that the driver shows while it grows; None if it shows nothing."""
    log_file: str = ""
    """Path of the session's log file (``log_file``), to which ranks append what they log; empty if there is none."""
    server: int = 0
    """Number of the fork server that receives this spec. Number 0 is the driver's own, and removes `directory`."""
    remote: bool = False
    """True if the fork server is on another machine than the driver; it has its own `directory`, and removes it."""
    clock: float = 0.0
    """Seconds to add to `clock.monotonic` to get the driver's time; its clock is another clock if `remote`."""
    shared: bool = True
    """True if `basetemp` is the driver's, on a file system that both machines share."""
    fractions: Mapping[str, float] = {}
    """Fraction of the memory of each device that this session may use, if it runs inside a rank with a share of it."""
    coverage: str | None = None
    """Settings with which ranks measure coverage (`pytest_accel.rank.coverage`); None if they do not."""
    folder: str | None = None
    """The controller's current folder, which its conftests may have changed; None if it has been removed."""
    hash_seed: int | None = None
    """Seed for the hash seeds of the ranks; None if all ranks have the hash seed of their fork server."""
    first_worker: int = 0
    """The lowest number that a rank has among xdist's workers; lower numbers are those of xdist's own workers."""
    worker_input: Mapping[str, Any] = {}
    """The items of `config.workerinput` that all ranks have in common."""

    @property
    def own_folder(self) -> str | None:
        """The session's folder if this fork server removes it; None if the driver's own server, number 0, does so."""
        return self.directory if self.server == 0 or self.remote else None

    def worker_input_of(self, spec: WorldSpec, rank: int) -> dict[str, Any]:
        """Return `config.workerinput` of a rank."""
        return {"workerid": f"gw{spec.workers[rank]}", "workercount": spec.worker_count, **self.worker_input}


def with_options(args: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Return the command line `args` with `options` at its end, or before ``--`` if it has one."""
    end = args.index("--") if "--" in args else len(args)
    return (*args[:end], *options, *args[end:])
