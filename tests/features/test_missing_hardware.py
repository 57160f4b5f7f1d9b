"""Tests that ask for more than there is, and options that say how bad that is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_TOLD = "import os\nfrom pathlib import Path\nPath(f'imported{os.getpid()}').touch()\n"
"""A module that tells which processes import it."""

_DEVICES = """
    import pytest


    @pytest.mark.devices(2)
    def test_two():
        raise AssertionError("ran")


    @pytest.mark.devices(2)
    def test_two_more():
        raise AssertionError("ran")


    @pytest.mark.devices
    def test_one():
        raise AssertionError("ran")


    @pytest.mark.devices(2)
    @pytest.mark.skip(reason="not for want of hardware")
    def test_other_reason():
        raise AssertionError("ran")


    def test_unmarked():
        pass
    """


def _started(suite: Suite) -> bool:
    return bool(list(suite.path.glob("imported*")))


@pytest.fixture
def told(suite: Suite) -> Suite:
    suite.write("told.py", _TOLD)
    suite.ini("accel_preload = told")
    suite.write("test_devices.py", _DEVICES)
    return suite


def test_skips_are_counted_by_what_is_missing_and_start_no_process(told: Suite) -> None:
    run = told.run("--accel=none", "-rs")
    assert run.ret == 0
    assert run.count() == {"SKIPPED": 4, "PASSED": 1}
    assert "accel: --accel none: accelerators are left alone" in run.text
    assert "accel: 3 skipped for missing hardware" in run.text
    assert re.search(r"^ +2  needs 2 devices; ", run.text, re.MULTILINE)
    assert re.search(r"^ +1  needs 1 device; ", run.text, re.MULTILINE)
    assert re.search(r"SKIPPED \[1\] test_devices.py:5: needs 2 devices; ", run.text)
    assert re.search(r"SKIPPED \[1\] test_devices.py:10: needs 2 devices; ", run.text)
    assert not _started(told)


@pytest.mark.long
def test_skips_are_counted_under_xdist(told: Suite) -> None:
    run = told.run("--accel=none", "-n2")
    assert run.count() == {"SKIPPED": 4, "PASSED": 1}
    assert "accel: 3 skipped for missing hardware" in run.text
    assert not _started(told)


@pytest.mark.long
def test_strict(told: Suite) -> None:
    told.write(
        "test_expected.py",
        """
        import pytest

        @pytest.mark.xfail(reason="a bug, which nobody meets here")
        @pytest.mark.devices(2)
        def test_expected_to_fail():
            raise AssertionError("ran")
        """,
    )
    run = told.run("--accel=none", "--accel-strict")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert run.word("test_two") == run.word("test_one") == run.word("test_expected_to_fail") == "ERROR"
    assert run.word("test_other_reason") == "SKIPPED"
    assert "needs 2 devices" in run.failure("test_two")
    assert "(--accel-strict)" in run.failure("test_two")
    assert "traceback entries are hidden" not in run.text
    assert re.search(r"^ERROR test_\w+\.py::test_two - needs 2 devices", run.text, re.MULTILINE)
    assert "accel: 4 failed for missing hardware" in run.text
    assert not _started(told)


@pytest.mark.long
def test_require(told: Suite) -> None:
    run = told.run("--accel=sim:4", "--accel-require=sim:5")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "--accel-require sim:5: 4 sim device(s) here" in run.text + run.errors
    assert not run.words
    assert "Traceback" not in run.text + run.errors
    assert told.run("--accel=sim:4", "--accel-require=sim:4,cpu:1", "-k", "unmarked").ret == 0
    assert told.run("--accel=sim:4", "--accel-require=sim:5", "-n2").ret == pytest.ExitCode.TESTS_FAILED


def test_info(told: Suite) -> None:
    run = told.run("--accel=sim:3", "--accel-info")
    assert run.ret == 0
    assert "accel: sim, 3 devices: 3 x sim, order fastest" in run.text
    assert re.search(r"^# +device +id +kind +name +memory", run.text, re.MULTILINE)
    assert "SIM_VISIBLE_DEVICES=" in run.text
    assert not run.words
    assert told.run("--accel=none", "--accel-info").ret == 0
    assert not _started(told)


@pytest.mark.long
def test_options_that_do_not_fit_are_usage_errors(told: Suite) -> None:
    for arguments, text in (
        (["--accel=abacus"], "abacus"),
        (["--accel-require=sim"], "--accel-require"),
        (["--accel-order=sideways"], "sideways"),
        (["--accel-devices=9"], "9"),
        (["--accel-wait=soon"], "--accel-wait"),
    ):
        run = told.run(*arguments)
        said = run.text + run.errors
        assert run.ret == pytest.ExitCode.USAGE_ERROR, arguments
        assert text in said
        assert "Traceback" not in said


def test_only_tests_whose_hardware_is_missing_are_skipped(suite: Suite) -> None:
    suite.write(
        "test_mixed.py",
        """
        import pytest


        @pytest.mark.devices(5)
        def test_more_than_there_are():
            raise AssertionError("ran")


        @pytest.mark.distributed(5)
        def test_more_ranks_than_devices():
            raise AssertionError("ran")


        @pytest.mark.distributed(3, devices_per_rank=2)
        def test_more_per_rank():
            raise AssertionError("ran")


        @pytest.mark.devices(1, memory="1TiB")
        def test_memory():
            raise AssertionError("ran")


        @pytest.mark.distributed([2, 4, 8])
        def test_sizes(devices, world_size):
            assert len(devices) == world_size


        @pytest.mark.distributed(5, device="cpu")
        def test_on_cpu(device):
            assert device.type == "cpu"


        @pytest.mark.devices(2, kind="cpu")
        def test_slots(devices):
            assert [device.type for device in devices] == ["cpu", "cpu"]
        """,
    )
    run = suite.run()
    skipped = {name.partition("::")[2] for name, words in run.words.items() if words == ["SKIPPED"]}
    assert skipped >= {
        "test_more_than_there_are",
        "test_more_ranks_than_devices",
        "test_more_per_rank",
        "test_memory",
        "test_sizes[world_size=8]",
    }
    assert run.word("test_sizes[world_size=2]") == run.word("test_sizes[world_size=4]") == "PASSED"
    assert run.word("test_on_cpu") == "PASSED"
    assert "FAILED" not in run.count()
    assert "ERROR" not in run.count()
    for text in ("needs 5 sim devices; there are 4: 4 x sim", "needs 6 sim devices", "needs 8 sim devices"):
        assert text in run.text, text
