"""The `workerinput` of each rank, with what `pytest_configure_node` of the suite and of other plugins adds to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import Thread, current_thread, main_thread
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from pytest_accel.core.plugin_roles import is_third_party, package_of
from pytest_accel.core.shims import worker_manager
from pytest_accel.core.worker_input import WorkerInput, is_plain, numbered

_HOOK_TIMEOUT = 10.0
"""Seconds for a hook `pytest_configure_node` that is called in another thread than the main one."""
_RESTARTS_PER_WORKER = 4
"""Number of crashed workers that xdist replaces by default, for each worker that it has started."""


def _error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception that `call` has raised, or a TimeoutError; None if there is none.

    Under xdist, ranks are started by a thread that the whole session may wait for, also Ctrl-C. So the call has a limit
    there. In the main thread, Ctrl-C ends it.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    if current_thread() is main_thread():
        run()
    else:
        thread = Thread(target=run, name="accel-configure-node", daemon=True)
        thread.start()
        thread.join(_HOOK_TIMEOUT)
        if thread.is_alive():
            return TimeoutError(f"it has not returned in {_HOOK_TIMEOUT:g} s")
    return errors[0] if errors else None


class RankNode:
    """Stands for a rank in `pytest_configure_node`, as xdist's `WorkerController` stands for a worker."""

    def __init__(self, config: pytest.Config, given: dict[str, Any], manager: Any) -> None:
        self.config = config
        self.workerinput = given
        self.nodemanager = manager
        name = given["workerid"]
        self.gateway = SimpleNamespace(id=name, spec=SimpleNamespace(id=name, popen=True, chdir=None, env={}))

    def __repr__(self) -> str:
        return f"<RankNode {self.gateway.id}>"


class RankInputs:
    """Makes the `workerinput` of the ranks of each new world. Owned by the session's pool, in the controller.

    xdist's workers, and the replacements of those that crash, have the numbers below those of the ranks.
    """

    def __init__(self, config: pytest.Config, show: Callable[[str], None]) -> None:
        """`show` writes a line to the terminal."""
        self._config = config
        self._show = show
        self._failed: set[object] = set()
        """The plugins whose hook has raised an exception."""
        manager = worker_manager(config)
        run = getattr(manager, "testrunuid", None) or getattr(config.option, "testrunuid", None) or uuid4().hex
        workers = 0 if manager is None else len(manager.specs)
        limit = getattr(config.option, "maxworkerrestart", None)
        restarts = _RESTARTS_PER_WORKER * workers if limit is None else int(limit)
        self._manager = manager or SimpleNamespace(config=config, testrunuid=run, specs=[], roots=[])
        first = workers + restarts if workers else 0
        self._numbered = partial(numbered, first=first, run=run, main_argv=sys.argv)

    def __call__(self, living: Iterable[WorkerInput], ranks: int) -> tuple[WorkerInput, ...]:
        """Return the input of each rank of a new world; `living` has those of all ranks that live."""
        return tuple(map(self._configured, self._numbered(living, ranks)))

    def _configured(self, given: dict[str, Any]) -> WorkerInput:
        """Return `given` with the entries that the hook adds."""
        node = RankNode(self._config, dict(given), self._manager)
        hook = getattr(self._config.hook, "pytest_configure_node", None)  # Without xdist, a suite may implement it.
        plugins = {} if hook is None else {one.plugin: None for one in reversed(hook.get_hookimpls())}
        for plugin in plugins:
            if package_of(plugin) in ("pytest_accel", "xdist"):
                continue
            others = [other for other in plugins if other is not plugin]
            call = partial(self._config.pluginmanager.subset_hook_caller("pytest_configure_node", others), node=node)
            if (error := _error_of(call)) is not None:
                self._report(plugin, error)
        # A hook that has not ended in time may still add entries.
        return {**{name: value for name, value in dict(node.workerinput).items() if is_plain(value)}, **given}

    def _report(self, plugin: object, error: Exception) -> None:
        """Show, once, that a conftest's hook does not work for ranks; plugins may need more of xdist than they have."""
        if plugin not in self._failed and not is_third_party(plugin):
            where = getattr(plugin, "__file__", None) or package_of(plugin)
            self._show(
                f"accel: pytest_configure_node raised {type(error).__name__} for a rank in {where}: {error}; "
                "ranks get only what it had added to node.workerinput"
            )
        self._failed.add(plugin)
