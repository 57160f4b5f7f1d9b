from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytest.register_assert_rewrite("tests.background_suite")

PLUGINS = Path(__file__).parent / "tests" / "features" / "plugins"
"""Tests of other projects' plugins. Most plugins are installed only in an environment of their own."""


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
            item.add_marker(pytest.mark.skip(reason="takes long: --long runs it"))
