"""The ranks of a session as xdist's workers: their numbers, their `workerinput`, and the hooks that xdist has for them.

The hooks `pytest_configure_node` and `pytest_testnodedown` of the suite and of other plugins are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from pytest_accel.core.plugin_roles import is_third_party, package_of
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.shims import number_of_new_worker, worker_manager
from pytest_accel.core.worker_input import WorkerInput, only_plain
from pytest_accel.pool.main_thread import MainThreadCalls
from pytest_accel.verdict.sentences import describe_exit

_CONFIGURE = "pytest_configure_node"
_DOWN = "pytest_testnodedown"


class RankNode:
    """Stands for a rank in xdist's hooks, as its `WorkerController` stands for a worker."""

    def __init__(self, config: pytest.Config, given: dict[str, Any], manager: Any) -> None:
        self.config = config
        self.workerinput = given
        self.nodemanager = manager
        name = given["workerid"]
        self.gateway = SimpleNamespace(id=name, spec=SimpleNamespace(id=name, popen=True, chdir=None, env={}))

    def __repr__(self) -> str:
        return f"<RankNode {self.gateway.id}>"


class RankInputs:
    """Numbers the ranks of a session, and calls the hooks for them. Owned by the session's pool, in the controller.

    A rank gets the lowest number that no living process of the session has. Under xdist, new numbers are taken from
    xdist's own counter, which also numbers the workers that replace crashed ones. A number that a rank has had belongs
    to ranks from then on.
    """

    def __init__(self, config: pytest.Config, show: Callable[[str], None], calls: MainThreadCalls) -> None:
        """`show` writes a line to the terminal. The hooks are called by way of `calls`."""
        self._config = config
        self._show = show
        self._calls = calls
        self._failed: set[tuple[str, object]] = set()
        """The hooks that have raised an exception, each with its plugin."""
        manager = worker_manager(config)
        self._run = getattr(manager, "testrunuid", None) or getattr(config.option, "testrunuid", None) or uuid4().hex
        self._manager = manager or SimpleNamespace(config=config, testrunuid=self._run, specs=[], roots=[])
        self._is_distributed = manager is not None
        self._free: list[int] = []
        """A heap of the numbers of ranks that have ended."""
        self._count = 0
        """A number that is larger than that of each rank so far."""

    def __call__(self, ranks: int) -> RanksAsWorkers:
        """Return the ranks of a new world. The pool's lock is held."""
        numbers = [heappop(self._free) if self._free else self._new_number() for _ in range(ranks)]
        given = [
            {
                "workerid": f"gw{number}",
                "workercount": self._count,
                "testrunuid": self._run,
                "mainargv": list(sys.argv),
            }
            for number in numbers
        ]
        return RanksAsWorkers(self, self._calls, numbers, [RankNode(self._config, one, self._manager) for one in given])

    def _new_number(self) -> int:
        number = number_of_new_worker(self._manager) if self._is_distributed else self._count
        self._count = number + 1
        return number

    def free(self, number: int) -> None:
        """Let a later rank have this number. The pool's lock is held."""
        heappush(self._free, number)

    def implementers(self, hook: str) -> list[object]:
        """Return the plugins that implement `hook`, in the order of their calls, without this plugin and xdist."""
        plugins = [plugin for plugin in self._plugins(hook) if package_of(plugin) not in ("pytest_accel", "xdist")]
        # Ranks call no hooks by which an installed plugin would send its results when a worker ends.
        return [plugin for plugin in plugins if hook == _CONFIGURE or not is_third_party(plugin)]

    def _plugins(self, hook: str) -> list[object]:
        caller = getattr(self._config.hook, hook, None)  # Without xdist, a suite may implement it.
        return [] if caller is None else list({one.plugin: None for one in reversed(caller.get_hookimpls())})

    def call(self, hook: str, **arguments: object) -> None:
        """Call `hook` of each plugin; show the errors of conftests. Only for the main thread."""
        for plugin in self.implementers(hook):
            others = [other for other in self._plugins(hook) if other is not plugin]
            try:
                self._config.pluginmanager.subset_hook_caller(hook, others)(**arguments)
            except (KeyboardInterrupt, pytest.exit.Exception):
                raise
            except BaseException as error:  # pytest.skip would skip the test for which the rank is started.
                self._report(hook, plugin, error)

    def _report(self, hook: str, plugin: object, error: BaseException) -> None:
        """Show, once, that a conftest's hook does not work for ranks; plugins may need more of xdist than they have."""
        if (hook, plugin) not in self._failed and not is_third_party(plugin):
            where = getattr(plugin, "__file__", None) or package_of(plugin)
            effect = "; ranks get only what it had added to node.workerinput" if hook == _CONFIGURE else ""
            self._show(f"accel: {hook} raised {type(error).__name__} for a rank in {where}: {error}{effect}")
        self._failed.add((hook, plugin))


class RanksAsWorkers:
    """The ranks of one world as xdist's workers. Owned by the world in the pool."""

    def __init__(self, inputs: RankInputs, calls: MainThreadCalls, numbers: list[int], nodes: list[RankNode]) -> None:
        self._inputs = inputs
        self._calls = calls
        self._numbers = numbers
        self._nodes = nodes
        self._configured: list[RankNode] = []
        """The ranks for which `pytest_configure_node` has been called."""

    def configure(self, then: Callable[[tuple[WorkerInput, ...]], None]) -> None:
        """Call ``then`` with the `workerinput` of each rank: at once if there is no hook, else in the main thread."""
        if self._inputs.implementers(_CONFIGURE):
            self._calls.add(lambda: then(tuple(map(self._configured_input, self._nodes))))
        else:
            self._configured = self._nodes
            then(tuple(node.workerinput for node in self._nodes))

    def _configured_input(self, node: RankNode) -> WorkerInput:
        given = node.workerinput
        node.workerinput = dict(given)
        self._inputs.call(_CONFIGURE, node=node)
        self._configured.append(node)
        entries: object = node.workerinput  # A hook may have replaced it.
        return {**(only_plain(entries) if isinstance(entries, dict) else {}), **given}

    def end(self, exits: Mapping[int, RankExit], outputs: Mapping[int, dict[str, Any]]) -> None:
        """Free the numbers, since all processes have ended, and have `pytest_testnodedown` called.

        `outputs` has `config.workeroutput` of the ranks that have ended their sessions.
        """
        for number in self._numbers:
            self._inputs.free(number)
        if self._inputs.implementers(_DOWN):
            self._calls.add(lambda: self._report_down(exits, outputs))

    def _report_down(self, exits: Mapping[int, RankExit], outputs: Mapping[int, dict[str, Any]]) -> None:
        for rank, node in enumerate(self._nodes):
            if node not in self._configured:
                continue
            if rank in outputs:
                vars(node)["workeroutput"] = outputs[rank]
                error = None
            else:
                error = describe_exit(exits[rank], "was") if rank in exits else "ended for an unknown reason"
            self._inputs.call(_DOWN, node=node, error=error)
