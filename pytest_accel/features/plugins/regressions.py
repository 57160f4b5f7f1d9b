"""pytest-regressions: each rank compares with the expected files; the driver writes new files once."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import require_parameters, take
from pytest_accel.features.plugins.rank_files import RankFiles, WrittenFiles

_CHECK = "perform_regression_check"


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps pytest-regressions from writing in a rank."""
    original = _original()
    files = RankFiles(config)
    check = _collecting(original, files)
    for module in list(sys.modules.values()):  # The modules of fixtures have imported the function by name.
        if getattr(module, "__dict__", {}).get(_CHECK) is original:
            setattr(module, _CHECK, check)
    return files


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes expected files. Raise an error for an unknown release."""
    _original()
    return WrittenFiles("regressions", config)


def _original() -> Callable[..., None]:
    """Return the function with which all fixtures compare and write, if it has the parameters that are used here."""
    function: Callable[..., None] = take("pytest_regressions.common", _CHECK)
    names = ("datadir", "original_datadir", "request", "check_fn", "dump_fn", "extension", "fullpath")
    require_parameters(function, *names)
    return function


def _collecting(original: Callable[..., None], files: RankFiles) -> Callable[..., None]:
    """Return `original` for a rank: files that it would write beside the tests are passed to `files`."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def check(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        compare, obtained_filename = given["check_fn"], given.get("obtained_filename")

        def dumping(dump: Callable[[Path], Any]) -> Callable[[Path], Any]:
            def dump_staged(path: Path) -> Any:
                if path.is_relative_to(files.temporary) or path == obtained_filename:
                    return dump(path)
                with files.staged(path.parent) as stage:
                    dumped = dump(stage / path.name)
                names = dumped or []
                return [str(name).replace(str(stage), str(path.parent)) for name in names]

            return dump_staged

        def check_fn(obtained: Path, expected: Path) -> None:
            __tracebackhide__ = True
            compare(obtained, expected)
            files.keep(_source(given, expected))

        given["check_fn"] = check_fn
        for name in ("dump_fn", "dump_aux_fn"):
            if name in given:
                given[name] = dumping(given[name])
        original(*bound.args, **bound.kwargs)

    return check


def _source(given: dict[str, Any], expected: Path) -> Path:
    """Return the suite's file from which `expected` was copied."""
    if given.get("fullpath"):
        return Path(given["fullpath"])
    copies = Path(getattr(given["datadir"], "tmp_path", given["datadir"]))
    return Path(given["original_datadir"]) / expected.relative_to(copies)
