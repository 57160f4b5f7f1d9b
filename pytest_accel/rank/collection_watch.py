"""Observation of what the suite's own files do while they are imported in a rank: slow imports, and variables of torch.

Both matter only in a rank that was forked from a process with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from os import environ
from os.path import relpath
from pathlib import Path
from threading import get_ident
from typing import Any

from pytest_accel import PreloadWarning
from pytest_accel.core.clock import monotonic
from pytest_accel.core.plugin_roles import is_in_environment, published_plugins
from pytest_accel.core.rank_messages import WarningSketch
from pytest_accel.core.torch_variables import READ_AT_IMPORT
from pytest_accel.settings.option_types import UNFORKABLE

SLOW = 1.0
"""Seconds for the imports of one package from which on they are reported."""
_SHORT = 0.1
"""Seconds of the shortest import that is worth preloading by itself."""
_interpreter: Any = sys.modules["_frozen_importlib"]
_OF_PYTHON = {"_frozen_importlib", "_frozen_importlib_external", "zipimport"}
"""The modules that define Python's own loaders. Others may change the code of a module."""


class CollectionWatch:
    """Measures the imports of installed packages by the suite's files, and finds variables that these files change.

    There is one instance in each rank.
    """

    def __init__(self) -> None:
        """Call this when the rank has its environment, before any file of the suite is imported."""
        self.active = "torch" in sys.modules
        """False if the rank began without torch, because its test or the session asks for that."""
        self._original = _values()
        self._changed: list[tuple[str, str]] = []
        """Path of a test file, and a variable that torch has read before and that the file has changed."""
        self._imports: list[tuple[str, float]] = []
        """Name and seconds of each import of an installed package by a module that is not installed."""
        self._looked_at = 0
        """Number of imports that were known at the end of the last :meth:`take_slow_imports`."""

    @contextmanager
    def timing_imports(self) -> Generator[None, None, None]:
        """Measure imports in this block, in which conftests and plugins are imported."""
        original = getattr(_interpreter, "_find_and_load", None)
        if not self.active or original is None:  # Not public: without the function, slow imports are not reported.
            yield
            return
        _interpreter._find_and_load = timed = _timed(original, self._imports)
        try:
            yield
        finally:
            if _interpreter._find_and_load is timed:  # A module that was imported may have replaced it.
                _interpreter._find_and_load = original

    @contextmanager
    def watching(self, path: str) -> Generator[None, None, None]:
        """Measure imports in this block, in which the test file `path` is imported, and find variables it changes."""
        before = _values()
        try:
            with self.timing_imports():
                yield
        finally:
            if self.active:
                after = _values()
                self._changed += [
                    (path, name)
                    for name in sorted(READ_AT_IMPORT)
                    if after[name] not in (before[name], self._original[name])
                ]

    def take_changed(self) -> list[tuple[str, str]]:
        """Return the variables that torch has read before and that have been changed since the last call.

        Each comes with the path of the test file that has changed it.
        """
        changed, self._changed = self._changed, []
        return changed

    def take_warnings(self, root: Path) -> list[WarningSketch]:
        """Return a warning for each of :meth:`take_changed`, whose path is shown relative to `root`.

        A test gets those of another file if the rank has run no test of that file.
        """
        return [
            WarningSketch(
                f"{relpath(path, root)} sets {name}, which torch reads when it is imported: no effect in ranks, which "
                "are forked from a process that has imported torch. Set it in the mark's env=, or where pytest is "
                "started, or use accel_preload = none",
                PreloadWarning.__module__,
                PreloadWarning.__name__,
                path,
                1,
                None,
            )
            for path, name in self.take_changed()
        ]

    def take_slow_imports(self) -> Mapping[str, Mapping[str, float]]:
        """Return the seconds of imports by package and module, for packages that have become slow since the last call.

        Modules whose import was short are left out.
        """
        if len(self._imports) == self._looked_at:
            return {}
        by_package: dict[str, dict[str, float]] = {}
        for name, seconds in self._imports:
            modules = by_package.setdefault(name.partition(".")[0], {})
            modules[name] = modules.get(name, 0.0) + seconds
        slow = {package: modules for package, modules in by_package.items() if sum(modules.values()) >= SLOW}
        self._imports[:] = [(name, seconds) for name, seconds in self._imports if name.partition(".")[0] not in slow]
        self._looked_at = len(self._imports)
        return {
            package: {name: seconds for name, seconds in modules.items() if seconds >= _SHORT}
            for package, modules in slow.items()
        }


def _values() -> dict[str, str | None]:
    return {name: environ.get(name) for name in READ_AT_IMPORT}


def _timed(original: Callable[[str, Any], Any], imports: list[tuple[str, float]]) -> Callable[[str, Any], Any]:
    """Return a function for `importlib._bootstrap._find_and_load` that adds the outermost imports to `imports`.

    Python calls that function for each import of a module that is not in `sys.modules`. Nothing that a suite may look
    at differs: neither `sys.meta_path`, nor `builtins.__import__`, nor the loader of a module. A finder would not do,
    since it learns only when an import begins.
    """
    owner = get_ident()

    def timed(name: str, import_: Any) -> Any:
        if get_ident() != owner:
            return original(name, import_)
        before, known, began = len(imports), _loaded_unforkable(), monotonic()
        module = original(name, import_)
        if _is_preloadable(name, module):
            # The imports that this one has made are part of it.
            imports[before:] = [(name, monotonic() - began)] if _loaded_unforkable() == known else []
        return module

    # Python removes the frames of its own import code from tracebacks, by the name of their file.
    timed.__code__ = timed.__code__.replace(co_filename=original.__code__.co_filename)
    return timed


def _loaded_unforkable() -> list[str]:
    return [name for name in UNFORKABLE if name in sys.modules]


def _is_preloadable(name: str, module: Any) -> bool:
    """Return whether `name` is a module of an installed package that Python itself loads, and of no pytest plugin."""
    package = name.partition(".")[0]
    if package in UNFORKABLE or package in published_plugins().values():
        return False
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    loader = getattr(spec, "loader", None)
    kind = loader if isinstance(loader, type) else type(loader)
    return isinstance(origin, str) and is_in_environment(origin) and kind.__module__ in _OF_PYTHON
