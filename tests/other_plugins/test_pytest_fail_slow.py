"""Tests of pytest-fail-slow, which fails a test that took too long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_TESTS = """
    import os
    import time

    import pytest

    pytestmark = pytest.mark.distributed(2, device="cpu")


    @pytest.fixture
    def slow():
        time.sleep(0.3)


    def test_has_no_limit(slow):
        pass


    @pytest.mark.fail_slow("60 s")
    @pytest.mark.fail_slow_setup("60 s")
    def test_in_time(slow):
        time.sleep(0.3)


    @pytest.mark.fail_slow("0.2 s")
    def test_too_slow():
        if os.environ.get("RANK", "1") == "1":
            time.sleep(0.3)


    @pytest.mark.fail_slow_setup("0.2 s")
    def test_set_up_too_slowly(slow):
        pass


    @pytest.mark.fail_slow("0.2 s")
    @pytest.mark.xfail(reason="known to be wrong, not to be slow")
    def test_wrong():
        assert 0
    """
_CONFTEST = """
    import os

    import pytest


    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        if "RANK" not in os.environ:
            with open("durations", "a") as file:
                file.write(f"{call.duration == report.duration}\\n")
        elif item.name == "test_too_slow" and call.when == "call":
            with open("rank_durations", "a") as file:
                file.write(f"{call.duration}\\n")
        return report
    """


@needs("pytest_fail_slow")
def test_slow_marked_tests_fail(pair: Pair) -> None:
    pair.plugin("fail-slow")
    pair.write("test_slow.py", _TESTS)
    pair.write("conftest.py", _CONFTEST)
    plain, marked = pair.plain.run(), pair.marked.run()
    assert marked.outcomes() == plain.outcomes()
    assert marked.ret == plain.ret
    assert plain.count() == {"PASSED": 2, "FAILED": 1, "ERROR": 1, "XFAIL": 1}
    # The duration that plugins see in the driver does not include the start of the ranks.
    assert set(pair.marked.read("durations")) == {"True"}
    shown = re.findall(r"^Test passed but took too long to run: (.*)$", marked.failure("test_too_slow"), re.MULTILINE)
    rank_durations = pair.marked.read("rank_durations")
    assert len(rank_durations) == 2
    # Rank 1 alone is too slow, unless the machine is busy.
    assert shown
    assert set(shown) <= {f"Duration {duration}s > 0.2s" for duration in rank_durations}
