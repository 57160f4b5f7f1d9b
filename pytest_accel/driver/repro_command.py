"""The command line that reproduces a failed test: the same test, devices and options."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
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

_COLLECTING = ("--doctest", "--nb", "--markdown-docs", "--codeblocks")
"""Prefixes of the options by which pytest and plugins collect tests other than functions."""

_FLAG_OF_SETTING = {
    f"{name}=true": f"--{name.replace('_', '-')}" for name in ("strict_markers", "strict_config", "strict")
}
"""Flags that pytest turns into settings of the ini file: setting, and flag."""


def command(item: pytest.Item, names: tuple[str, ...], spec: WorldSpec, session_kind: str | None) -> str:
    """Return the command line, to be run in the folder from which the session was started.

    `names` select the test in its file. The world size needs no option: it is in the mark, or part of the test's name,
    or follows from the devices.
    """
    config = item.config
    path = os.path.relpath(item.path, config.invocation_params.dir)
    words = ["pytest", "::".join((path, *names)), *_pytest_options(config), *given(config, _REPEATED_OPTIONS)]
    if not isinstance(item, pytest.Function):
        # Options of ``addopts`` need not be repeated.
        words += [str(word) for word in config.invocation_params.args if str(word).startswith(_COLLECTING)]
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


def _pytest_options(config: pytest.Config) -> list[str]:
    """Return the options of pytest and pytest-randomly without which the test is not found, or runs differently."""
    option = config.option
    words: list[str] = []
    for name in dict.fromkeys(_plugins(config.invocation_params.args)):
        words += ["-p", name]
    for flags, name in ((("-c", "--config-file"), "inifilename"), (("--rootdir",), "rootdir")):
        # Leave out options that this plugin has given to an xdist worker.
        if any(str(word).startswith(flags) for word in config.invocation_params.args):
            words += [flags[0], str(getattr(option, name))]
    for value in getattr(option, "override_ini", None) or ():
        words += [_FLAG_OF_SETTING[value]] if value in _FLAG_OF_SETTING else ["-o", value]
    if isinstance(seed := getattr(option, "randomly_seed", None), int):
        words.append(f"--randomly-seed={seed}")
    return words


def _plugins(args: Sequence[str]) -> list[str]:
    """Return the values of ``-p`` in `args`. The option's value would include the plugins of ``addopts``."""
    words = [str(word) for word in args]
    names = [after for word, after in pairwise(words) if word == "-p"]
    return names + [word[2:] for word in words if word.startswith("-p") and len(word) > 2]
