"""Tests of pytest-dependency: marked and unmarked tests that depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

pytestmark = needs("pytest_dependency")

_SUITE = """
    import os

    import pytest

    two = pytest.mark.distributed(2, kind="cpu")
    three = pytest.mark.distributed(3, kind="cpu")
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


def test_tests_are_skipped_if_tests_that_they_depend_on_fail(pair: Pair) -> None:
    pair.plugin("pytest_dependency")
    pair.write("test_depends.py", _SUITE)
    plain = pair.plain.run("-rs")
    for workers in ((), ("-n1", "--dist=loadfile")):  # One worker runs all tests of a file.
        marked = pair.run_marked(plain, "-rs", *workers)
        assert marked.count() == {"PASSED": 8, "FAILED": 1, "SKIPPED": 3, "ERROR": 1}
        assert "test_on_a_failure depends on test_fails" in marked.text
        # Ranks run no test that the driver skips.
        ran = set(pair.marked.read("ran.log"))
        assert sorted(ran) == ["test_in_class", "test_on_another_world", "test_on_unmarked"]
        (pair.marked.path / "ran.log").unlink()


def test_calling_depends_in_a_rank_fails_unless_the_user_has_set_the_role_of_the_plugin(pair: Pair) -> None:
    """If ranks call the plugin's own hooks, nothing is forbidden."""
    pair.plugin("pytest_dependency")
    pair.write("conftest.py", "from pytest_dependency import depends as early")
    pair.write(
        "test_depends.py",
        """
        import pytest
        from conftest import early
        from pytest_dependency import depends

        pytestmark = pytest.mark.distributed(2, kind="cpu")


        @pytest.mark.dependency
        def test_before():
            pass


        @pytest.mark.parametrize("function", [early, depends], ids=["early", "late"])
        def test_calls(request, function):
            function(request, ["test_before"])
        """,
    )
    run = pair.marked.run()
    assert run.count() == {"PASSED": 1, "FAILED": 2}
    for name in ("early", "late"):
        failure = run.failure(f"test_calls[{name}]")
        assert "mark the test with @pytest.mark.dependency(depends=[...]) instead" in failure
    pair.marked.ini("accel_rank_plugins = +pytest_dependency")
    assert pair.marked.run().count() == {"PASSED": 3}
