"""Tests of errors between the grant of devices and a running world: the devices and slots are given back."""

from __future__ import annotations

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
    import importlib
    from functools import reduce

    def break_once(step):
        module, _, path = step.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, importlib.import_module("pytest_accel." + module))
        whole, calls = getattr(owner, name), []

        def broken(*args, **given):
            calls.append(args)
            if len(calls) == (2 if name == "call_rank" else 1):  # For rank 1.
                raise RuntimeError(f"broken: {{step}}")
            return whole(*args, **given)

        setattr(owner, name, broken)

    def pytest_configure():
        for step in {_STEPS}:
            break_once(step)
"""


def test_an_error_on_the_way_to_a_world_gives_everything_back(suite: BackgroundSuite) -> None:
    """Each test comes as far as the first step that no test before it has reached."""
    suite.without_torch()
    suite.write("pytest.ini", "[pytest]\naccel = sim:2\naccel_wait = 60\n")
    suite.write("conftest.py", _CONFTEST)
    suite.write(
        "test_it.py",
        f"""
        import pytest

        @pytest.mark.distributed(2, fresh=True, init=False)
        @pytest.mark.parametrize("number", range({len(_STEPS)} + 1))
        def test_it(number): pass
        """,
    )
    run = suite.run("-n1")
    assert run.count() == {"ERROR": len(_STEPS), "PASSED": 1}, run.text
    for step in _STEPS:
        assert f"RuntimeError: broken: {step}" in run.text
    assert "no devices came free" not in run.text
