"""Tests that a conftest sees in a rank all that xdist promises for its workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.features.conftest import Suite
from tests.run import Run

pytestmark = pytest.mark.usefixtures("without_torch")

CONFTEST = """
    import json, os
    import pytest
    from pytest_accel import is_rank
    from tests import inner


    def note(**facts):
        inner.note("facts", json.dumps(facts))


    def pytest_configure(config):
        if not hasattr(config, "workerinput"):
            assert not is_rank(config)
            note(what="main")
        config.workers = getattr(config, "workerinput", {})


    def pytest_sessionfinish(session):
        if not hasattr(session.config, "workeroutput"):
            note(what="finished")


    @pytest.fixture(scope="session")
    def once(tmp_path_factory, worker_id):
        path = tmp_path_factory.getbasetemp().parent / "once"
        if worker_id != "master":
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                return
            note(what="once")


    @pytest.fixture
    def see(request, once, tmp_path_factory, worker_id, testrun_uid):
        import xdist

        config = request.config
        given = config.workerinput
        assert config.workers is given and given["workerid"] == worker_id and given["testrunuid"] == testrun_uid
        assert xdist.is_xdist_worker(request) and not xdist.is_xdist_controller(request)
        assert xdist.get_xdist_worker_id(request) == worker_id
        assert os.environ["PYTEST_XDIST_WORKER"] == worker_id
        assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == str(given["workercount"])
        assert os.environ["PYTEST_XDIST_TESTRUNUID"] == testrun_uid
        note(
            what="worker",
            rank=is_rank(config),
            number=int(worker_id[2:]),
            count=given["workercount"],
            run=testrun_uid,
            folder=str(tmp_path_factory.getbasetemp().parent),
            pid=os.getpid(),
        )
"""
TESTS = """
    import pytest

    @pytest.mark.distributed(1, kind="cpu", init=False)
    def test_one(see):
        pass

    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_two(see):
        pass

    @pytest.mark.distributed(2, fresh=True, init=False)
    def test_fresh(see):
        pass

    @pytest.mark.distributed(2, fresh=True, init=False)
    def test_fresh_again(see):
        pass

    @pytest.mark.devices(1)
    def test_device(see):
        pass

    @pytest.mark.distributed(2, fresh=True, init=False)
    @pytest.mark.devices(2)
    @pytest.mark.parametrize("number", range(2))
    def test_waits_for_devices(see, number):
        pass
"""


def facts(suite: Suite, what: str) -> list[dict[str, Any]]:
    """Return what the conftest has noted about `what`."""
    return [found for line in suite.read("facts") if (found := json.loads(line))["what"] == what]


def check(suite: Suite, run: Run) -> list[dict[str, Any]]:
    """Check what holds in each session of the suite; return what its workers and ranks have noted."""
    assert set(run.count()) == {"PASSED"}
    assert len(facts(suite, "main")) == len(facts(suite, "finished")) == len(facts(suite, "once")) == 1
    seen = facts(suite, "worker")
    assert len({one["run"] for one in seen}) == len({one["folder"] for one in seen}) == 1
    assert all(one["number"] < one["count"] for one in seen if one["rank"])
    return seen


def test_ranks_look_like_workers(suite: Suite) -> None:
    suite.write("conftest.py", CONFTEST)
    suite.write("test_it.py", TESTS)
    seen = check(suite, suite.run())
    assert len(seen) == 1 + 2 + 2 + 2 + 1 + 2 + 2
    assert all(one["rank"] for one in seen)
    # The worlds of the first two tests stay alive. The numbers of a world that has ended are used again.
    numbers = [one["number"] for one in seen]
    assert sorted(numbers[:3]) == [0, 1, 2]
    assert max(numbers) < 3 + 2 + 2 + 1


@pytest.mark.long
def test_ranks_have_other_numbers_than_xdists_workers_and_their_replacements(suite: Suite) -> None:
    suite.write("conftest.py", CONFTEST)
    suite.write("test_it.py", TESTS)
    suite.write(
        "test_plain.py",
        """
        import os, pathlib

        def test_crash(see):
            if not pathlib.Path("crashed").exists():
                pathlib.Path("crashed").touch()
                os._exit(1)

        def test_plain(see):
            pass
        """,
    )
    run = suite.run("-n2", "--dist=loadfile", "--max-worker-restart=3")
    assert run.results.pop("test_plain.py::test_crash") == ["FAILED", "PASSED"]
    seen = check(suite, run)
    workers = {one["number"] for one in seen if not one["rank"]}
    ranks = {one["number"] for one in seen if one["rank"]}
    # The replacement for the worker that has crashed has a number that no rank has had.
    assert len(workers) == 2
    assert workers < set(range(5))  # Two workers, and three that may replace crashed ones.
    assert ranks == set(range(5, 5 + len(ranks)))
    assert {one["count"] for one in seen if not one["rank"]} == {2}


def test_ranks_are_workers_without_xdist_and_without_its_hooks(suite: Suite) -> None:
    suite.ini("addopts = -p no:xdist")
    suite.write(
        "conftest.py",
        """
        import pytest

        @pytest.hookimpl(optionalhook=True)
        def pytest_configure_node(node):
            node.workerinput["mine"] = node.workerinput["workerid"]
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest
        import pytest_accel

        @pytest.mark.distributed(2, init=False)
        def test_it(pytestconfig, rank):
            assert pytestconfig.workerinput["workerid"] == f"gw{rank}"
            assert "mine" not in pytestconfig.workerinput

        def test_plain(pytestconfig):
            assert not hasattr(pytestconfig, "workerinput")
            assert not pytest_accel.is_rank(pytestconfig)
        """,
    )
    run = suite.run()
    assert set(run.count()) == {"PASSED"}
    assert len(run.outcomes()) == 2
