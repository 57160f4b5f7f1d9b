"""Tests of errors between the grant of devices and a running world: the devices and slots are given back."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite

_STEPS = (
    "driver.driver:World",
    "driver.link_to_rank:call_rank",
    "driver.world:World.start",
    "pool.pool:Pool._begin",
    "pool.starter:LocalStarter.place",
    "pool.starter:LocalStarter.start",
)
_CONFTEST = f"""
    import importlib, pytest

    running = []  # The test for which the driver does a step.
    in_pool = [""]  # The test for which the pool has begun to provide a world.

    def break_step(step):
        module, _, name = step.partition(":")
        owner = importlib.import_module("pytest_accel." + module)
        *path, name = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        whole, calls = getattr(owner, name), []

        def broken(*args, **given):
            if step in in_pool[0] or (running and step in running[-1]):
                calls.append(args)
                if len(calls) == (2 if name == "call_rank" else 1):  # For rank 1.
                    raise RuntimeError(f"broken: {{step}}")
            return whole(*args, **given)

        setattr(owner, name, broken)

    def note_test(owner, name, test_of):
        whole = getattr(owner, name)

        def noting(self, *args):
            running.append(test_of(args[0]))
            try:
                return whole(self, *args)
            finally:
                running.pop()

        setattr(owner, name, noting)

    def pytest_configure(config):
        from pytest_accel.pool.pool import Pool
        from pytest_accel.driver.driver import Driver
        note_test(Driver, "prepare", lambda marked: marked.item.nodeid)
        serve = Pool._serve

        def noting(self, request):
            in_pool[0] = request.demand.holder.test
            return serve(self, request)

        Pool._serve = noting
        for step in {_STEPS}:
            break_step(step)
"""


def test_an_error_on_the_way_to_a_world_gives_everything_back(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("pytest.ini", "[pytest]\naccel = sim:2\naccel_wait = 60\n")
    suite.write("conftest.py", _CONFTEST)
    suite.write(
        "test_it.py",
        f"""
        import pytest

        @pytest.mark.distributed(2, fresh=True, init=False)
        @pytest.mark.parametrize("step", {_STEPS})
        def test_broken(step): pass

        @pytest.mark.distributed(2, init=False)
        def test_next(): pass
        """,
    )
    run = suite.run("-n1")
    steps = {f"test_broken[{step}]": "ERROR" for step in _STEPS}
    run.expect({**steps, "test_next": "PASSED"})
    for step in _STEPS:
        assert f"RuntimeError: broken: {step}" in run.text
    assert "no devices came free" not in run.text


@pytest.mark.parametrize("place", ["conftest", "test_it"])
def test_xfail_does_not_cover_a_rank_that_dies_before_the_test(suite: BackgroundSuite, place: str) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.xfail(reason="known")
        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_known(): assert False
        """,
    )
    path = suite.path / f"{place}.py"
    text = path.read_text() if path.exists() else ""
    path.write_text(f"import os\nif os.environ.get('RANK') == '1': os._exit(3)\n{text}")
    run = suite.run()
    assert run.count() == {"ERROR": 1}, run.text
    assert "rank 1 exited with status 3" in run.text
