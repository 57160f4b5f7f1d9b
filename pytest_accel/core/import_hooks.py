"""Detection of finders and loaders that change the modules they import, which the fork server must not preload.

A module that the fork server has preloaded is not imported again in a rank, so the finders of the rank do not see it.
Without this check, typeguard, beartype, jaxtyping and pytest's assertion rewriting would be bypassed, and tests that
must fail would pass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pytest_accel.core import preload_discovery
from pytest_accel.core.loaders import INTERPRETERS, loads_plainly

_HARMLESS = re.compile(
    r"_pytest\.|pytest_accel$|_distutils_hack\b|_virtualenv$|_?editables?\b|__editable__|\w+_editable(_loader)?$|"
    r"_numba_cuda_redirector$"
)
"""Modules of finders that do not change preloaded modules: those of setuptools, virtualenv, editable installs
(setuptools, hatchling, scikit-build-core, meson-python), numba-cuda, this package, and pytest. `loaded_otherwise` finds
what pytest changes. A finder that a ``.pth`` file installs, such as numba-cuda's, is in every process."""
_NAMES = re.compile(r"\b(meta_path|path_hooks|\w*import_hook|beartype\s*\.\s*claw|pyximport)\b")


def foreign_finder() -> str | None:
    """Return the name and place of a finder that may change the modules that this process imports; None if none does.

    Finders that come after Python's own are harmless: they are asked only for modules that Python's own finder does not
    find, which the fork server could not preload either. `six` and `mpi4py` have such finders.
    """
    for finder in _before(PathFinder, sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        if not _is_harmless(kind.__module__):
            return f"{kind.__module__}.{kind.__qualname__} is on sys.meta_path"
    interpreters = next((hook for hook in sys.path_hooks if hook.__module__ == "_frozen_importlib_external"), None)
    for hook in _before(interpreters, sys.path_hooks):
        if not _is_harmless(hook.__module__):
            return f"{hook.__module__}.{getattr(hook, '__qualname__', '')} is on sys.path_hooks"
    return None


def _before(end: object, entries: Iterable[Any]) -> Iterator[Any]:
    """Yield the `entries` before `end`; all of them if `end` is missing."""
    for entry in entries:
        if entry is end:
            return
        yield entry


def _is_harmless(module: str) -> bool:
    return module in INTERPRETERS or _HARMLESS.match(module) is not None


def mentioned_in(path: Path) -> bool:
    """Return whether the text of a test file mentions import hooks.

    Its tests and fixtures may install a finder only when they run, so `foreign_finder` cannot see it before.
    """
    return _NAMES.search(preload_discovery.text(path)) is not None


def loaded_otherwise(rootpath: Path) -> set[str]:
    """Return the names of imported modules that were not loaded by Python's own loaders.

    The result leaves out the project's own files, which are never preloaded; pytest plugins, whose asserts pytest
    rewrites in every process; and torch, which is always preloaded: pytest rewrites those of its modules that are named
    like test files, such as `torch._dynamo.test_case`.
    """
    excluded: Collection[str] = {*preload_discovery.plugin_packages(), "torch"}
    found = set()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or loads_plainly(spec) or name.partition(".")[0] in excluded:
            continue
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or preload_discovery.is_outside(origin, rootpath):
            found.add(name)
    return found
