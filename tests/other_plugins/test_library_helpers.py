"""Tests of the test helpers of libraries (accelerate, transformers, lightning) in marked tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_ACCELERATE = """
    import os
    from unittest import mock

    import pytest
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.test_utils.testing import (
        AccelerateTestCase, MockingTestCase, TempDirTestCase, require_cuda, require_multi_device, require_non_cpu, slow
    )

    pytestmark = pytest.mark.distributed(2, device="cpu")
    RANKS = int(os.environ.get("WORLD_SIZE", "1"))


    class TestState(AccelerateTestCase):
        def uses(self):
            assert PartialState._shared_state == {}
            accelerator = Accelerator(cpu=True)
            assert accelerator.num_processes == RANKS
            assert accelerator.gather(torch.ones(1)).sum() == RANKS

        def test_one(self):
            self.uses()

        def test_two(self):
            self.uses()

        @require_multi_device
        def test_multi_device(self):
            raise AssertionError

        @require_non_cpu
        def test_non_cpu(self):
            raise AssertionError

        @slow
        def test_slow(self):
            raise AssertionError

        def test_fails(self):
            assert Accelerator(cpu=True).process_index < 0


    @require_cuda
    class TestCuda(AccelerateTestCase):
        def test_cuda(self):
            raise AssertionError


    class TestFolder(TempDirTestCase):
        def test_one(self):
            assert not os.listdir(self.tmpdir)
            self.tmpdir.joinpath("file").touch(exist_ok=False)

        def test_two(self):
            self.test_one()


    class TestMocks(MockingTestCase):
        def setUp(self):
            super().setUp()
            self.add_mocks(mock.patch.dict(os.environ, {"MOCKED": "1"}))

        def test_mock(self):
            assert os.environ["MOCKED"] == "1"


    @require_multi_device
    def test_function():
        raise AssertionError
    """
_TRANSFORMERS = """
    import os
    from pathlib import Path

    import pytest
    from transformers.testing_utils import (
        CaptureLogger, CaptureStdout, TestCasePlus, require_torch, require_torch_gpu, require_torch_multi_accelerator,
        require_torch_multi_gpu, slow, torch_device
    )
    from transformers.utils import logging

    pytestmark = pytest.mark.distributed(2, device="cpu")
    FOLDERS = set()


    @require_torch
    class TestPlus(TestCasePlus):
        def test_paths(self):
            assert str(self.test_file_path) == os.path.realpath(__file__)
            assert self.test_file_dir_str == os.path.dirname(os.path.realpath(__file__))

        def test_folder(self):
            folder = self.get_auto_remove_tmp_dir()
            assert os.listdir(folder) == []
            Path(folder, str(os.getpid())).touch()
            FOLDERS.add(folder)

        def test_folder_is_gone(self):
            assert FOLDERS
            assert not any(map(os.path.exists, FOLDERS))

        def test_output(self):
            with CaptureStdout() as captured:
                print("said")
            assert captured.out == "said\\n"
            logger = logging.get_logger("transformers.models")
            with CaptureLogger(logger) as logged:
                logger.error("logged")
            assert logged.out == "logged\\n"

        @require_torch_multi_gpu
        def test_multi_gpu(self):
            raise AssertionError

        @require_torch_multi_accelerator
        def test_multi_accelerator(self):
            raise AssertionError

        @slow
        def test_slow(self):
            raise AssertionError

        def test_fails(self):
            assert torch_device == "none"


    @require_torch_gpu
    def test_function():
        raise AssertionError
    """
_LIGHTNING = """
    import os

    import pytest
    import torch
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.testing import _runif_reasons as of_fabric
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.utilities.testing import _runif_reasons as of_trainer

    pytestmark = pytest.mark.distributed(2, device="cpu")
    RANKS = int(os.environ.get("WORLD_SIZE", "1"))


    def RunIf(reasons_of, **requirements):
        "As Lightning's own tests have it."
        reasons, kwargs = reasons_of(**requirements)
        return pytest.mark.skipif(condition=len(reasons) > 0, reason=f"Requires: [{' + '.join(reasons)}]", **kwargs)


    @pytest.mark.parametrize("number", [1, 2])
    def test_fits(tmp_path, number):
        trainer = Trainer(
            accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", default_root_dir=tmp_path,
            max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0,
        )
        assert trainer.world_size == RANKS
        trainer.fit(BoringModel())
        assert trainer.global_step == 2


    def test_fabric():
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
        fabric.launch()
        assert fabric.all_gather(torch.ones(1)).sum() == RANKS


    @RunIf(of_trainer, min_cuda_gpus=2, standalone=True)
    def test_two_gpus():
        raise AssertionError


    @RunIf(of_fabric, min_cuda_gpus=1)
    def test_gpu():
        raise AssertionError


    @RunIf(of_trainer, skip_windows=True, sklearn=True)
    def test_runs():
        pass


    @RunIf(of_fabric, linux_only=True)
    def test_fails():
        assert seed_everything(1) == 2
    """


@needs("accelerate")
def test_helpers_of_accelerate_work_in_ranks(pair: Pair) -> None:
    pair.write("test_it.py", _ACCELERATE)
    _, run = pair.run_both("-rs", "-W", "default")
    assert run.count() == {"PASSED": 5, "FAILED": 1, "SKIPPED": 5}
    assert "test requires multiple hardware accelerators" in run.text


@needs("transformers", "tokenizers")
def test_helpers_of_transformers_work_in_ranks(pair: Pair) -> None:
    pair.write("test_it.py", _TRANSFORMERS)
    _, run = pair.run_both("-rs", "-W", "default")
    assert run.count() == {"PASSED": 4, "FAILED": 1, "SKIPPED": 4}
    assert "test requires multiple CUDA GPUs" in run.text


@needs("lightning", "torchmetrics")
def test_helpers_of_lightning_work_in_ranks(pair: Pair) -> None:
    pair.write("test_it.py", _LIGHTNING)
    _, run = pair.run_both("-rs", "-W", "default")
    assert run.count() == {"PASSED": 4, "FAILED": 1, "SKIPPED": 2}
    assert "Requires: [GPUs>=2" in run.text
