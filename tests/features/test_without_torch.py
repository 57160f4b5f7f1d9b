"""Tests of sessions in an environment without torch, such as that of a suite that uses JAX or MPI."""

from __future__ import annotations

import sys

import pytest

from tests import fake_driver
from tests.features.conftest import Suite

_TESTS = """
    import sys

    import pytest

    alone = pytest.mark.distributed(2, init=False)


    @pytest.mark.devices(2)
    def test_devices(accel):
        assert accel.ids == ("GPU-1", "GPU-2")
        assert accel.mask == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}


    @alone
    @pytest.mark.parametrize("number", [1, 2])
    def test_ranks(number, rank, world_size, gather, free_port, tmp_path, shared_tmp_path):
        assert gather(bytes([rank]) * (5 << 20)) == [bytes([rank]) * (5 << 20) for rank in range(world_size)]
        assert gather(free_port) == [free_port] * 2
        (shared_tmp_path / str(rank)).touch()
        assert gather(rank + number) == [number, number + 1]
        assert len(list(shared_tmp_path.iterdir())) == 2
        assert len(set(gather(tmp_path))) == 2
        assert "torch" not in sys.modules
        with pytest.raises((OSError, EOFError)):
            input()


    @alone
    def test_wrong_on_one_rank(rank):
        assert rank == 0


    @pytest.mark.distributed(2)
    def test_group(rank):
        pass


    @alone
    def test_device(device):
        pass


    @alone
    def test_store(world_store):
        pass


    @pytest.mark.devices(1)
    def test_visible_devices(devices):
        pass
    """


_GPUS = "".join(f"gpu GPU-{number}\npci 0 {number} 0\n" for number in (1, 2))


def test_only_tests_that_need_torch_fail_and_each_says_so(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    if fake_driver.compiler() is None:
        pytest.skip("needs Linux and a C compiler for the fake driver")
    fake_driver.build(suite.path / "driver" / fake_driver.NVML, "libnvidia-ml.c")
    suite.write("test_suite.py", _TESTS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(suite.path / "driver"))
    monkeypatch.setenv("FAKE_NVML", str(suite.write("machine.txt", _GPUS)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    suite.without_torch()
    run = suite.run("-n", "1", "--accel", "cuda")
    run.expect(
        {
            **dict.fromkeys(("test_devices", "test_ranks[1]", "test_ranks[2]"), "PASSED"),
            "test_wrong_on_one_rank": "FAILED",
            **dict.fromkeys(("test_group", "test_device", "test_store", "test_visible_devices"), "ERROR"),
        }
    )
    lines = run.text.splitlines()
    missing = f"torch, which is not installed in {sys.prefix}"
    for start in (
        f"@pytest.mark.distributed makes a process group of {missing}: install torch, or leave the process group",
        *(f"the fixture '{fixture}' needs {missing}" for fixture in ("device", "devices", "world_store")),
    ):
        assert [line for line in lines if line.startswith(start)] != [], start
    assert "No module named" not in run.text
