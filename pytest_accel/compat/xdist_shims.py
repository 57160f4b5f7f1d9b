"""All uses of private attributes and classes of pytest-xdist that have no public equivalent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import Overridden, tear_down_after


def pass_over_hints(config: pytest.Config, note: Callable[[bool], None]) -> None:
    """Make an xdist worker run no test that is sent with a negative index, which is only a hint at the next test.

    Fixtures that were kept for the hinted test are torn down if the test after it does not use them. ``note(is_hint)``
    is called before each test that runs, and says whether its next test is a hint.
    """
    # xdist has no hook for this. An implementation of `pytest_runtest_protocol` that runs nothing was rejected: the
    # wrappers of other plugins would still be called, for a test without phases.
    own, hook = config, config.hook
    worker = _worker_plugin(config)

    def run(item: pytest.Item, nextitem: pytest.Item | None) -> object:
        if worker.item_index < 0:
            tear_down_after(item, nextitem)
            return True
        note(isinstance(worker.nextitem_index, int) and worker.nextitem_index < 0)
        return hook.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def serialize(config: object, report: pytest.CollectReport | pytest.TestReport) -> object:
        return hook.pytest_report_to_serializable(config=own, report=report)

    hooks = Overridden(hook, pytest_runtest_protocol=run, pytest_report_to_serializable=serialize)
    vars(worker)["config"] = Overridden(config, hook=hooks)


def _worker_plugin(config: pytest.Config) -> Any:
    """Return the plugin by which an xdist worker talks to the controller; raise RuntimeError if there is none."""
    # Compare the class by name: execnet runs its module under another module name.
    for _, plugin in config.pluginmanager.list_name_plugin():
        if type(plugin).__name__ == "WorkerInteractor":
            return plugin
    raise RuntimeError("this release of pytest-xdist has no plugin of the class WorkerInteractor in its workers")


def worker_manager(config: pytest.Config) -> Any:
    """Return the object that has started xdist's workers, in their controller; None in a session without workers."""
    return getattr(config.pluginmanager.get_plugin("dsession"), "nodemanager", None)


def worker_of_starting_test(config: pytest.Config) -> Callable[[], str]:
    """Return a function for the controller's `pytest_runtest_logstart`: it returns the name of the test's worker.

    xdist does not pass the worker to the hook. The name is empty without xdist. Call this after `pytest_configure`.
    """
    controller: Any = config.pluginmanager.get_plugin("dsession")
    worker = ""
    if controller is not None:
        report_start = controller.worker_logstart

        def note_worker(node: Any, **test: Any) -> None:
            nonlocal worker
            worker = node.gateway.id
            report_start(node, **test)

        controller.worker_logstart = note_worker
    return lambda: worker
