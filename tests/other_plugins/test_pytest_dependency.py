"""Tests of pytest-dependency: marked and unmarked tests that depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

pytestmark = needs("pytest_dependency")

_SUITE = """
    import os

    import pytest

    two = pytest.mark.distributed(2, device="cpu")
    three = pytest.mark.distributed(3, device="cpu")
    depends = pytest.mark.dependency
    LAST = os.environ.get("RANK", "1") == "1"


    def note(name):
        with open("ran.log", "a") as file:
            print(name, file=file)


    @depends()
    def test_unmarked():
        pass


    @two
    @depends(depends=["test_unmarked"])
    def test_on_unmarked():
        note("test_on_unmarked")


    @three
    @depends(depends=["test_on_unmarked"])
    def test_on_another_world():
        note("test_on_another_world")


    @two
    @depends()
    def test_fails():
        assert not LAST


    @two
    @depends(name="named")
    def test_passes():
        pass


    @two
    @depends(depends=["named", "test_fails"])
    def test_on_a_failure():
        note("test_on_a_failure")


    @depends(depends=["test_on_a_failure"])
    def test_unmarked_on_a_skip():
        note("test_unmarked_on_a_skip")


    @depends(depends=["test_on_another_world"])
    def test_unmarked_on_marked():
        pass


    @two
    @depends(depends=["test_nowhere"])
    def test_on_what_is_not_there():
        note("test_on_what_is_not_there")


    @pytest.fixture
    def broken():
        yield
        assert not LAST


    @two
    class TestClass:
        @depends()
        def test_one(self):
            pass

        @depends()
        def test_breaks_its_teardown(self, broken):
            pass

        @depends(depends=["TestClass::test_breaks_its_teardown"])
        def test_on_a_teardown(self):
            note("test_on_a_teardown")

        @depends(depends=["test_one"], scope="class")
        def test_in_class(self):
            note("test_in_class")
    """
_CALLS = """
    import pytest
    from conftest import early
    from pytest_dependency import depends


    @pytest.mark.dependency
    def test_before():
        pass


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.parametrize("function", [early, depends], ids=["early", "late"])
    def test_calls(request, function):
        function(request, ["test_before"])


    def test_calls_in_the_driver(request):
        depends(request, ["test_before"])
    """


def test_tests_are_skipped_if_tests_that_they_depend_on_fail(pair: Pair) -> None:
    """A call of `depends` in a rank fails, because the rank does not know the outcomes of other tests."""
    pair.plugin("pytest_dependency")
    pair.write("conftest.py", "from pytest_dependency import depends as early")
    pair.write("test_depends.py", _SUITE)
    pair.write("test_calls.py", _CALLS)
    plain, marked = pair.plain.run(), pair.marked.run("-rs")
    assert plain.count() == {"PASSED": 12, "FAILED": 1, "SKIPPED": 4, "ERROR": 1}
    calls = {f"test_calls[{name}]": "FAILED" for name in ("early", "late")}
    assert marked.outcomes() == {**plain.outcomes(), **calls}
    assert marked.ret == plain.ret
    for name in calls:
        failure = marked.failure(name)
        assert "mark the test with @pytest.mark.dependency(depends=['test_before']) instead" in failure
    assert "test_on_a_failure depends on test_fails" in marked.text
    # Ranks run no test that the driver skips, not even when they run ahead.
    assert sorted(set(pair.marked.read("ran.log"))) == ["test_in_class", "test_on_another_world", "test_on_unmarked"]


def test_role_that_the_user_sets_replaces_the_bridge(pair: Pair) -> None:
    """Ranks call the plugin's own hooks (`+`) or none of them (`-`). The bridge is inactive in both cases."""
    suite = pair.marked
    suite.plugin("pytest_dependency")
    suite.write(
        "test_depends.py",
        """
        import pytest
        from pytest_dependency import depends

        pytestmark = pytest.mark.distributed(2, device="cpu")


        @pytest.mark.dependency
        def test_before():
            pass


        @pytest.mark.dependency
        def test_fails():
            assert 0


        @pytest.mark.dependency(depends=["test_before"])
        def test_on_a_mark():
            pass


        @pytest.mark.dependency(depends=["test_fails"])
        def test_on_a_failure():
            pass


        def test_calls(request):
            depends(request, ["test_before"])
        """,
    )
    expected = {
        "test_before": "PASSED",
        "test_fails": "FAILED",
        "test_on_a_mark": "PASSED",
        "test_on_a_failure": "SKIPPED",
        "test_calls": "PASSED",
    }
    assert suite.run("-o", "accel_rank_plugins=+pytest_dependency").outcomes() == expected
    del expected["test_calls"]
    without = suite.run("-rs", "-o", "accel_rank_plugins=-pytest_dependency", "-k", "not test_calls")
    assert without.outcomes() == expected
    assert "test_on_a_failure depends on test_fails" in without.text
