"""Calls of the kernel: the object that the fixture `faults` gives to a test, and random delays (``--accel-jitter``)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from random import Random
from sys import modules
from time import sleep
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.faults.announcements import Faults, watch
from pytest_accel.settings.options import JITTER, find, flag

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_LONGEST_DELAY = 0.02
"""Seconds of the longest random delay: much longer than a collective, and tests with hundreds of them still end."""


def pytest_accel_around_call(context: RankContext) -> AbstractContextManager[object]:
    """Return a context manager in which this rank is delayed for a random time before each collective and message."""
    if find(context.config, JITTER) is None or "torch" not in modules:
        return nullcontext()  # Without the option, a test with the fixture has registered this module.
    # The delays of a test do not depend on the tests before it: a rerun of it alone has the same delays.
    random = Random(f"{find(context.config, JITTER)}/{context.rank}")
    return watch(lambda function: sleep(random.uniform(0, _LONGEST_DELAY)))


@contextmanager
def pytest_accel_make_faults(context: RankContext) -> Iterator[Faults]:
    """Yield an object that has no announcements and plans no faults yet."""
    with ExitStack() as modes:
        yield Faults(context, modes)


# Only with the option, a driver registers this module: name the seed of delays and hash seeds in the header, and in
# each failure of a test that has run with them. Ranks show no header, and have no item with `MARKED`.


def pytest_report_header(config: pytest.Config) -> str:
    return f"accel: {_about_jitter(config)}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and MARKED in item.stash:
        report.sections.append(("jitter", _about_jitter(item.config)))
    return report


def _about_jitter(config: pytest.Config) -> str:
    return f"random delays before collectives, and hash seeds: {flag(JITTER)} {find(config, JITTER)}"
