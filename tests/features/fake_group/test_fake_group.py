"""Tests of ``backend="fake"``: one process in a process group of any size."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite
from tests.run import CAUSES

_HEAD = """
    import os

    import pytest
    from tests.lazy_torch import dist, torch


    fake = pytest.mark.distributed(4096, backend="fake")
    """
_ONE = "runs one process: use another backend, and no more ranks than the machine can run"
_GROUPS = (
    _HEAD
    + """
    processes = set()


    @fake
    def test_identity(rank, local_rank, world_size, process_group, device, accel):
        processes.add(os.getpid())
        assert (rank, local_rank, world_size) == (0, 0, 4096)
        assert (dist.get_rank(), dist.get_world_size(), process_group.size()) == (0, 4096, 4096)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        assert [os.environ[name] for name in names] == ["0", "4096", "0", "4096", "1"]
        assert (str(device), accel.kind, accel.devices) == ("cpu", "cpu", ())


    @fake
    def test_placements(device_mesh):
        assert os.getpid() in processes
        api = pytest.importorskip("torch.distributed.tensor")
        if not hasattr(api, "distribute_tensor"):
            import torch.distributed._tensor as api
        mesh = device_mesh((64, 64), ("data", "tensor"))
        whole = torch.empty(4096, 128, device="meta")
        tensor = api.distribute_tensor(whole, mesh, [api.Shard(0), api.Shard(1)])
        assert tensor.to_local().shape == (64, 2)
        assert tensor.redistribute(placements=[api.Shard(0), api.Replicate()]).to_local().shape == (64, 128)


    @fake
    def test_collectives_and_fixtures(free_port, shared_tmp_path):
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.all_reduce(value, async_op=True)
        parts = torch.empty(2 * 4096)
        dist.all_gather_into_tensor(parts, value)
        dist.barrier()
        objects = ["from this rank"]
        dist.broadcast_object_list(objects, src=0)
        assert objects == ["from this rank"]
        assert shared_tmp_path.is_dir()


    @pytest.mark.distributed(2, kind="cpu", backend="gloo")
    def test_real_ranks(gather, rank):
        assert os.getpid() not in processes
        value = torch.ones(1)
        dist.all_reduce(value)
        objects = [None, None]
        dist.all_gather_object(objects, rank)
        assert (value.item(), objects, len(set(gather(os.getpid())))) == (2, [0, 1], 2)


    @fake
    def test_exit():
        os._exit(0)


    @fake
    def test_wrong_value():
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 4096


    @fake
    def test_destroyed_group():
        assert os.getpid() not in processes
        dist.destroy_process_group()


    @pytest.mark.distributed([1, 3], backend="fake", fresh=True)
    def test_fresh_process(world_size):
        assert not processes
        processes.add(os.getpid())
        assert dist.get_world_size() == world_size


    @pytest.mark.parametrize("view", [0, 65, 4095])
    @pytest.mark.distributed(4096, backend="fake", init=False)
    def test_other_ranks(view, world_size):
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("fake", rank=view, world_size=world_size)
        assert [*init_device_mesh("cpu", (64, 64)).get_coordinate()] == [view // 64, view % 64]
        dist.destroy_process_group()
    """
)
_REFUSED = {
    "dist.send": "dist.send(torch.ones(1), 1)",
    "dist.irecv": "dist.irecv(torch.ones(1), 1)",
    "dist.batch_isend_irecv": "dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 1)])",
    "dist.send_object_list": "dist.send_object_list([1], 1)",
    "dist.all_gather_object": "dist.all_gather_object([None] * 64, 1)",
    "dist.broadcast_object_list": "dist.broadcast_object_list([None], src=1)",
    "the store of the process group": "dist.new_group([0, 1], backend='gloo')",
}
"""The calls that need other ranks, by the names in their reports."""
_NEEDING_OTHERS = f"""
    import threading
    import unittest

    import pytest
    from tests.lazy_torch import dist, torch

    fake = pytest.mark.distributed(64, backend="fake")


    @fake
    @pytest.mark.parametrize("call", {[*_REFUSED.values()]}, ids={[*map(str, range(len(_REFUSED)))]})
    def test_call(call):
        try:
            with pytest.raises(Exception):
                eval(call)
        except Exception:
            pass


    @fake
    def test_thread():
        thread = threading.Thread(target=dist.send, args=(torch.ones(1), 1))
        thread.start()
        thread.join()


    def swallow():
        try:
            dist.send(torch.ones(1), 1)  # The refused call.
        except BaseException:
            pass


    @pytest.fixture
    def in_teardown():
        yield
        swallow()


    @fake
    def test_swallowed():
        swallow()


    @fake
    def test_swallowed_in_teardown(in_teardown):
        pass


    @fake
    class TestCase(unittest.TestCase):
        def test_swallowed_before_a_subtest(self):
            swallow()
            with self.subTest("skipped"):
                self.skipTest("not here")


    @fake
    @pytest.mark.parametrize("name", ["gather", "dist_store", "world_store", "faults"])
    def test_fixture(name, request):
        request.getfixturevalue(name)


    @pytest.mark.distributed(64, backend="fake", init=False)
    def test_other_backend():
        dist.init_process_group("gloo")
    """


def test_a_fake_group_beside_real_ranks(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.write("test_groups.py", _GROUPS)
    path = suite.write("test_refused.py", _NEEDING_OTHERS)
    # The first two are warnings of some releases of torch.
    ignored = ("ignore::FutureWarning", "ignore:DTensor random operators", "ignore:Exception in thread")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    run = suite.run(CAUSES, *(f"-W{one}" for one in ignored))
    passed = ["test_identity", "test_placements", "test_collectives_and_fixtures", "test_real_ranks"]
    passed += ["test_destroyed_group", "test_fresh_process[world_size=1]", "test_fresh_process[world_size=3]"]
    passed += [f"test_other_ranks[{view}]" for view in (0, 65, 4095)]
    calls = {f"test_call[{number}]": what for number, what in enumerate(_REFUSED)}
    calls |= {"test_thread": "dist.send", "test_other_backend": "the store of the process group"}
    fixtures = {f"test_fixture[{name}]": name for name in ("gather", "dist_store", "world_store", "faults")}
    swallowed = ["test_swallowed", "test_swallowed_in_teardown", "TestCase.test_swallowed_before_a_subtest"]
    run.expect(
        dict.fromkeys(passed, "PASSED")
        | {"test_exit": "FAILED died: status 0; rank 0", "test_wrong_value": "FAILED failed: AssertionError; rank 0"}
        | dict.fromkeys([*calls, *fixtures, "test_swallowed"], "FAILED failed: Failed; rank 0")
        | {"test_swallowed_before_a_subtest": "SUBSKIPPED FAILED failed: Failed; rank 0"}
        | {"test_swallowed_in_teardown": "PASSED ERROR failed: Failed; rank 0"}
    )
    where = "one process of a fake group of 4096, whose collectives exchange nothing\n"
    assert where in run.failure("test_exit")
    assert where in run.failure("test_wrong_value")
    line = path.read_text().splitlines().index("        dist.send(torch.ones(1), 1)  # The refused call.") + 1
    for test in swallowed:
        assert f"(test_refused.py:{line})\n" in run.failure(test)
    for test, what in calls.items():
        text = f'{what} needs other ranks, and @pytest.mark.distributed(64, backend="fake") {_ONE}'
        assert text in run.failure(test)
    for test, name in fixtures.items():
        text = f"the fixture '{name}' needs the other ranks, and "
        assert f'{text}@pytest.mark.distributed(backend="fake") runs one process' in run.failure(test)


def test_a_torch_without_fake_groups(suite: Suite) -> None:
    module = "torch.testing._internal.distributed.fake_pg"
    suite.write("conftest.py", f"import sys\n\nsys.modules['{module}'] = None\n")
    suite.write(
        "test_missing.py",
        """
        import pytest


        @pytest.mark.distributed(8, backend="fake")
        def test_it():
            pass
        """,
    )
    run = suite.run()
    run.expect({"test_it": "ERROR"})
    text = rf'backend="fake" is not available in torch [0-9.]+\S*: import of {re.escape(module)} halted'
    assert re.search(text, run.failure("test_it"))
