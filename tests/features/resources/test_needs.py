"""Tests of tests that need named resources: what they get, where they run, and what happens if there is too little."""

from __future__ import annotations

from tests.features.conftest import Suite

_RESOURCES = "accel_resources = license: 2, port-9000: 1\n    memory: 4GiB\n    cores: 3"


def test_a_test_has_what_it_needs_and_stays_in_its_process(suite: Suite) -> None:
    suite.ini(_RESOURCES)
    suite.ini("addopts = --strict-markers")
    suite.write(
        "test_it.py",
        """
        import os
        import sys
        import unittest
        from pathlib import Path

        import psutil
        import pytest
        from tests.deadline import eventually

        from pytest_accel.leases.locks import who_holds

        needs = pytest.mark.needs
        MAIN = os.getpid()


        def locked():
            folder = Path(os.environ["PYTEST_ACCEL_LOCK_DIR"])
            names = [path.stem.removeprefix("pytest-accel-") for path in folder.glob("*.lock")]
            return sorted(f"pytest-accel-{name}.lock" for name in names if who_holds(folder, name) is not None)


        @needs("license", memory="2GiB", cores=3)
        def test_one(accel_resources):
            assert accel_resources == {"cores": (0, 1, 2), "license": (0,), "memory": (0, 1)}
            names = ("cores-0", "cores-1", "cores-2", "license-0", "memory-0", "memory-1")
            assert locked() == [f"pytest-accel-{name}.lock" for name in names]
            assert os.getpid() == MAIN


        def test_none(accel_resources):
            assert accel_resources == {}
            # The controller frees what the test before had when it hears that it has ended.
            eventually("all locks to be released", lambda: not locked())


        @needs({"port-9000": 1})
        class TestClass:
            def test_port(self, accel_resources):
                assert accel_resources == {"port-9000": (0,)}

            @needs(license=2)
            def test_both(self, accel_resources):
                assert accel_resources == {"license": (0, 1), "port-9000": (0,)}


        @needs("license")
        class TestCase(unittest.TestCase):
            def test_method(self):
                assert locked() == ["pytest-accel-license-0.lock"]


        @needs("license")
        @pytest.mark.skip(reason="not now")
        def test_skipped():
            pass


        @pytest.fixture
        def marked_late(request):
            request.node.add_marker(needs("license"))


        @pytest.mark.xfail
        def test_late(marked_late):
            pass


        def test_no_process_and_no_torch():
            assert psutil.Process().children() == []
            assert "torch" not in sys.modules
        """,
    )
    run = suite.run("-n1")
    passed = ("test_one", "test_none", "test_port", "test_both", "test_method", "test_no_process_and_no_torch")
    run.expect({**dict.fromkeys(passed, "PASSED"), "test_skipped": "SKIPPED", "test_late": "FAILED"})
    assert "the marks needs of the test were changed after collection" in run.failure("test_late")
    assert "accel: resources of tests: license 2, port-9000 1, memory 4 GiB, cores 3" in run.text


def test_a_test_that_needs_more_than_there_is_is_skipped_and_counted(suite: Suite) -> None:
    suite.without_torch()
    suite.ini(_RESOURCES)
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.needs(license=3)
        def test_license():
            pass


        @pytest.mark.xfail
        @pytest.mark.needs(memory="5GiB", cores=4)
        def test_memory():
            pass


        @pytest.mark.needs(license=3)
        @pytest.mark.distributed(2, init=False)
        def test_ranks():
            pass


        @pytest.mark.needs(license=3)
        def test_list():
            pass
        """,
    )
    suite.write(
        "conftest.py",
        """
        import pytest


        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name == "test_list":
                    item.add_marker(pytest.mark.distributed([1, 2]))
        """,
    )
    license_missing = "needs 3 x license; there are 2: 2 x license"
    memory_missing = "needs 4 CPU cores; there are 3: 3 x cores; needs 5 memory parts; there are 4: 4 x memory (1 GiB)"
    run = suite.run("-rs")
    assert run.count() == {"SKIPPED": 5}
    assert "accel: 5 skipped for missing hardware" in run.text
    for line in (
        f"    4  {license_missing}",
        f"    1  {memory_missing}",
        f"SKIPPED [1] test_it.py:5: {license_missing}",
    ):
        assert line in run.text
    assert "5 deselected" in suite.run("--accel-select=fits").text


def test_ranks_lease_a_resource_by_its_kind_or_beside_their_devices(suite: Suite) -> None:
    suite.ini(_RESOURCES)
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.devices(1, kind="license")
        def test_kind(accel):
            assert (accel.kind, accel.ids, accel.mask) == ("license", ("license-0",), {})


        @pytest.mark.needs(license=2)
        @pytest.mark.devices(1)
        def test_beside(accel):
            assert accel.ids == ("sim-0",)


        @pytest.mark.needs("license")
        @pytest.mark.devices(1)
        def test_fixture(accel_resources):
            pass
        """,
    )
    suite.without_torch()
    run = suite.run()
    run.expect({**dict.fromkeys(("test_kind", "test_beside"), "PASSED"), "test_fixture": "ERROR"})
    text = "the fixture 'accel_resources' has a value only in tests without the marks devices and distributed"
    assert text in run.failure("test_fixture")


def test_a_project_without_the_setting_may_have_a_mark_and_a_fixture_of_these_names(suite: Suite) -> None:
    suite.ini("markers = needs(what): the project's own\naddopts = --strict-markers")
    suite.write(
        "test_it.py",
        """
        import sys

        import pytest


        @pytest.fixture
        def accel_resources():
            return "own"


        @pytest.mark.needs(["anything"], 3, license=-1)
        def test_own(accel_resources, pytestconfig):
            assert accel_resources == "own"
            assert [line for line in pytestconfig.getini("markers") if line.startswith("needs")] == [
                "needs(what): the project's own"
            ]
            assert [name for name in sys.modules if name.startswith("pytest_accel.features.resources")] == []
        """,
    )
    suite.run().expect({"test_own": "PASSED"})
