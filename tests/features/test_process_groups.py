"""Tests of process groups and devices, and of the fixtures for them, in marked tests."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite


@pytest.mark.long
def test_the_default_group_is_made_once_and_kept(suite: Suite) -> None:
    suite.write(
        "test_groups.py",
        """
        import os

        import pytest
        from tests.lazy_torch import dist, torch

        pytestmark = pytest.mark.distributed(2, kind="cpu")
        seen = []


        def test_first(process_group, rank, gather):
            assert dist.get_backend() == "gloo"
            assert process_group is dist.group.WORLD
            assert dist.get_rank() == rank
            total = torch.ones(1) * rank
            dist.all_reduce(total)
            assert total.item() == 1
            seen.append((os.getpid(), process_group))
            assert len(set(gather(os.getpid()))) == 2


        def test_second(process_group):
            assert seen == [(os.getpid(), process_group)]
            dist.barrier()


        @pytest.mark.distributed(2, kind="cpu", backend="gloo")
        def test_named_backend(process_group):
            assert dist.get_backend() == "gloo"
            assert (os.getpid(), process_group) not in seen
            dist.barrier()


        @pytest.mark.distributed(4, kind="cpu")
        def test_mesh(device_mesh, rank):
            mesh = device_mesh((2, 2), ("dp", "tp"))
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert (mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()) == divmod(rank, 2)
            assert mesh is device_mesh((2, 2), ["dp", "tp"])
            total = torch.ones(1)
            dist.all_reduce(total, group=mesh.get_group("tp"))
            assert total.item() == 2
            seen.append(mesh)


        @pytest.mark.distributed(4, kind="cpu")
        def test_mesh_is_kept(device_mesh):
            assert device_mesh((2, 2), ("dp", "tp")) is seen[-1]
            assert device_mesh((4,)).size() == 4


        @pytest.mark.distributed(1, kind="cpu")
        def test_one_rank(process_group, world_size, gather):
            assert (world_size, gather("alone")) == (1, ["alone"])
            dist.all_reduce(torch.ones(1))


        @pytest.mark.distributed(2, kind="cpu", backend="carrier-pigeon")
        def test_unknown_backend():
            pass


        @pytest.mark.distributed(2, kind="cpu", env={"MINE": "yes", "OMP_NUM_THREADS": "2"})
        def test_environment():
            assert os.environ["MINE"] == "yes"
            assert torch.get_num_threads() == 2
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": len(run.results) - 1, "ERROR": 1}
    assert "carrier-pigeon" in run.failure("test_unknown_backend")


_HARNESS = """
    import os
    import socket
    from datetime import timedelta

    import pytest
    from tests.lazy_torch import dist, torch

    # Longer than the tests may take, so that a group that nobody serves is a hang.
    HOUR = timedelta(hours=1)
    pids = []


    def total():
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()


    def make(method, rank, size):
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=HOUR)


    @pytest.fixture
    def port(gather):
        \"""Return one that was free when rank 0 asked, as those harnesses do.\"""
        with socket.socket() as asking:
            asking.bind(("127.0.0.1", 0))
            return gather(asking.getsockname()[1])[0]
"""


@pytest.mark.long
def test_tests_can_create_their_own_groups(suite: Suite) -> None:
    suite.write("harness.py", _HARNESS)
    suite.write(
        "test_own.py",
        """
        from harness import *

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


        def test_variables(rank, local_rank, world_size, gather):
            assert not dist.is_initialized()
            expected = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": "2",
                "ROLE_NAME": "default",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
            }
            assert {name: os.environ[name] for name in expected} == expected
            assert (local_rank, world_size) == (rank, 2)
            assert len(set(gather(os.environ["MASTER_PORT"]))) == 1
            assert len(set(gather(os.environ["TORCHELASTIC_RUN_ID"]))) == 1
            assert dist.is_torchelastic_launched()


        def test_port_is_held():
            with socket.socket() as other, pytest.raises(OSError):
                other.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))


        def test_tcp(rank):
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
            assert total() == 2
            dist.destroy_process_group()


        @pytest.fixture(scope="module")
        def group():
            dist.init_process_group("gloo")
            yield dist.group.WORLD
            dist.destroy_process_group()


        def test_group_of_a_module_fixture(group):
            assert total() == 2
            pids.append(group)


        def test_group_of_a_module_fixture_is_kept(group):
            assert total() == 2
            assert pids[-1] is group


        def test_leaves_a_group():
            if not dist.is_initialized():
                dist.init_process_group("gloo")


        @pytest.mark.distributed(3, kind="cpu", init=False)
        def test_other_world():
            assert not dist.is_initialized()
        """,
    )
    suite.write(
        "test_addresses.py",
        """
        from harness import *

        # Two groups stay, to be counted.
        pytestmark = pytest.mark.filterwarnings("ignore::pytest_accel.LeftoverWarning")


        @pytest.mark.distributed(2, init=False)
        def test_several_in_turn(port, rank):
            pids.append(os.getpid())
            for _ in range(3):
                make(f"tcp://127.0.0.1:{port}", rank, 2)
                assert total() == 2
                dist.destroy_process_group()
            make(f"tcp://localhost:{port + 1}", rank, 2)
            assert total() == 2
            dist.destroy_process_group()


        @pytest.mark.distributed(2, init=False)
        @pytest.mark.parametrize("number", range(2))
        def test_a_fixed_port_in_the_same_world(number, rank, monkeypatch):
            assert pids == [os.getpid()]
            monkeypatch.setenv("MASTER_ADDR", "localhost")
            monkeypatch.setenv("MASTER_PORT", "29500")
            make(None, rank, 2)
            assert total() == 2
            dist.destroy_process_group()


        @pytest.mark.distributed(2, init=False)
        def test_its_own_rank_0_serves_where_there_is_no_agent(port, rank, monkeypatch):
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
            make(f"tcp://127.0.0.1:{port}", rank, 2)
            served = dist.TCPStore("127.0.0.1", port, None, False, HOUR, wait_for_workers=False)
            assert served.num_keys()
            assert total() == 2
            dist.destroy_process_group()


        def serve(port):
            make(f"tcp://127.0.0.1:{port}", 1, 2)
            assert total() == 2
            dist.destroy_process_group()


        @pytest.mark.distributed(1, init=False)
        def test_a_group_with_a_process_that_is_no_rank(port):
            process = torch.multiprocessing.get_context("fork").Process(target=serve, args=(port,))
            process.start()
            make(f"tcp://127.0.0.1:{port}", 0, 2)
            assert total() == 2
            dist.destroy_process_group()
            process.join()
            assert process.exitcode == 0


        @pytest.mark.distributed(4, init=False)
        def test_two_at_a_time(port, rank):
            make(f"tcp://127.0.0.1:{port + rank // 2}", rank % 2, 2)
            # Their numbers differ, and nobody has to come to the others'. Both stay, to be counted.
            for _ in range(1 + rank // 2):
                assert total() == 2
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 13}, run.text


_DEVICES = """
    import os
    import sys

    import pytest
    from tests.lazy_torch import torch


    @pytest.mark.devices(2)
    def test_devices(device, devices, accel):
        assert (len(devices), device) == (2, devices[0])
        assert accel.kind == "sim"
        assert accel.ids == tuple(device.id for device in accel.devices)
        assert accel.mask == {"SIM_VISIBLE_DEVICES": os.environ["SIM_VISIBLE_DEVICES"]}
        assert len(accel.mask["SIM_VISIBLE_DEVICES"].split(",")) == 2


    @pytest.mark.devices(2)
    def test_no_ranks(request):
        assert "RANK" not in os.environ
        for name in ("rank", "local_rank", "world_size", "process_group", "device_mesh", "gather", "dist_store",
                     "shared_tmp_path"):
            with pytest.raises(pytest.fail.Exception, match="@pytest.mark.devices alone makes no ranks"):
                request.getfixturevalue(name)


    @pytest.mark.distributed(2, init=False)
    @pytest.mark.parametrize("name", ["process_group", "device_mesh"])
    def test_no_group(request, name):
        with pytest.raises(pytest.fail.Exception, match="needs a process group, which .* leaves to the test"):
            request.getfixturevalue(name)


    @pytest.mark.distributed(2, devices_per_rank=2)
    def test_visible_world(rank, local_rank, device, devices, accel, gather):
        assert os.environ["LOCAL_RANK"] == str(rank)
        assert local_rank == rank
        assert len(devices) == 4
        assert device == devices[2 * rank]
        masks = gather(os.environ["SIM_VISIBLE_DEVICES"])
        assert len(set(masks)) == 1
        assert len(masks[0].split(",")) == 4
        ids = gather(accel.ids)
        assert [len(own) for own in ids] == [2, 2]
        assert len({*ids[0], *ids[1]}) == 4


    @pytest.mark.distributed(2, devices_per_rank=2, visible="rank")
    def test_visible_rank(rank, local_rank, device, devices, accel, gather):
        assert os.environ["LOCAL_RANK"] == "0"
        assert len(devices) == 2
        assert device == devices[0]
        masks = gather(os.environ["SIM_VISIBLE_DEVICES"])
        assert [len(mask.split(",")) for mask in masks] == [2, 2]
        assert len({*masks[0].split(","), *masks[1].split(",")}) == 4
        ids = gather(accel.ids)
        assert len({*ids[0], *ids[1]}) == 4


    @pytest.mark.distributed(2, kind="cpu")
    def test_on_cpu(device, devices, accel, gather):
        assert device == torch.device("cpu")
        assert devices == [torch.device("cpu")]
        assert (accel.kind, accel.ids) == ("cpu", ())


    FIXTURES = ["accel", "device", "devices", "rank", "local_rank", "world_size", "process_group", "device_mesh",
                "dist_store", "gather", "shared_tmp_path"]


    @pytest.mark.parametrize("name", FIXTURES)
    def test_no_mark(request, name):
        assert "torch" not in sys.modules, "pytest itself makes tests.lazy_torch import torch"
        wanted = "@pytest.mark.devices or " if name in FIXTURES[:3] else ""
        with pytest.raises(pytest.fail.Exception) as caught:
            request.getfixturevalue(name)
        assert str(caught.value) == f"the fixture {name!r} needs {wanted}@pytest.mark.distributed on the test"
    """


def test_tests_get_their_devices_and_masks(suite: Suite) -> None:
    suite.write("test_devices.py", _DEVICES)
    run = suite.run()
    assert run.count() == {"PASSED": 18}, run.text
