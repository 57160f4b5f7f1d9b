"""Tests of marked tests whose hardware is missing, and of ``--accel-strict``, ``--accel-require``, ``--accel-info``."""

from __future__ import annotations

import re

import pytest

from pytest_accel.hardware.inventory import Machine
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_RECORD_IMPORT = "import os\nfrom pathlib import Path\nPath(f'imported{os.getpid()}').touch()\n"
"""Code of a module that creates a file in each process that imports it."""

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


@pytest.fixture
def device_suite(suite: Suite) -> Suite:
    """Provide a suite of tests that need devices, with a preloaded module that records the processes that import it."""
    suite.write("told.py", _RECORD_IMPORT)
    suite.ini("accel_preload = told")
    suite.write("test_devices.py", _DEVICES)
    return suite


@pytest.mark.long(except_for="plain")
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["plain", "xdist"])
def test_skips_are_counted_by_what_is_missing_and_start_no_process(
    device_suite: Suite, workers: tuple[str, ...]
) -> None:
    run = device_suite.run("--accel=none", "-rs", *workers)
    assert run.ret == 0
    assert run.count() == {"SKIPPED": 4, "PASSED": 1}
    assert "accel: --accel none: accelerators are left alone" in run.text
    assert "accel: 3 skipped for missing hardware" in run.text
    assert re.search(r"^ +2  needs 2 devices; ", run.text, re.MULTILINE)
    assert re.search(r"^ +1  needs 1 device; ", run.text, re.MULTILINE)
    assert re.search(r"SKIPPED \[1\] test_devices.py:5: needs 2 devices; ", run.text)
    assert re.search(r"SKIPPED \[1\] test_devices.py:10: needs 2 devices; ", run.text)
    assert list(device_suite.path.glob("imported*")) == []  # Not even by the fork server.


@pytest.mark.long
def test_accel_require_fails_a_session_with_too_few_devices(device_suite: Suite) -> None:
    run = device_suite.run("--accel=sim:4", "--accel-require=sim:5")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "--accel-require sim:5: 4 sim device(s) here" in run.text + run.errors
    assert not run.results
    assert "Traceback" not in run.text + run.errors
    assert device_suite.run("--accel=sim:4", "--accel-require=sim:4,cpu:1", "-k", "unmarked").ret == 0


_NAMED_KIND = """
    import pytest


    @pytest.mark.distributed(2)
    def test_ranks():
        raise AssertionError("ran")


    @pytest.mark.distributed("all")
    def test_all():
        raise AssertionError("ran")


    @pytest.mark.distributed(2, devices_per_rank=2)
    def test_per_rank():
        raise AssertionError("ran")


    @pytest.mark.xfail(reason="a bug, which nobody meets here")
    @pytest.mark.devices(1)
    def test_expected_to_fail():
        raise AssertionError("ran")


    @pytest.mark.skip(reason="not for want of hardware")
    @pytest.mark.devices(1)
    def test_other_reason():
        raise AssertionError("ran")


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_on_cpu(accel):
        assert accel.kind == "cpu"


    def test_unmarked():
        pass
    """


def test_ranks_do_not_run_on_the_cpu_in_place_of_a_kind_that_was_asked_for_by_name(suite: Suite) -> None:
    suite.write("test_it.py", _NAMED_KIND)
    run = suite.run("--accel=mlu", "--accel-strict")
    missing = dict.fromkeys(("test_ranks", "test_all", "test_per_rank", "test_expected_to_fail"), "ERROR")
    there = dict.fromkeys(("test_on_cpu", "test_unmarked"), "PASSED")
    run.expect({**missing, **there, "test_other_reason": "SKIPPED"})
    assert "accel: mlu, no devices" in run.text
    assert " (asked for by name: ranks do not run on the CPU)\n" in run.text
    assert "accel: 4 failed for missing hardware" in run.text
    assert "1  needs 2 mlu devices; there is none" in run.text
    assert re.search(r"^ERROR test_it\.py::test_ranks - needs 2 mlu devices; .*", run.text, re.MULTILINE)
    assert "(--accel-strict)" in run.failure("test_ranks")
    assert "traceback entries are hidden" not in run.text


def test_auto_falls_back_to_the_cpu_and_says_so(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        "import pytest\n\n@pytest.mark.distributed(2, init=False)\ndef test_it(accel): assert accel.kind == 'cpu'",
    )
    kind = "none" if Machine("auto").session.present else "auto"
    run = suite.run(f"--accel={kind}")
    run.expect({"test_it": "PASSED"})
    assert re.search(r"^accel: .* \(ranks run on the CPU\)$", run.text, re.MULTILINE)
