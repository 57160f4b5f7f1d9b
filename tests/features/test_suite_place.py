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
        assert config.rootpath == Path(__file__).parent.parent
        assert config.inipath == config.rootpath / "pytest.ini"
        assert os.environ["PYTEST_ADDOPTS"] == "-p no:doctest"
        assert (config.getoption("--mine"), config.getoption("--models")) == ("default", "models")

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


def test_options_whose_values_are_folders_do_not_change_the_rootdir_or_hide_a_conftest(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest may take the value of an option for a path.

    It does so if the session makes the folder, or if the conftest of the option is in the folder.
    """
    monkeypatch.setenv("OUTSIDE", str(tmp_path / "outside" / "logs"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:doctest")
    suite.ini("testpaths = tests")
    suite.write("tests/test_it.py", TESTS)
    suite.write("conftest.py", CONFTEST)
    suite.write("models/conftest.py", "def pytest_addoption(parser): parser.addoption('--models')")
    run = suite.run("-n1", "--accel-output", str(tmp_path / "outside" / "logs"), "--models", "models")
    run.expect({"test_ranks": "PASSED", "test_plain": "PASSED"})
    assert set(run.results) == {"tests/test_it.py::test_ranks", "tests/test_it.py::test_plain"}
    assert os.listdir(tmp_path / "outside" / "logs")
