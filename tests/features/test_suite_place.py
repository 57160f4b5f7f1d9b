"""All processes of a session have the rootdir, ini file and conftests of the controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

TESTS = """
    import os
    from pathlib import Path

    import pytest

    def check(config):
        assert config.rootpath == Path(__file__).parent
        assert config.inipath == config.rootpath / "pytest.ini"
        assert os.environ["PYTEST_ADDOPTS"] == "-p no:doctest"
        assert config.getoption("--mine") == "default"

    @pytest.mark.distributed(2, init=False)
    def test_ranks(pytestconfig, rank):
        check(pytestconfig)

    def test_plain(pytestconfig):
        check(pytestconfig)
"""
CONFTEST = """
    import os

    def pytest_addoption(parser):
        parser.addoption("--mine", default="default")

    def pytest_configure(config):
        os.makedirs(os.environ["OUTSIDE"], exist_ok=True)
"""


def test_a_path_that_a_session_makes_does_not_change_its_rootdir(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of an option follows after a space, so pytest may take it for an argument once it is there."""
    monkeypatch.setenv("OUTSIDE", str(tmp_path / "outside" / "logs"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:doctest")
    suite.write("test_it.py", TESTS)
    suite.write("conftest.py", CONFTEST)
    run = suite.run("-n1", "--accel-output", str(tmp_path / "outside" / "logs"))
    run.expect({"test_ranks": "PASSED", "test_plain": "PASSED"})
    assert set(run.results) == {"test_it.py::test_ranks", "test_it.py::test_plain"}
    assert os.listdir(tmp_path / "outside" / "logs")


def test_an_option_whose_value_is_a_folder_may_be_one_of_the_conftest_in_this_folder(suite: Suite) -> None:
    """pytest knows no such option when it looks for conftests, so it takes the value for a path."""
    suite.ini("testpaths = tests")
    suite.write("models/conftest.py", "def pytest_addoption(parser): parser.addoption('--models')")
    suite.write(
        "tests/test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_ranks(pytestconfig): assert pytestconfig.getoption("--models") == "models"

        def test_plain(pytestconfig): assert pytestconfig.getoption("--models") == "models"
        """,
    )
    run = suite.run("-n1", "--models", "models")
    run.expect({"test_ranks": "PASSED", "test_plain": "PASSED"})
