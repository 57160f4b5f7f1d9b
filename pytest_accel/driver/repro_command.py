"""The command line that reproduces a failed test: the same test, devices and options."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable
from typing import Any

import pytest

from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.settings.options import given

_TITLE = "rerun"
_REPEATED_OPTIONS = (
    *("accel", "accel_cluster", "accel_order", "accel_share", "accel_timeout", "accel_fresh"),
    "accel_jitter",
)
"""Options of this plugin that change how a test runs. Values from the ini file need not be repeated."""

_WITH_VALUES = ("-p", "-c", "--config-file", "--rootdir", "-o", "--override-ini", "--doctest-glob")
"""Options without which the test is not found, or runs differently, and whose value may be the next word."""
_REPEATED = (*_WITH_VALUES, "--strict")
"""Prefixes of the options that are repeated as they were given. Options of ``addopts`` need not be repeated."""
_COLLECTING = ("--doctest", "--nb", "--markdown-docs", "--codeblocks")
"""Prefixes of the options by which pytest and plugins collect tests other than functions."""


def command(item: pytest.Item, names: tuple[str, ...], spec: WorldSpec, session_kind: str | None) -> str:
    """Return the command line, to be run in the folder from which the session was started.

    `names` select the test in its file. The world size needs no option: it is in the mark, or part of the test's name,
    or follows from the devices.
    """
    config = item.config
    path = os.path.relpath(item.path, config.invocation_params.dir)
    prefixes = _REPEATED if isinstance(item, pytest.Function) else (*_REPEATED, *_COLLECTING)
    words = ["pytest", "::".join((path, *names)), *_with_prefix(config.invocation_params.args, prefixes)]
    if isinstance(seed := getattr(config.option, "randomly_seed", None), int):
        words.append(f"--randomly-seed={seed}")
    words += given(config, _REPEATED_OPTIONS)
    # ``--accel-ids`` selects devices of the session's kind on this machine only.
    if spec.devices and spec.key.kind == session_kind and not spec.is_remote(0):
        words += ["--accel-ids", ",".join(dict.fromkeys(device.id for device in spec.devices))]
    return " ".join(shlex.quote(word) for word in words)


def append(report: pytest.TestReport, command_line: str, option: argparse.Namespace) -> None:
    """Append `command_line` to the report of a failure, after the captured output if that is shown."""
    longrepr: Any = report.longrepr
    if option.tbstyle == "line":
        # Some versions of pytest show nothing of the report, so the terminal summary lists all command lines.
        report.accel_rerun = command_line  # type: ignore[attr-defined]
    elif option.showcapture == "all" and not getattr(option, "xmlpath", None):
        report.sections.append((_TITLE, command_line))
    # Captured output is not shown, or a junit file is written, which contains only the failure's own text.
    elif hasattr(longrepr, "addsection"):
        longrepr.addsection(_TITLE, command_line)
    else:
        report.longrepr = f"{longrepr}\n{_TITLE}: {command_line}"


def _with_prefix(args: Iterable[object], prefixes: tuple[str, ...]) -> list[str]:
    """Return the words of `args` that begin with one of `prefixes`, with their values, each option once."""
    found: dict[tuple[str, ...], None] = {}
    words = map(str, args)
    for word in words:
        if word.startswith(prefixes):
            found[(word, next(words, "")) if word in _WITH_VALUES else (word,)] = None
    return [word for option in found for word in option]
