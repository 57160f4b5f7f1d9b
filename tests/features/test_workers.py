"""Tests of marked and unmarked tests on xdist's workers."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


@pytest.mark.long
def test_other_distribution_modes_of_xdist_work(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes `loadfile` and `loadgroup` have tests of their own below; `load` is used everywhere."""
    suite.all_plugins()
    suite.write(
        "test_suite.py",
        """
        import os

        import pytest


        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.distributed(2, init=False)
        def test_ranks(number, rank, gather):
            assert gather(rank) == [0, 1]


        @pytest.mark.parametrize("number", range(6))
        def test_unmarked(number):
            assert len(os.environ["SIM_VISIBLE_DEVICES"].split(",")) == 4

        """,
    )
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    run = suite.run("-nauto", "--dist=worksteal")
    assert run.count() == {"PASSED": 10}, run.text


@pytest.mark.long
def test_xdist_groups_stay_together(suite: Suite) -> None:
    """Some versions of pytest and xdist add the group to the ids of tests, but only in workers."""
    suite.write(
        "test_groups.py",
        """
        import pytest


        @pytest.mark.xdist_group("one")
        @pytest.mark.distributed(2, kind="cpu", init=False)
        @pytest.mark.parametrize("name", ["a", "b@c"])
        def test_marked(name, rank):
            assert rank < 2


        @pytest.mark.xdist_group("one")
        def test_unmarked():
            pass
        """,
    )
    suite.write(
        "conftest.py",
        """
        import pytest


        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(config, items):
            try:
                from _pytest.nodeid import coerce_node_id
            except ImportError:
                return  # xdist itself adds the group in versions that have no such module.
            for item in items if hasattr(config, "workerinput") else ():
                if not item.nodeid.endswith("@one"):
                    item._id = coerce_node_id(f"{item.nodeid}@one")
        """,
    )
    run = suite.run("-n2", "--dist=loadgroup")
    assert run.count() == {"PASSED": 3}, run.text


@pytest.mark.long
def test_workers_get_different_first_devices_in_unmarked_tests(suite: Suite) -> None:
    suite.write(
        "test_masks.py",
        """
        import os
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.parametrize("number", range(4))
        def test_mask(number):
            me = Path(os.environ["PYTEST_XDIST_WORKER"])
            me.write_text(os.environ["SIM_VISIBLE_DEVICES"])
            while len(list(Path().glob("gw*"))) < 4:  # Until every worker has come here.
                time.sleep(0.01)
        """,
    )
    assert suite.run("-n4").count() == {"PASSED": 4}
    masks = [suite.read(f"gw{number}")[0].split(",") for number in range(4)]
    assert all(sorted(mask) == sorted(masks[0]) for mask in masks)
    assert len(masks[0]) == 4
    assert len({mask[0] for mask in masks}) == 4


def test_a_worker_keeps_its_ranks_while_its_tests_share_a_fixture_of_their_module_or_class(suite: Suite) -> None:
    """Only one world fits, and each change of the worker would set up the fixtures again."""
    names = []
    for name in ("one", "two"):
        names += [f"{kind}_{name}[{number}]" for kind in ("test_of_module", "test_of_class") for number in range(4)]
        suite.write(
            f"test_{name}.py",
            f"""
            import pytest


            @pytest.fixture(scope="module")
            def made():
                return []


            @pytest.fixture(scope="class")
            def made_for_class():
                return []


            @pytest.mark.devices(1)
            @pytest.mark.parametrize("number", range(4))
            def test_of_module_{name}(made, number):
                made.append(number)
                assert made == list(range(number + 1))


            @pytest.mark.devices(1)
            class TestClass:
                @pytest.mark.parametrize("number", range(4))
                def test_of_class_{name}(self, made_for_class, number):
                    made_for_class.append(number)
                    assert made_for_class == list(range(number + 1))
            """,
        )
    run = suite.run("-n2", "--dist=loadfile", "--accel=sim:1,shared")
    outcomes = {test.rpartition("::")[2]: outcome for test, outcome in run.outcomes().items()}
    assert outcomes == dict.fromkeys(names, "PASSED"), run.text
    assert run.text.count("accel: sim, 1 device: sim, order fastest") == 1, "the controller alone shows the devices"
