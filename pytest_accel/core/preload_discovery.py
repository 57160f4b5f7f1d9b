"""Selection of the modules that the fork server should preload, from test files and the imports of collection.

`import_hooks` detects what must not be preloaded.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

UNFORKABLE = {
    **dict.fromkeys(("jax", "jaxlib", "tensorflow"), "its runtime has threads, which do not survive a fork"),
    "cupy": "its CUDA runtime does not survive a fork",
    "paddle": "its import starts a device runtime, which does not survive a fork",
}
"""Packages that the fork server never imports, each with the reason.

Importing one may start its runtime or not: that depends on the release, on the machine, and on what other packages do
with it when they are imported. The fork server can only see threads and the runtimes that torch has started.
"""
_MARKS = re.compile(r"\bmark\s*\.\s*(distributed|devices)\b")
_INSTALLED = {"site-packages", "dist-packages"}
_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def marks_in(path: Path) -> set[str]:
    """Return the marks of this plugin that the text of a test file mentions: a guess before the file is imported."""
    return set(_MARKS.findall(text(path)))


def imports_of(path: Path) -> set[str]:
    """Return the top-level packages in the import statements of a test file."""
    return set(_IMPORTS.findall(text(path)))


def text(path: Path) -> str:
    """Return the text of a test file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Collection will report the error.


def worth_preloading(names: Iterable[str], rootpath: Path) -> tuple[str, ...]:
    """Return those of `names` that are installed packages: not the standard library, nor the project's own files.

    The result leaves out packages with pytest plugins, because pytest rewrites their asserts when a rank loads them,
    and packages that other loaders than Python's own load.
    """
    from pytest_accel.core.loaders import loads_plainly

    plugins = plugin_packages()

    def is_worth(name: str) -> bool:
        if name in sys.stdlib_module_names or name in plugins or name.startswith("_"):
            return False
        spec = _spec_of(name)
        return _is_installed(spec, rootpath) and loads_plainly(spec) and not _is_vendored(spec)

    return tuple(sorted(filter(is_worth, set(names))))


def installed_plugins(named: Iterable[str], rootpath: Path) -> tuple[str, ...]:
    """Return those of `named`, values of ``-p``, that do not import any of the project's own files."""

    def is_harmless(name: str) -> bool:
        published = any(entry.name == name for entry in _plugins())
        return published or _is_installed(_spec_of(name.partition(".")[0]), rootpath)

    return tuple(name for name in named if name.startswith("no:") or is_harmless(name))


@functools.cache
def _plugins() -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group="pytest11"))


@functools.cache
def published_packages() -> set[str]:
    """Return the top-level packages that entry points of pytest plugins name."""
    return {entry.value.partition(":")[0].partition(".")[0] for entry in _plugins()}


@functools.cache
def plugin_packages() -> set[str]:
    """Return the top-level modules of distributions with pytest plugins: pytest rewrites all of their modules."""
    files = [path for entry in _plugins() if entry.dist is not None for path in entry.dist.files or ()]
    return published_packages() | {path.parts[0].removesuffix(".py") for path in files if path.suffix == ".py"}


def _spec_of(name: str) -> Any:
    """Return the spec of the top-level module `name`, or None if it cannot be found."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None:
        try:
            from importlib.util import find_spec

            spec = find_spec(name)
        except (ImportError, ValueError):
            return None
    return spec


def _is_installed(spec: Any, rootpath: Path) -> bool:
    origin = getattr(spec, "origin", None)
    return origin is not None and Path(origin).is_absolute() and is_outside(origin, rootpath)


def is_outside(origin: str, rootpath: Path) -> bool:
    """Return whether the file `origin` is not the project's own."""
    parents = Path(origin).parents
    return rootpath not in parents or any(parent.name in _INSTALLED for parent in parents)


def is_in_environment(origin: str) -> bool:
    """Return whether the file `origin` lies in a folder into which packages are installed."""
    return not _INSTALLED.isdisjoint(Path(origin).parts)


def _is_vendored(spec: Any) -> bool:
    """Return whether a package is vendored in another one that has put its own folder on `sys.path` (setuptools).

    The fork server would not find it, since its `sys.path` is that of the session's start.
    """
    folder = Path(spec.origin).parent
    if spec.submodule_search_locations is not None:
        folder = folder.parent
    for parent in (folder, *folder.parents) if _INSTALLED & set(folder.parts) else ():
        if parent.name in _INSTALLED:
            return False
        if (parent / "__init__.py").exists():
            return True
    return False
