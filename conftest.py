from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytest.register_assert_rewrite("tests.background_suite")

PLUGINS = Path(__file__).parent / "tests" / "features" / "plugins"
"""Tests of other projects' plugins. Most plugins are installed only in an environment of their own."""
_LONG = "takes long: --long runs it"
_AXE = "takes minutes: --axe runs it"
_SKIPS = {
    "long": "take long: --long runs them",
    "axe": "take minutes, the kernel's tests without a feature: --axe runs them",
    "package": "need packages of other projects: pip install -e '.[test,plugins]'",
    "gpu": "need a GPU: run tests/gpu on a machine with one",
    "program": "need programs, or root on Linux: .ci/run installs the programs on Debian",
    "other": "need another system, Python or release: -rs lists the reasons",
}
"""The kinds of skips, and what runs the tests."""
_PACKAGE = re.compile(r"could not import|needs (pytest-)?\w+(, \w+)*$|the package \S+ is not installed")
_PROGRAM = re.compile(r"there is no|is not installed|cannot (be made|create)|can be made|not possible here|\broot\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "tests/faults/test_chaos.py")
    group.addoption("--chaos", type=int, default=10, metavar="N", help="how many processes are killed (default: 10)")
    group.addoption("--chaos-seed", type=int, default=None, metavar="SEED", help="which ones; shown where it fails")
    group = parser.getgroup("long", "tests that take long")
    group.addoption("--long", action="store_true", default=False, help="run the tests marked long, too")
    group.addoption(
        "--axe",
        action="store_true",
        default=False,
        help="run all tests of the kernel without each feature",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores SIGINT in background jobs, and the processes that tests interrupt would inherit this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "long(except_for=None): a variation of other tests that takes seconds: run with --long. The parametrized case "
        "with the id `except_for` always runs",
    )
    config.addinivalue_line("markers", "axe: run with --axe")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if PLUGINS in item.path.parents and {"suite", "pair"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("long")
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
        item.own_markers[:] = [
            mark for mark in item.own_markers if mark.name != "long" or mark.kwargs.get("except_for", "") != case
        ]
        if item.get_closest_marker("long") is not None and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason=_LONG))
        if item.get_closest_marker("axe") is not None and not config.getoption("--axe"):
            item.add_marker(pytest.mark.skip(reason=_AXE))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how many tests were skipped for each kind of reason, and what would run them."""
    counts = Counter(map(_kind_of_skip, terminalreporter.stats.get("skipped", ())))
    if counts:
        terminalreporter.section("skipped tests", sep="-")
    for kind, about in _SKIPS.items():
        if counts[kind]:
            terminalreporter.line(f"{counts[kind]:4} {about}")


def _kind_of_skip(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the key in `_SKIPS` of a skipped test or file."""
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason in (_LONG, _AXE):
        return "long" if reason == _LONG else "axe"
    if getattr(report, "accel_missing", None) or report.nodeid.startswith("tests/gpu/"):
        return "gpu"
    if _PACKAGE.match(reason):
        return "package"
    return "program" if _PROGRAM.search(reason) else "other"
