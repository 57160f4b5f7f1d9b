"""Calls of the kernel: the object that the fixture `faults` gives to a test, and random delays (``--accel-jitter``)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.faults.announcements import Faults
from pytest_accel.features.faults.injection import Injector
from pytest_accel.settings.options import JITTER, flag, jitter

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext
    from pytest_accel.session import AccelSession

_injector: Injector | None = None
"""The injector that the fixture of the last test with one has; None: there was none in this rank."""


def configure(session: AccelSession) -> None:
    seed = jitter(session.config)
    assert seed is not None
    session.config.pluginmanager.register(_JitterHooks(seed), "accel-jitter")


def around_call(context: RankContext) -> Injector | None:
    """Return the injector of the running test; None if it needs none."""
    if _injector is not None and _injector.test == context.tests:
        return _injector
    return None if jitter(context.config) is None else Injector(context)


def make_faults(context: RankContext) -> Faults:
    """Return an object that has no announcements and plans no faults yet."""
    global _injector
    _injector = Injector(context)
    return Faults(context, _injector)


class _JitterHooks:
    """Names the seed of random delays in the header, and in each failure of a test that has run with them."""

    def __init__(self, seed: int) -> None:
        self._text = f"random delays before collectives: {flag(JITTER)} {seed}"

    def pytest_report_header(self) -> str:
        return f"accel: {self._text}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and MARKED in item.stash:
            report.sections.append(("jitter", self._text))
        return report
