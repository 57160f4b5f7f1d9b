"""Which finders and loaders change what they import, so that nothing may be imported ahead of them.

A module that the fork server has imported ahead is not imported in a rank, so no finder of the rank sees it. typeguard,
beartype, jaxtyping and pytest's assertion rewriting would be bypassed, and a test that must fail would pass.
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
    r"_pytest\.|pytest_accel$|_distutils_hack\b|_virtualenv$|_?editables?\b|__editable__|\w+_editable(_loader)?$"
)
"""Modules of finders that change nothing that is imported ahead: those of setuptools, virtualenv, packages installed in
place (setuptools, hatchling, scikit-build-core, meson-python), this package, and pytest, but for what
`loaded_otherwise` finds."""
_NAMES = re.compile(r"\b(meta_path|path_hooks|\w*import_hook|beartype\s*\.\s*claw|pyximport)\b")


def foreign_finder() -> str | None:
    """Return what finder may change the modules that this process imports, and where it is; None if there is none.

    A finder behind the interpreter's own sees only what that one has not found, which the fork server would not find
    either. `six` and `mpi4py` have such finders.
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
    """Return whether a file seems to install a finder, which its tests and fixtures may do only when they run."""
    return _NAMES.search(preload_discovery.text(path)) is not None


def loaded_otherwise(rootpath: Path) -> set[str]:
    """Return the imported modules that other loaders than the interpreter's have loaded.

    Left out are the project's own files, which are not imported ahead, pytest's plugins, whose asserts it rewrites
    wherever it loads them, and torch, which always is imported ahead: pytest rewrites modules that are named like files
    of tests, such as `torch._dynamo.test_case`.
    """
    left_out: Collection[str] = {*preload_discovery.plugin_packages(), "torch"}
    found = set()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or loads_plainly(spec) or name.partition(".")[0] in left_out:
            continue
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or preload_discovery.is_outside(origin, rootpath):
            found.add(name)
    return found
