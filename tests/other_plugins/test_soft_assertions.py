"""Tests of plugins that collect failures while a test continues, and report them later: failures in one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_CHECKS = """
    import os
    import threading

    import pytest
    from pytest_check import check

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, device="cpu")
    pytestmark = two


    def wrong(what="soft"):
        check.is_false(LAST, what)


    @pytest.fixture
    def wrong_in_setup():
        wrong("in setup")


    @pytest.fixture
    def wrong_in_teardown():
        yield
        wrong("in teardown")


    @pytest.fixture(scope="module")
    def wrong_in_the_modules_setup():
        wrong("in the module's setup")


    def test_right():
        check.equal(1, 1)


    def test_wrong():
        wrong()
        wrong("once more")


    def test_right_again():
        check.equal(1, 1)


    def test_setup(wrong_in_setup):
        pass


    def test_teardown(wrong_in_teardown):
        pass


    def test_wide_setup(wrong_in_the_modules_setup):
        pass


    def test_both(wrong_in_teardown):
        wrong()


    def test_and_an_assertion():
        wrong()
        assert not LAST, "hard"


    @pytest.mark.xfail
    def test_expected():
        wrong()


    @pytest.mark.xfail(strict=True)
    def test_expected_and_right():
        check.equal(1, 1)


    @pytest.mark.xfail(raises=AssertionError)
    def test_expected_type():
        wrong()


    @pytest.mark.xfail(raises=ValueError)
    def test_another_type():
        wrong()


    @pytest.mark.xfail
    def test_expected_in_setup(wrong_in_setup):
        pass


    def test_in_a_thread():
        thread = threading.Thread(target=wrong)
        thread.start()
        thread.join()


    def test_subtests(subtests):
        with subtests.test("one"):
            wrong()
        with subtests.test("two"):
            pass


    def test_skips_after_all():
        wrong()
        if LAST:
            pytest.skip("and skips")


    def test_skips_everywhere():
        check.equal(1, 1)
        pytest.skip("not today")


    def test_unmarked():
        check.equal(1, 1)


    test_unmarked.pytestmark = []
    """


_ASSUMPTIONS = """
    import os

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    pytestmark = pytest.mark.distributed(2, device="cpu")


    @pytest.fixture
    def wrong_in_setup():
        pytest.assume(not LAST, "in setup")


    @pytest.fixture
    def wrong_in_teardown():
        yield
        pytest.assume(not LAST, "in teardown")


    def test_right():
        pytest.assume(True)


    def test_wrong():
        pytest.assume(not LAST, "soft")
        pytest.assume(not LAST, "once more")


    def test_setup(wrong_in_setup):
        pass


    def test_and_an_error():
        pytest.assume(not LAST, "soft")
        if LAST:
            raise ValueError("hard")


    @pytest.mark.xfail(strict=True)
    def test_expected():
        pytest.assume(not LAST)


    @pytest.mark.xfail(strict=True)
    def test_expected_and_right():
        pytest.assume(True)


    def test_in_a_context():
        with pytest.assume:
            assert not LAST


    def test_teardown(wrong_in_teardown):
        pass


    def test_after_the_teardown():
        pass
    """


@needs("pytest_assume")
def test_failed_assumptions_in_one_rank_fail_the_test(pair: Pair) -> None:
    pair.plugin("pytest_assume.plugin")
    pair.write("test_assumptions.py", _ASSUMPTIONS)
    _, marked = pair.run_both("-W", "default")
    failure = marked.failure("test_wrong")
    for text in ("2 Failed Assumptions", "soft", "once more", "rank 0: passed", "rank 1 of 2"):
        assert text in failure


_SUBTESTS = """
    import os
    import unittest

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    pytestmark = pytest.mark.distributed(2, device="cpu")


    def test_all_pass(subtests):
        for number in range(3):
            with subtests.test("number", number=number):
                pass


    def test_one_fails(subtests):
        for number in range(3):
            with subtests.test(number=number):
                assert number != 1 or not LAST


    def test_fails_itself(subtests):
        with subtests.test("inner"):
            assert not LAST, "inner"
        assert not LAST, "outer"


    def test_some_skip(subtests):
        with subtests.test("skips"):
            pytest.skip("not this")
        with subtests.test("runs"):
            pass


    @pytest.mark.xfail
    def test_expected(subtests):
        with subtests.test("inner"):
            assert not LAST


    def test_expected_within(subtests):
        with subtests.test("inner"):
            pytest.xfail("not yet")


    class TestOfUnittest(unittest.TestCase):
        def test_case(self):
            for number in range(3):
                with self.subTest(number=number):
                    self.assertFalse(number == 2 and LAST)


    @pytest.fixture
    def fails_in_a_fixture(subtests):
        with subtests.test("in setup"):
            assert not LAST
        yield
        with subtests.test("in teardown"):
            assert not LAST


    def test_of_a_fixture(fails_in_a_fixture):
        pass


    def test_last():
        pass
    """


@needs("pytest_check")
def test_failed_checks_and_subtests_in_one_rank_fail_the_test(pair: Pair) -> None:
    pair.plugin("pytest_check.plugin")
    pair.write("test_checks.py", _CHECKS)
    pair.write("test_sub.py", _SUBTESTS)
    plain, marked = pair.plain.run("-rA"), pair.marked.run("-rA")
    assert marked.ret == plain.ret == 1
    # A marked test fails itself if subtests fail, also if it is a unittest case, and if it is expected to fail. If they
    # fail in its teardown, the teardown fails.
    expected = {name: " ".join(words) for name, words in plain.results.items()}
    expected["test_sub.py::test_of_a_fixture"] = "SUBFAILED FAILED SUBFAILED ERROR"
    expected["test_sub.py::TestOfUnittest::test_case"] = "SUBPASSED SUBPASSED SUBFAILED FAILED"
    assert expected["test_sub.py::test_expected"] == "XPASS"
    expected["test_sub.py::test_expected"] = "XFAIL"
    assert {name: " ".join(words) for name, words in marked.results.items()} == expected
    failure = marked.failure("test_wrong")
    for text in (": soft", "Failed Checks: 2", "rank 0: passed", "rank 1 of 2"):
        assert text in failure
    assert "FAILURE" in marked.failure("test_in_a_thread")


@needs("pytest_subtests")
def test_failed_subtests_of_pytest_subtests_fail_marked_tests(pair: Pair) -> None:
    pair.plugin("pytest_subtests.plugin")
    pair.write("test_sub.py", _SUBTESTS)
    plain, marked = pair.plain.run(), pair.marked.run()
    assert marked.ret == plain.ret == 1
    # The plugin does not show subtests of a unittest case that pass.
    shown = [
        sorted(re.findall(r"^test_sub.py::(test_.* SUB[A-Z]+)", run.text, re.MULTILINE)) for run in (plain, marked)
    ]
    assert shown[0]
    assert shown[0] == shown[1]
    # With the plugin, an unmarked test passes even if its subtests fail. A marked test fails, as with pytest's own.
    assert plain.result("test_one_fails") == "PASSED"
    assert marked.result("test_one_fails") == "FAILED"
