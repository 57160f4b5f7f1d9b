"""Tests of ranks from test to test: their random states, and what a suite keeps, as it does under plain torchrun."""

from __future__ import annotations

from tests.features.conftest import Suite

_RANDOM_STATES = {
    "test_a.py": """
        import random
        import secrets
        import uuid

        import pytest
        from tests.lazy_torch import torch

        DRAWS = {
            "seed of torch": lambda: torch.initial_seed(),
            "weights": lambda: torch.nn.Linear(4, 4).weight.tolist(),
            "numpy": lambda: pytest.importorskip("numpy").random.rand(4).tolist(),
            "random": random.random,
            "secrets": secrets.token_bytes,
            "uuid": lambda: uuid.uuid1().bytes,
        }

        @pytest.mark.parametrize("name", DRAWS)
        @pytest.mark.distributed(2, kind="cpu")
        def test_differs(name, gather):
            one, other = gather(DRAWS[name]())
            assert one != other
    """,
    # These tests run later in the same world, and continue the streams, as those of one process do.
    "with_seed/conftest.py": "import os\n\nif 'RANK' in os.environ:\n    import torch\n\n    torch.manual_seed(3)\n",
    "with_seed/test_b.py": """
        import pytest


        @pytest.mark.parametrize("number", range(3))
        @pytest.mark.distributed(2, kind="cpu")
        def test_seeded(number, gather):
            import torch

            generator = torch.Generator().manual_seed(3)
            drawn = [torch.rand(1, generator=generator).item() for _ in range(number + 1)]
            assert gather(torch.rand(1).item()) == [drawn[-1]] * 2
    """,
}
_SUITE = {
    "parallel_state.py": """
        import subprocess
        import sys

        import torch.distributed as dist

        _GROUPS = {}


        class State:
            helper = None


        def group():
            if "all" not in _GROUPS:
                _GROUPS["all"] = dist.new_group()
                State.helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            return _GROUPS["all"]
    """,
    "test_groups.py": """
        import pytest


        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.parametrize("number", range(3))
        def test_broadcast(number, rank):
            import torch
            import torch.distributed as dist
            from parallel_state import State, group

            value = torch.full((1,), float(rank))
            dist.broadcast(value, src=0, group=group())
            assert value.item() == 0
            assert State.helper.poll() is None
    """,
    "test_loader.py": """
        import pytest


        @pytest.fixture(scope="module")
        def loader():
            import torch
            from torch.utils.data import DataLoader, TensorDataset

            data = TensorDataset(torch.arange(8))
            return DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)


        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.parametrize("epoch", range(2))
        def test_epoch(loader, epoch, rank):
            assert sum(len(batch[0]) for batch in loader) == 8
    """,
    "test_lazy.py": """
        import multiprocessing
        import os
        import signal
        import subprocess
        import sys
        import threading
        from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu")


        class Service:
            \"""A service that starts threads, pools and a daemon when they are first needed.\"""

            def __init__(self):
                self.calls = 0
                self.stopping = threading.Event()
                self.thread = self.pool = self.daemon = None
                self.requests = ThreadPoolExecutor(1)

            def call(self):
                self.calls += 1
                if self.thread is None:
                    self.thread = threading.Thread(target=self.stopping.wait)
                    self.thread.start()
                    self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
                    self.daemon = int(self.requests.submit(start_daemon).result())
                assert self.thread.is_alive()
                os.kill(self.daemon, 0)
                return self.pool.submit(os.getpid).result()

            def stop(self):
                self.stopping.set()
                self.thread.join()
                self.pool.shutdown()
                self.requests.shutdown()
                os.kill(self.daemon, signal.SIGKILL)


        def start_daemon():
            code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid)"
            return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout


        @pytest.fixture(scope="module")
        def service():
            made = Service()
            yield made
            made.stop()


        WORKERS = []


        @pytest.mark.parametrize("number", range(2))
        def test_service(service, number, rank):
            WORKERS.append(service.call())
            assert (service.calls, len(set(WORKERS))) == (number + 1, 1)
    """,
    "test_globals.py": """
        import subprocess
        import sys
        import threading

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu")
        KEPT = {}


        def teardown_module():
            if KEPT:
                KEPT["stop"].set()
                KEPT["thread"].join()
                KEPT["child"].communicate()


        @pytest.mark.parametrize("number", range(2))
        def test_global(number, rank):
            if not KEPT:
                assert number == 0
                KEPT["stop"] = threading.Event()
                KEPT["thread"] = threading.Thread(target=KEPT["stop"].wait)
                KEPT["thread"].start()
                KEPT["child"] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            assert KEPT["thread"].is_alive()
            assert KEPT["child"].poll() is None
    """,
}


def test_ranks_have_random_states_of_their_own_and_what_a_suite_keeps_stays_alive(suite: Suite) -> None:
    for name, text in (_SUITE | _RANDOM_STATES).items():
        suite.write(name, text)

    run = suite.run("-W", "default::pytest_accel.LeftoverWarning", "--accel-timeout", "60")

    assert run.count() == {"PASSED": 18}, run.text
    # A thing that a global keeps is reported once, and one that a fixture keeps is not.
    lines = [line for line in run.text.splitlines() if "LeftoverWarning: " in line]
    assert len([line for line in lines if "process group" in line]) == 1
    assert len([line for line in lines if "the thread" in line]) == 1
    assert all("input()" in line for line in lines if "left process" in line), lines
