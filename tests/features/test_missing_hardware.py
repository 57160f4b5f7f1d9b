"""Tests of marked tests whose hardware is missing, and of ``--accel-strict``, ``--accel-require``, ``--accel-info``."""

from __future__ import annotations

import re

import pytest

from pytest_accel.hardware.inventory import Machine, parse_kind
from tests.features.conftest import Suite

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


def _module_imported(suite: Suite) -> bool:
    """Return True if a process has imported the preloaded module, as every fork server does."""
    return bool(list(suite.path.glob("imported*")))


@pytest.fixture
def device_suite(suite: Suite) -> Suite:
    """Provide a suite of tests that need devices, with a preloaded module that records the processes that import it."""
    suite.without_torch()
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
    assert not _module_imported(device_suite)


@pytest.mark.long
def test_accel_strict_fails_tests_whose_hardware_is_missing(device_suite: Suite) -> None:
    device_suite.write(
        "test_expected.py",
        """
        import pytest

        @pytest.mark.xfail(reason="a bug, which nobody meets here")
        @pytest.mark.devices(2)
        def test_expected_to_fail():
            raise AssertionError("ran")
        """,
    )
    run = device_suite.run("--accel=none", "--accel-strict")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert run.result("test_two") == run.result("test_one") == run.result("test_expected_to_fail") == "ERROR"
    assert run.result("test_other_reason") == "SKIPPED"
    assert "needs 2 devices" in run.failure("test_two")
    assert "(--accel-strict)" in run.failure("test_two")
    assert "traceback entries are hidden" not in run.text
    assert re.search(r"^ERROR test_\w+\.py::test_two - needs 2 devices", run.text, re.MULTILINE)
    assert "accel: 4 failed for missing hardware" in run.text
    assert not _module_imported(device_suite)


@pytest.mark.long
def test_accel_require_fails_a_session_with_too_few_devices(device_suite: Suite) -> None:
    run = device_suite.run("--accel=sim:4", "--accel-require=sim:5")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "--accel-require sim:5: 4 sim device(s) here" in run.text + run.errors
    assert not run.results
    assert "Traceback" not in run.text + run.errors
    assert device_suite.run("--accel=sim:4", "--accel-require=sim:4,cpu:1", "-k", "unmarked").ret == 0


def test_only_tests_whose_hardware_is_missing_are_skipped(suite: Suite) -> None:
    suite.without_torch()
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


        @pytest.mark.distributed([2, 4, 8], init=False)
        def test_sizes(rank):
            assert rank < 4


        @pytest.mark.distributed(5, kind="cpu", init=False)
        def test_on_cpu(accel):
            assert accel.kind == "cpu"
        """,
    )
    run = suite.run()
    missing = ("test_more_than_there_are", "test_more_ranks_than_devices", "test_sizes[world_size=8]")
    there = ("test_sizes[world_size=2]", "test_sizes[world_size=4]", "test_on_cpu")
    run.expect(dict.fromkeys(missing, "SKIPPED") | dict.fromkeys(there, "PASSED"))
    for text in ("needs 5 sim devices; there are 4: 4 x sim", "needs 8 sim devices"):
        assert text in run.text, text


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


    @pytest.mark.devices(1)
    def test_device():
        raise AssertionError("ran")


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_on_cpu(accel):
        assert accel.kind == "cpu"


    def test_unmarked():
        pass
    """


def test_ranks_do_not_run_on_the_cpu_in_place_of_a_kind_that_was_asked_for_by_name(suite: Suite) -> None:
    suite.without_torch()
    suite.write("test_it.py", _NAMED_KIND)
    run = suite.run("--accel=mlu", "--accel-strict")
    missing = dict.fromkeys(("test_ranks", "test_all", "test_per_rank", "test_device"), "ERROR")
    run.expect({**missing, **dict.fromkeys(("test_on_cpu", "test_unmarked"), "PASSED")})
    assert "accel: mlu, no devices" in run.text
    assert " (asked for by name: ranks do not run on the CPU)\n" in run.text
    assert "accel: 4 failed for missing hardware" in run.text
    assert "1  needs 2 mlu devices; there is none" in run.text


def test_auto_falls_back_to_the_cpu_and_says_so(suite: Suite) -> None:
    suite.without_torch()
    suite.write("pytest.ini", "[pytest]\naccel = mlu\n")
    suite.write(
        "test_it.py",
        "import pytest\n\n@pytest.mark.distributed(2, init=False)\ndef test_it(accel): assert accel.kind == 'cpu'",
    )
    kind = "none" if Machine(parse_kind("auto")).session.present else "auto"
    run = suite.run(f"--accel={kind}")
    run.expect({"test_it": "PASSED"})
    assert re.search(r"^accel: .* \(ranks run on the CPU\)$", run.text, re.MULTILINE)
