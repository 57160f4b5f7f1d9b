"""Tests of faults that are injected before collectives: kills, delays, errors, and random delays."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite
from tests.run import CAUSES
from tests.torch_release import needs_torch

_TESTS = """
    import time

    import pytest
    from tests.lazy_torch import dist, torch

    distributed = pytest.mark.distributed


    def one():
        return torch.ones(1)


    @distributed(2)
    def test_kill(faults, rank):
        faults.kill(1, at="all_reduce", n=2)
        dist.all_reduce(one())
        dist.barrier()
        with pytest.raises(RuntimeError):
            dist.all_reduce(one())


    @distributed(2)
    def test_kill_in_cpp(faults, rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        faults.kill(1, at="all_reduce")  # That of the gradients, which torch starts in C++.
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 2)).sum().backward()


    @distributed(2)
    def test_kill_that_does_not_come(faults, rank):
        faults.kill(1, at="all_reduce", n=3)
        dist.all_reduce(one())
        dist.all_reduce(one())


    @distributed(2)
    def test_delay(faults, rank, gather):
        faults.delay(1, 0.3, at="barrier")
        began = time.monotonic()
        dist.all_reduce(one())
        dist.barrier()
        dist.barrier()
        assert time.monotonic() - began >= 0.6


    @distributed(2)
    def test_delay_that_does_not_come(faults, rank):
        faults.delay(0, 0.3, at="reduce")
        faults.delay(0, 0.3, n=3)
        dist.all_reduce(one())


    @distributed(2)
    def test_error(faults, rank):
        faults.fail(1, OSError("by hand"), at="all_gather", n=2)
        parts = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(parts, one())
        if rank == 1:
            with pytest.raises(OSError, match="by hand"):
                dist.all_gather(parts, one())
        dist.all_gather(parts, one())


    @distributed(2)
    def test_unknown_function(faults):
        with pytest.raises(ValueError, match="seconds must be a finite number >= 0, got '2s'"):
            faults.delay(1, "2s")
        with pytest.raises(ValueError, match="after must be a finite number of seconds > 0, got '2s'"):
            faults.expect_hang(1, after="2s")
        faults.kill(1, at="reduce_all")


    @distributed(2)
    def test_uncaught_error(faults, rank):
        for failing in (0, 1):
            faults.fail(failing, OSError("by hand"))
        dist.all_reduce(one())


    @distributed(2)
    def test_after_errors(rank):
        dist.all_reduce(one())


    @distributed(2)
    def test_without_random_delays(faults, monkeypatch):
        monkeypatch.setattr("pytest_accel.features.faults.hooks.sleep", None)
        dist.all_reduce(one())
    """


_ISSUED_BY_TORCH = """
    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed = pytest.mark.distributed
    pytestmark = pytest.mark.filterwarnings("ignore")
    ONE = torch.ones(2)


    @distributed(2)
    @pytest.mark.parametrize("at", ["all_gather_into_tensor", "reduce_scatter_tensor"])
    def test_fsdp(faults, rank, at):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        faults.kill(1, at=at)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 4)).sum().backward()
            dist.barrier()


    CALLS = {
        "all_reduce": lambda group: functional.all_reduce(ONE, "sum", group),
        "all_gather_into_tensor": lambda group: functional.all_gather_tensor(ONE, 0, group),
        "reduce_scatter_tensor": lambda group: functional.reduce_scatter_tensor_autograd(ONE, "sum", 0, group),
        "broadcast": lambda group: functional.broadcast(ONE, 0, group),
        "all_to_all_single": lambda group: functional.all_to_all_single(ONE, None, None, group),
    }


    @distributed(2)
    @pytest.mark.parametrize("at", CALLS)
    def test_function(faults, rank, at):
        call = CALLS[at]
        call(dist.group.WORLD)
        faults.fail(rank, OSError("by hand"), at=at, n=2)
        call(dist.group.WORLD)
        with pytest.raises(OSError):
            call(dist.group.WORLD)


    @distributed(2)
    def test_dtensor(faults, rank):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        faults.fail(rank, OSError("by hand"), at="all_gather_into_tensor", n=2)
        tensor.redistribute(mesh, [Replicate()]).to_local()
        with pytest.raises(OSError):
            tensor.redistribute(mesh, [Replicate()]).to_local()


    @distributed(2)
    def test_compiled(faults, rank):
        compiled = torch.compile(
            lambda value: functional.all_reduce(value + 1, "sum", dist.group.WORLD), backend="aot_eager", fullgraph=True
        )
        faults.fail(rank, OSError("by hand"), at="all_reduce", n=2)
        assert compiled(ONE).tolist() == [4, 4]
        with pytest.raises(OSError):
            compiled(ONE)
    """


@pytest.mark.long
@needs_torch(2, 6)
def test_collectives_that_torch_issues_itself_are_seen_once(suite: Suite) -> None:
    suite.write("test_it.py", _ISSUED_BY_TORCH)
    assert suite.run().count() == {"PASSED": 9}


def test_faults_are_injected_before_collectives(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run(CAUSES)
    run.expect(
        {
            "test_kill": "PASSED",
            "test_kill_in_cpp": "PASSED",
            "test_kill_that_does_not_come": "FAILED failed: planned fault; rank 1",
            "test_delay": "PASSED",
            "test_delay_that_does_not_come": "FAILED failed: planned fault; rank 0",
            "test_error": "PASSED",
            "test_uncaught_error": "FAILED failed: OSError; ranks 0-1",
            "test_unknown_function": "FAILED failed: ValueError; ranks 0-1",
            "test_after_errors": "PASSED",
            "test_without_random_delays": "PASSED",
        }
    )
    text = "rank 1: kill before call 3 of all_reduce (called 2 times)"
    assert text in run.failure("test_kill_that_does_not_come")
    text = "rank 0: delay before reduce (never called), delay before call 3 of any operation (called once)"
    assert text in run.failure("test_delay_that_does_not_come")
    failure = run.failure("test_unknown_function")
    assert '>       faults.kill(1, at="reduce_all")\nE       ValueError: at must be one of all_gather, ' in failure
    assert "announcements.py" not in failure, "the line of the test is the place"


_RACE = """
    import threading

    import pytest
    from tests.lazy_torch import dist, torch


    @pytest.mark.distributed(2)
    def test_race(rank, shared_tmp_path):
        own, answer = [dist.new_group([one]) for one in (0, 1)][rank], shared_tmp_path / "answer"
        dist.barrier()
        if rank == 0:
            works = [dist.all_reduce(torch.ones(1), group=own, async_op=True) for _ in range(60)]
            for work in works:
                work.wait()
            answer.touch()
        else:
            threading.Event().wait(0.3)
            assert answer.exists()
    """
"""Rank 0 needs 3 ms without delays, a hundredth of the time that rank 1 gives it, and about 0.6 s with them."""


def test_random_delays_find_a_race_and_name_their_seed(suite: Suite) -> None:
    suite.write("test_it.py", _RACE)
    suite.ini("accel_leaks = off")
    for seed in range(5):
        run = suite.run("--accel-jitter", str(seed))
        assert f"accel: random delays before collectives, and hash seeds: --accel-jitter {seed}" in run.text
        if run.result("test_race") != "PASSED":
            break
    run.expect({"test_race": "FAILED"})
    assert f"random delays before collectives, and hash seeds: --accel-jitter {seed}" in run.failure("test_race")
    assert f"--accel-jitter {seed} --accel-" in run.failure("test_race"), "the command of the rerun"


def test_random_delays_come_with_a_hash_seed_for_each_rank(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment gives the seed of the last session."""
    suite.without_torch()
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_order_of_a_set(gather):
            one, other = gather(list({"weight", "bias", "scale", "mean"}))
            assert one == other
        """,
    )
    orders = []
    for options in (("--accel-jitter", "7"), ("-n1",)):
        run = suite.run(*options)
        orders += re.findall(r"assert (\[.*\] == \[.*\])", run.text)[:1]
        monkeypatch.setenv("PYTEST_ACCEL_JITTER", "7")
    assert orders[0] == orders[1]
    text = "random delays before collectives, and hash seeds: --accel-jitter 7"
    assert run.text.count(text) == 2, "the header and the failure"
