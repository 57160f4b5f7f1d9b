"""The pool of a session, made from pytest's configuration; the numbers and the coverage data of the session's ranks.

`rank/coverage.py` measures the ranks. They write data files, which the main process adds to its own data at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from msgspec import structs

from pytest_accel import features
from pytest_accel.compat.pytest_shims import base_temporary_directory, log_file
from pytest_accel.compat.xdist_shims import worker_manager
from pytest_accel.core import log, session_folder
from pytest_accel.core.interpreter import COVERAGE_SETTINGS_FILE
from pytest_accel.core.launcher_env import without_local_rank
from pytest_accel.core.plugin_roles import chosen_roles, published_plugins
from pytest_accel.core.record_events import pass_to
from pytest_accel.core.session_folder import current_folder
from pytest_accel.core.source_files import place_options
from pytest_accel.core.stash_keys import EARLY_SERVER, LAUNCHED, RECORDERS
from pytest_accel.driver.output_tail import shown_file
from pytest_accel.forkserver.server_process import spawn_here
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.leases import Leases
from pytest_accel.messages.session_spec import SessionSpec, with_options
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.starter import LocalStarter, Starter, StarterReports
from pytest_accel.settings.options import Settings, is_distributed, own_path

if TYPE_CHECKING:
    from coverage import Coverage

    from pytest_accel.pool.starter import ClusterConnection

_IMPORTED_AHEAD = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
"""Filter of a warning that ranks would give for `-p asyncio`, the name of pytest-asyncio's entry point: pytest takes it
for the module, too, which torch has imported. Where the warning is due, this process shows it."""


def make_pool(
    config: pytest.Config,
    settings: Settings,
    machine: Machine,
    own_machine: Machine,
    cluster: ClusterConnection | None,
    show: Callable[[str], None],
) -> tuple[Pool, DriverCoverage | None]:
    """Return the session's pool, and the coverage of its ranks if this process is measured.

    `own_machine` is this machine, also if the session uses the devices of a `cluster`. `show` writes a line to the
    terminal.
    """
    basetemp = base_temporary_directory(config)  # A usage error must come before the session has a folder.
    session_folder.remove_dead()
    early = config.stash.get(EARLY_SERVER, None)
    effective = os.access in os.supports_effective_ids
    if early is not None and not os.access(early.directory, os.W_OK, effective_ids=effective):
        early = None  # A conftest has given up root's rights.
    directory = session_folder.create() if early is None else early.directory
    spec = _session_spec(config, settings, own_machine, directory, basetemp)
    if spec.logs is not None:
        try:
            os.makedirs(spec.logs, exist_ok=True)
        except OSError as error:
            show(f"accel: no output of ranks is kept: --accel-output {spec.logs}: {error.strerror}")
            spec = structs.replace(spec, logs=None)
    coverage = None
    measuring = of_this_process(config)
    if measuring is not None and not hasattr(measuring.config, "serialize"):  # New in coverage 7.10.3.
        release = sys.modules["coverage"].__version__
        show(f"accel: coverage {release} does not measure what ranks run: install coverage 7.10.3 or newer")
    elif measuring is not None:
        coverage = DriverCoverage(measuring, basetemp)
        hidden = spec.hidden
        if (file := os.environ.get(COVERAGE_SETTINGS_FILE)) is not None:  # For processes that a test starts.
            hidden = (*hidden, (COVERAGE_SETTINGS_FILE, file))
        spec = structs.replace(spec, coverage=coverage.settings, hidden=hidden)
    machines = config.stash.get(LAUNCHED, None) or cluster

    def starters(reports: StarterReports) -> tuple[LocalStarter, Starter[Any]]:
        waits = settings.busy == "wait"
        leases = Leases(own_machine, own_machine.slots, reports.give_up_wanted, waits_for_busy=waits)
        here = LocalStarter(spec, leases, early.spawn if early else spawn_here, reports)
        return here, here if machines is None else machines.starter(spec, here, reports)

    def jobs(here: LocalStarter, reports: StarterReports) -> Starter[Any]:
        made: Starter[Any] = features.require(config, "launcher").pytest_accel_job_starter(here=here, reports=reports)
        return made

    pool = Pool(
        machine,
        spec,
        own_machine.slots,
        wait=settings.wait,
        show=show,
        record=pass_to(*config.stash.get(RECORDERS, ()), *((log.record,) if log.is_on() else ())),
        starters=starters,
        jobs=jobs,
    )
    return pool, coverage


def plugin_options(config: pytest.Config) -> tuple[str, ...]:
    """Return the options of this session that say which installed plugins pytest loads.

    A plugin that ``-p`` names by its module may be one of the suite's own modules, which each rank imports itself.
    """
    named = (name for name in config.option.plugins if name.startswith("no:") or name in published_plugins())
    autoload = ["--disable-plugin-autoload"] if config.option.disable_plugin_autoload else []
    return (*autoload, *(f"-p{name}" for name in named))


def _session_spec(
    config: pytest.Config, settings: Settings, machine: Machine, directory: str, basetemp: Path | None
) -> SessionSpec:
    """Return what all ranks must know of this session, without the settings of coverage."""
    option = config.option
    args = [str(argument) for argument in config.invocation_params.args]
    if LAUNCHED in config.stash:
        args = without_local_rank(args)
    options = [*place_options(config), "-W", _IMPORTED_AHEAD]
    for plugin in config.invocation_params.plugins or ():
        # PyCharm passes its plugin to `pytest.main`. Ranks load it, too, since the command line may have its options.
        if isinstance(plugin, ModuleType) and plugin.__spec__ is not None:
            options += ["-p", plugin.__spec__.name]
    distributed = is_distributed(config)
    manager = worker_manager(config)
    run = getattr(manager, "testrunuid", None) or getattr(option, "testrunuid", None) or uuid4().hex
    workers = len(getattr(manager, "specs", ()))
    # xdist replaces four times as many crashed workers as there are, unless the user sets another number.
    restarts = getattr(option, "maxworkerrestart", None) or 4 * workers
    if hasattr(option, "no_cov"):
        options.append("--no-cov")
    if isinstance(seed := getattr(option, "randomly_seed", None), int):
        options.append(f"--randomly-seed={seed}")
    # Ranks, which have no terminal, explain assertions as this process would; without colours under xdist, whose
    # workers use none either.
    if getattr(config.pluginmanager.get_plugin("terminalreporter"), "hasmarkup", False) and not distributed:
        options.append("--color=yes")
    return SessionSpec(
        args=with_options(args, options),
        invocation_dir=str(config.invocation_params.dir),
        sys_path=tuple(sys.path),
        directory=directory,
        basetemp=str(basetemp) if basetemp is not None else os.path.join(directory, "tmp"),
        preload=None if settings.preload == "none" else settings.preload,
        plugin_options=None if settings.preload == "none" else plugin_options(config),
        roles=tuple(chosen_roles(config.pluginmanager, settings.rank_plugins).items()),
        markers=tuple(config.getini("markers")),
        hidden=tuple(machine.vendor(machine.session.kind).mask((), os.environ).items())
        if machine.session.present
        else (),
        distributed=distributed,
        leaks=settings.leaks,
        logs=None if settings.output is None else os.path.join(config.invocation_params.dir, own_path(settings.output)),
        shows=shown_file(config),
        log_file=log_file(config) or "",
        fractions=machine.held.fractions if machine.held is not None else {},
        folder=current_folder(),
        hash_seed=settings.jitter,
        first_worker=workers + int(restarts),
        worker_input={"testrunuid": run, "mainargv": list(sys.argv)},
    )


class DriverCoverage:
    """The coverage of the main process, and a folder in which the ranks write their data files."""

    def __init__(self, coverage: Coverage, parent: Path | None) -> None:
        """Make the folder in `parent`, or in the system's temporary directory if `parent` is None."""
        self._coverage = coverage
        self._folder = tempfile.mkdtemp(prefix="accel-coverage-", dir=parent)

    @property
    def settings(self) -> str:
        """The ranks' settings, serialized for `coverage.process_startup`."""
        config = self._coverage.config.copy()
        config.data_file = os.path.join(self._folder, os.path.basename(config.data_file))
        config.parallel = True
        return config.serialize()

    def combine(self) -> list[str]:
        """Add the ranks' data to this process's data; return the errors of files that could not be read."""
        from coverage import CoverageData
        from coverage.exceptions import CoverageException

        problems = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = self._coverage.get_data()
        for file in Path(self._folder).glob("*"):
            try:
                own.update(CoverageData(str(file)))
            except CoverageException as error:  # For example, the rank was killed while it wrote the file.
                problems.append(str(error))
        shutil.rmtree(self._folder, ignore_errors=True)
        return problems


def of_this_process(config: pytest.Config) -> Coverage | None:
    """Return the `Coverage` object that measures this process, pytest-cov's or another; None if there is none."""
    controller = getattr(config.pluginmanager.get_plugin("_cov"), "cov_controller", None)
    coverage = getattr(controller, "cov", None)
    if coverage is None:
        current = getattr(getattr(sys.modules.get("coverage"), "Coverage", None), "current", None)
        coverage = current() if current is not None else None
    return coverage
