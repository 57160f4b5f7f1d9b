"""Tests of files that a session writes: neither ranks nor the fork server open or truncate them."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


def test_ranks_do_not_write_files_of_the_driver(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.write(
        "test_it.py",
        """
        import logging

        import pytest


        def test_in_the_driver():
            logging.getLogger().info("written by the driver")


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_in_ranks():
            logging.getLogger().info("written by a rank")
        """,
    )
    suite.ini("log_level = INFO\nlog_file = log.txt")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--debug=trace.txt --junitxml=junit.xml")
    run = suite.run()
    assert run.count() == {"PASSED": 2}, run.text
    trace = (suite.path / "trace.txt").read_text()
    assert trace.startswith("versions pytest-")
    assert trace.count("versions pytest-") == 1
    assert "\0" not in trace
    arguments = trace.splitlines()[3]
    assert arguments.startswith("args=")
    assert arguments.count("basetemp") == 1  # The arguments of a rank contain another one.
    log = (suite.path / "log.txt").read_text()
    assert "\0" not in log
    written = "INFO     root:test_it.py"
    assert sorted(log.splitlines()) == [
        f"{written}:8 written by the driver",
        f"[rank 0] {written}:13 written by a rank",
        f"[rank 1] {written}:13 written by a rank",
    ]
    assert 'tests="2"' in (suite.path / "junit.xml").read_text()
