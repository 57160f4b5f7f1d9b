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
    from pytest_accel.session import AccelSession

_LONGEST_DELAY = 0.02
"""Seconds of the longest random delay: much longer than a collective, and tests with hundreds of them still end."""


def pytest_accel_configure(session: AccelSession) -> None:
    session.config.pluginmanager.register(_JitterHooks(session.config), "accel-jitter")


def pytest_accel_around_call(context: RankContext) -> AbstractContextManager[object]:
    """Return a context manager in which this rank is delayed for a random time before each collective and message."""
    if "torch" not in modules:
        return nullcontext()
    # The delays of a test do not depend on the tests before it: a rerun of it alone has the same delays.
    random = Random(f"{find(context.config, JITTER)}/{context.rank}")
    return watch(lambda function: sleep(random.uniform(0, _LONGEST_DELAY)))


@contextmanager
def pytest_accel_make_faults(context: RankContext) -> Iterator[Faults]:
    """Yield an object that has no announcements and plans no faults yet."""
    with ExitStack() as modes:
        yield Faults(context, modes)


class _JitterHooks:
    """Names the seed of delays and hash seeds in the header, and in each failure of a test that has run with them."""

    def __init__(self, config: pytest.Config) -> None:
        self._text = f"random delays before collectives, and hash seeds: {flag(JITTER)} {find(config, JITTER)}"

    def pytest_report_header(self) -> str:
        return f"accel: {self._text}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and MARKED in item.stash:
            report.sections.append(("jitter", self._text))
        return report
