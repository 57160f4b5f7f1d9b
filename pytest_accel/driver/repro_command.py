"""The command that runs one failed test again as it ran: same devices, and the options that made it what it was."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from pytest_accel.core.messages import NodeRef, WorldSpec
from pytest_accel.settings.options import given

_TITLE = "rerun"
_SHAPING = ("accel", "accel_order", "accel_share", "accel_timeout", "accel_fresh")
"""Options of the plugin that change what a test gets. The ini file's values need no repeating."""


_COLLECTING = {
    "doctestmodules": "--doctest-modules",
    "doctestglob": "--doctest-glob",
    "doctest_plus": "--doctest-plus",
    "nbmake": "--nbmake",
    "nbval": "--nbval",
    "nbval_lax": "--nbval-lax",
    "markdowndocs": "--markdown-docs",
    "codeblocks": "--codeblocks",
}
"""Options without which tests that are no functions are not collected: their names in ``config.option``, and flags."""


def command(item: pytest.Item, node: NodeRef, spec: WorldSpec, session_kind: str | None) -> str:
    """The command for a person in the folder from which the session was started.

    The world size is the mark's, or part of the test's name. Devices are named where they are of the session's kind,
    which is the kind that ``--accel-devices`` is about.
    """
    config = item.config
    path = os.path.relpath(node.path, config.invocation_params.dir)
    words = ["pytest", "::".join((path, *node.names)), *_pytest_options(config), *given(config, _SHAPING)]
    if not isinstance(item, pytest.Function):
        words += _collecting_options(config)
    if spec.devices and spec.kind == session_kind:
        words += ["--accel-devices", ",".join(dict.fromkeys(device.id for device in spec.devices))]
    return " ".join(shlex.quote(word) for word in words)


def append(report: pytest.TestReport, words: str, option: argparse.Namespace) -> None:
    """Have the report of a failure end with `words`.

    That is behind the captured output where it is shown. A junit file holds the failure's own text only, which then
    ends with them, as it does where no captured output is shown. Under ``--tb=line`` some versions of pytest show
    nothing of the report: all the commands stand in the summary.
    """
    longrepr: Any = report.longrepr
    if option.tbstyle == "line":
        report.accel_rerun = words  # type: ignore[attr-defined]
    elif option.showcapture == "all" and not getattr(option, "xmlpath", None):
        report.sections.append((_TITLE, words))
    elif hasattr(longrepr, "addsection"):
        longrepr.addsection(_TITLE, words)
    else:
        report.longrepr = f"{longrepr}\n{_TITLE}: {words}"


def _pytest_options(config: pytest.Config) -> list[str]:
    """pytest's own options without which the test would not be found, or not be the same."""
    option = config.option
    words: list[str] = []
    for name in dict.fromkeys(_plugins(config.invocation_params.args)):
        words += ["-p", name]
    for flag, name in (("-c", "inifilename"), ("--rootdir", "rootdir")):
        value = getattr(option, name, None)
        if value:
            words += [flag, str(value)]
    for value in getattr(option, "override_ini", None) or ():
        words += ["-o", value]
    if isinstance(seed := getattr(option, "randomly_seed", None), int):
        words.append(f"--randomly-seed={seed}")
    return words


def _collecting_options(config: pytest.Config) -> list[str]:
    values = {flag: getattr(config.option, name, None) for name, flag in _COLLECTING.items()}
    words = [flag for flag, value in values.items() if value is True]
    return words + [f"{flag}={each}" for flag, value in values.items() if isinstance(value, list) for each in value]


def _plugins(args: Sequence[str]) -> list[str]:
    """What ``-p`` says on the command line itself: the option's value holds that of ``addopts`` too."""
    words = [str(word) for word in args]
    names = [after for word, after in pairwise(words) if word == "-p"]
    return names + [word[2:] for word in words if word.startswith("-p") and len(word) > 2]
