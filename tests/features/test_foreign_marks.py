"""Tests of suites with marks or fixtures of the plugin's names, and of sessions without some of pytest's plugins."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_HEADER = "accel: this project registers marks of its own"
# What a project does with marks of its own. Tests that pytest-accel runs would see variables of ranks.
_OWN_MARKS_PLUGIN = """
    import os

    import pytest


    def pytest_configure(config):
        config.addinivalue_line("markers", "devices(count): needs some of the project's machines")


    def pytest_collection_modifyitems(items):
        for item in items:
            for mark in item.iter_markers("devices"):
                assert mark.args == (4,), mark


    @pytest.fixture(autouse=True)
    def no_rank():
        assert "RANK" not in os.environ
    """
_OWN_MARKS_TESTS = """
    import pytest


    @pytest.mark.distributed(num_gpus=2)
    def test_arguments():
        pass


    @pytest.mark.distributed
    def test_bare():
        pass


    @pytest.mark.devices(4)
    class TestDevices:
        def test_in_class(self):
            pass


    def test_plain():
        pass
    """


def test_marks_that_the_project_registers_are_left_alone(suite: Suite) -> None:
    """One is registered in the ini file, the other by a plugin that the conftest names."""
    suite.ini("markers = distributed: run this only with several GPUs")
    suite.write("theirs.py", _OWN_MARKS_PLUGIN)
    suite.write("conftest.py", 'pytest_plugins = ["theirs"]\n')
    suite.write("test_it.py", _OWN_MARKS_TESTS)
    run = suite.run("--strict-markers", "-n1")
    assert run.count() == {"PASSED": 4}
    (line,) = [line for line in run.text.splitlines() if line.startswith(_HEADER)]
    assert "of its own, `devices` and `distributed`: " in line
    assert "`accel_marks = own` hands them over" in line

    confirmed = suite.run("-o", "accel_marks=project", "-m", "devices or distributed")
    assert confirmed.count() == {"PASSED": 3}
    assert _HEADER not in confirmed.text


def test_options_and_rules_do_not_see_marks_of_the_project(suite: Suite) -> None:
    suite.ini(
        """
        markers = distributed: run this only with several GPUs
        accel_rules =
            test_rule.py::test_adopted: distributed(2, kind="cpu", init=False)
            test_rule.py::test_sizes: distributed([1, 2], kind="cpu", init=False)
        """
    )
    suite.write("conftest.py", _OWN_MARKS_PLUGIN)
    suite.write("test_it.py", _OWN_MARKS_TESTS)
    suite.write("test_rule.py", _ADOPTED)
    run = suite.run("--accel-select=not marked")
    assert run.count() == {"PASSED": 4}
    run = suite.run(
        "--accel-select=marked", "-o", "accel_schedule=always", "-m", "distributed and not distributed(num_gpus=2)"
    )
    assert run.count() == {"PASSED": 3}
    assert sorted(suite.read("ranks")) == ["0 num_gpus 4", "0 of 1", "0 of 2", "1 num_gpus 4", "1 of 2"]


_ADOPTED = """
    import os

    import pytest
    from tests.inner import note


    @pytest.fixture
    def no_rank():
        pass


    @pytest.mark.distributed
    @pytest.mark.devices(4)
    def test_sizes(rank, world_size):
        note("ranks", rank, "of", world_size)


    @pytest.mark.distributed(num_gpus=4)
    def test_adopted(request):
        marks = [mark.kwargs for mark in request.node.iter_markers("distributed")]
        (own,) = [kwargs for kwargs in marks if "num_gpus" in kwargs]
        note("ranks", os.environ["RANK"], "num_gpus", own["num_gpus"])
    """


def test_arguments_that_the_plugin_does_not_know_fail_only_their_tests(suite: Suite) -> None:
    """The project does not register its marks, which is allowed without ``--strict-markers``."""
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(num_gpus=2)
        def test_keyword():
            pass


        @pytest.mark.devices(["desktop", "mobile"])
        def test_list():
            pass


        def test_plain():
            pass
        """,
    )
    run = suite.run("--accel-shard=1/1", "-n1")
    expected = {"test_keyword": "ERROR", "test_list": "ERROR", "test_plain": "PASSED"}
    assert run.outcomes() == expected
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    for text in (
        "@pytest.mark.distributed(num_gpus=2): there is no argument num_gpus, allowed are world_size, ",
        "@pytest.mark.devices(n=['desktop', 'mobile']): n must be an int >= 1 or \"all\", got ['desktop', ",
    ):
        assert text in run.text
    assert "if the mark is the project's own, register it in markers" in run.text

    own = suite.run("-Wignore::pytest.PytestUnknownMarkWarning", "-o", "accel_marks=project").outcomes()
    assert (own["test_keyword"], own["test_list"]) == ("PASSED", "PASSED")


def test_failures_without_ranks_name_the_setting_that_hands_the_marks_over(suite: Suite) -> None:
    """A suite that is written for the plugin may list its mark: no test that needs ranks passes without them."""
    suite.ini("markers = distributed: in ranks")
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.fixture
        def name(rank):
            return f"rank {rank}"


        @pytest.mark.distributed(2, init=False)
        def test_fixture(name):
            pass


        @pytest.mark.distributed([1, 2], init=False)
        def test_by_name(request):
            request.getfixturevalue("rank")


        @pytest.mark.distributed(2, init=False)
        def test_no_group():
            raise ValueError("Default process group has not been initialized, please make sure to call init")


        @pytest.mark.distributed(2, init=False)
        def test_port():
            raise RuntimeError("The server socket has failed to listen ... message: address already in use")
        """,
    )
    run = suite.run("-n1")
    assert run.count() == {"FAILED": 3, "ERROR": 1}
    assert "uses a port that is held for the test" in run.failure("test_port")
    text = "the mark `distributed` of this test is the project's own, so pytest-accel ran it without ranks and devices"
    assert run.text.count(f"{text}: `accel_marks = own` hands it over") == 3
    assert "`accel_marks = own` hands it over (test_it.py:10)" in run.failure("test_fixture")
    assert "this test has no @pytest.mark.distributed" not in run.text

    run = suite.run("--strict-markers", "-o", "accel_marks=own")
    assert run.count() == {"PASSED": 3, "FAILED": 2}
    assert run.result("test_fixture") == "PASSED"
    assert _HEADER not in run.text


def test_fixtures_of_the_suite_and_of_other_plugins_win(suite: Suite) -> None:
    suite.write("other.py", "import pytest\n\n\n@pytest.fixture\ndef device():\n    return 'of another plugin'\n")
    suite.write("conftest.py", "import pytest\n\n\n@pytest.fixture\ndef rank():\n    return 'of the suite'\n")
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(1, kind="cpu", init=False)
        def test_marked(rank, device, world_size):
            assert (rank, device, world_size) == ("of the suite", "of another plugin", 1)


        def test_unmarked(rank, device):
            assert (rank, device) == ("of the suite", "of another plugin")


        @pytest.mark.distributed(1, kind="cpu", init=False)
        def test_needs_those_of_the_plugin(rank, device):
            assert rank == 0
            assert device.type == "cpu"


        @pytest.mark.parametrize("rank", [3])
        @pytest.mark.distributed(1, kind="cpu", init=False)
        def test_has_a_parameter(rank):
            assert rank == 4
        """,
    )
    # The other plugin is loaded before this one, and pytest prefers those that are loaded later.
    suite.ini("addopts = -p other")
    run = suite.run()
    assert run.count() == {"PASSED": 2, "FAILED": 2}
    assert _HEADER not in run.text
