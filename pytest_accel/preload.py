"""What the fork server should import ahead of the ranks: seen in the test files and in what collection imports."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

_MARKS = re.compile(r"\bmark\s*\.\s*(distributed|devices)\b")
_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def marks_in(path: Path) -> set[str]:
    """Which of our marks a test file speaks of: a guess by its text, before anything of it is imported."""
    return set(_MARKS.findall(text(path)))


def imports_of(path: Path) -> set[str]:
    """The packages that a test file's import statements name."""
    return set(_IMPORTS.findall(text(path)))


def text(path: Path) -> str:
    """What a test file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Collecting it will say so.


def worth_preloading(names: Iterable[str], rootpath: Path) -> tuple[str, ...]:
    """Those of `names` that are installed packages: not the standard library, nor the project's own files.

    Packages that hold pytest plugins are left out, because pytest rewrites their asserts when a rank loads them.
    """
    plugins = _plugin_packages()
    return tuple(
        sorted(
            name
            for name in set(names)
            if name not in sys.stdlib_module_names
            and name not in plugins
            and not name.startswith("_")
            and _is_installed(name, rootpath)
        )
    )


def installed_plugins(named: Iterable[str], rootpath: Path) -> tuple[str, ...]:
    """Those of the values of ``-p`` that do not make pytest import any of the project's own files."""

    def is_harmless(name: str) -> bool:
        published = any(entry.name == name for entry in _plugins())
        return published or _is_installed(name.partition(".")[0], rootpath)

    return tuple(name for name in named if name.startswith("no:") or is_harmless(name))


@functools.cache
def _plugins() -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group="pytest11"))


@functools.cache
def _plugin_packages() -> set[str]:
    """All that comes with pytest plugins: pytest rewrites a plugin's whole distribution."""
    named = {entry.value.partition(":")[0].partition(".")[0] for entry in _plugins()}
    files = [path for entry in _plugins() if entry.dist is not None for path in entry.dist.files or ()]
    return named | {path.parts[0].removesuffix(".py") for path in files if path.suffix == ".py"}


def _is_installed(name: str, rootpath: Path) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        try:
            from importlib.util import find_spec

            spec = find_spec(name)
        except (ImportError, ValueError):
            return False
    origin = getattr(spec, "origin", None)
    if origin is None or not Path(origin).is_absolute():
        return False
    return "site-packages" in origin or "dist-packages" in origin or rootpath not in Path(origin).parents
