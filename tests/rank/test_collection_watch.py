"""Tests of the measurement of imports in a rank, with modules in a folder of their own."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pytest_accel.rank import collection_watch
from pytest_accel.rank.collection_watch import CollectionWatch

_MODULES = {
    "site-packages/watched_package/__init__.py": "import watched_dependency\n",
    "site-packages/watched_package/part.py": "",
    "site-packages/watched_dependency.py": "",
    "site-packages/watched_with_jax.py": "import jax\n",
    "site-packages/watched_broken.py": "import watched_dependency\nraise ZeroDivisionError\n",
    "site-packages/jax.py": "",
    "watched_own.py": "import watched_package.part\nimport watched_with_jax\n",
}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectionWatch]:
    """Provide the watch of a process that has imported torch, in which each import counts as slow."""
    for name, text in _MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(collection_watch, "SLOW", 0.0)
    monkeypatch.setattr(collection_watch, "_SHORT", 0.0)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("PYTORCH_JIT", "1")
    known = set(sys.modules)
    yield CollectionWatch()
    for name in sys.modules.keys() - known:
        del sys.modules[name]


def test_the_outermost_imports_of_installed_packages_are_measured_once(watch: CollectionWatch) -> None:
    """An import that brings a package which does not survive a fork must not be preloaded."""
    with watch.watching("test_it.py"):
        importlib.import_module("watched_own")
    slow = watch.take_slow_imports()
    assert {package: list(modules) for package, modules in slow.items()} == {
        "watched_package": ["watched_package.part"]
    }
    assert watch.take_slow_imports() == {}
    with watch.watching("test_it.py"):
        importlib.import_module("watched_own")
    assert watch.take_slow_imports() == {}


def test_measuring_leaves_no_trace(watch: CollectionWatch) -> None:
    before = sys.modules["_frozen_importlib"]._find_and_load
    finders = list(sys.meta_path)
    with watch.watching("test_it.py"), pytest.raises(ZeroDivisionError) as raised:
        import watched_broken  # type: ignore[import-not-found]  # noqa: F401
    assert [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)] == [
        "test_collection_watch.py",
        "watched_broken.py",
    ]
    assert sys.modules["_frozen_importlib"]._find_and_load is before
    assert sys.meta_path == finders


def test_variables_that_the_block_changes_are_found_once(
    watch: CollectionWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch.watching("test_it.py"):
        monkeypatch.setenv("PYTORCH_JIT", "1")
        monkeypatch.setenv("MINE", "1")
    assert watch.take_changed() == []
    with watch.watching("test_it.py"):
        monkeypatch.setenv("PYTORCH_JIT", "0")
        monkeypatch.setenv("TORCH_LOGS", "dynamo")
    assert watch.take_changed() == [("test_it.py", "PYTORCH_JIT"), ("test_it.py", "TORCH_LOGS")]
    with watch.watching("test_it.py"):
        monkeypatch.setenv("PYTORCH_JIT", "0")
    assert watch.take_changed() == []
    with watch.watching("test_it.py"):
        monkeypatch.setenv("PYTORCH_JIT", "1")
    assert watch.take_changed() == []
