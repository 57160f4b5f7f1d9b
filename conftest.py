from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "tests/worlds/test_chaos.py")
    group.addoption("--chaos", type=int, default=10, metavar="N", help="how many processes are killed (default: 10)")
    group.addoption("--chaos-seed", type=int, default=None, metavar="SEED", help="which ones; shown where it fails")
