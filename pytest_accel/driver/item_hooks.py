"""The class of marked items, and their hook calls without the plugins that must act only in the test's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import left_out_conftests
from pytest_accel.core.plugin_roles import package_of
from pytest_accel.core.stash_keys import MARKED

_RANK_ONLY = ("_hypothesis_pytestplugin", "pytest_factoryboy", "pytest_socket")
"""Packages whose hooks around the phases of a test change the process, or use the fixtures of the test."""
_CONDITIONAL = ("skip", "skipif", "xfail")
"""The marks that a driver may leave to the ranks (`MarkedItem.leaves_to_ranks`)."""
_PHASES = ("pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown")


class _Hooks:
    """Replacement of the `ihook` of the items of one file."""

    def __init__(self, config: pytest.Config, conftests: frozenset[object]) -> None:
        """`conftests` are the plugins that the file's folder does not have."""
        self._manager = config.pluginmanager
        self._conftests = conftests

    def __getattr__(self, name: str) -> Any:
        excluded = {*self._conftests}
        if name in _PHASES:
            # Leave out pytest's log capture: the ranks capture their logs, and in the driver the capture would cost
            # more than all other work of the driver for a test.
            excluded.add(self._manager.get_plugin("logging-plugin"))
            plugins = (one.plugin for one in getattr(self._manager.hook, name).get_hookimpls())
            excluded |= {plugin for plugin in plugins if package_of(plugin) in _RANK_ONLY}
        elif name == "pytest_exception_interact":
            # The debugger of --pdb runs in the rank that fails: the driver has no frames of the failure.
            excluded.add(self._manager.get_plugin("pdbinvoke"))
        caller = self._manager.subset_hook_caller(name, excluded - {None})
        setattr(self, name, caller)
        return caller


_HOOKS: pytest.StashKey[dict[Path, _Hooks]] = pytest.StashKey()
"""The hooks of each file, which its items share."""


class _Redirected(pytest.Item):
    """Base of the classes of marked items. Their phases are those of the `MarkedItem` in the stash.

    Methods of a class, because four bound methods in each item take 1 KB. They leave out the plugins that must act only
    in ranks, and hide the marks that only the ranks evaluate.
    """

    __slots__ = ()

    def setup(self) -> None:
        __tracebackhide__ = True
        self.stash[MARKED].setup()

    def runtest(self) -> None:
        __tracebackhide__ = True
        self.stash[MARKED].runtest()

    def teardown(self) -> None:
        __tracebackhide__ = True
        self.stash[MARKED].teardown()

    def repr_failure(self, *args: Any, **kwargs: Any) -> Any:
        """Return the ranks' report of a failed call phase, for plugins that build their own report of it.

        A custom method may need attributes of its own exception type, which the stand-in for an exception lacks.
        """
        verdict = self.stash[MARKED].verdict("call")
        if verdict is not None and verdict.outcome == "failed" and isinstance(verdict.longrepr, dict):
            return verdict.representation(self)
        kind = pytest.Function if isinstance(self, pytest.Function) else pytest.Item
        return kind.repr_failure(self, *args, **kwargs)  # type: ignore[arg-type]

    @cached_property
    def ihook(self) -> Any:
        made = self.config.stash.setdefault(_HOOKS, {})
        if self.path not in made:
            hooks = super().ihook
            conftests: frozenset[object] = frozenset() if hooks is self.config.hook else left_out_conftests(hooks)
            made[self.path] = _Hooks(self.config, conftests)
        return made[self.path]

    def iter_markers(self, name: str | None = None) -> Iterator[pytest.Mark]:
        found: Iterator[pytest.Mark] = super().iter_markers(name)
        if name not in _CONDITIONAL:
            return found
        marks = [*found]
        marked = self.stash.get(MARKED, None)  # None in a copy that is not redirected yet.
        if marks and marked is not None and marked.leaves_to_ranks(name):
            return iter(())  # The driver has no RANK, for example, on which these marks may depend.
        return iter(marks)


@cache
def redirected(kind: type[pytest.Item]) -> type[pytest.Item]:
    """Return a subclass of `kind` and `_Redirected`, or `kind` itself for a copied item, which has such a class."""
    if issubclass(kind, _Redirected):
        return kind

    class Redirected(_Redirected, kind):  # type: ignore[valid-type, misc]
        pass

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Redirected, name, getattr(kind, name))
    return Redirected
