"""Suites without a mark of the plugin, in the styles of public projects, and a plugin that records their outcomes.

All are in one folder, each in a folder of its own, so that one session runs them all. Tests that call collectives do so
in the same order in each launched process.
"""

from __future__ import annotations

RECORDER = '''
"""Writes, in each process that a launcher has started, what its session has seen, and waits for the other processes.

A launcher kills the others as soon as one process has failed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

RANK, SIZE = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
rank, size = (next((os.environ[name] for name in names if name in os.environ), None) for names in (RANK, SIZE))
folder = Path(os.environ["OUTCOMES"])
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM)
PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "MASTER_", "PYTEST_ACCEL")


def variables():
    names = [name for name in os.environ if name.startswith(PREFIXES) or "RANK" in name or "WORLD" in name]
    return {name: os.environ[name] for name in names}


before = variables()


class Recorder:
    def __init__(self):
        self.reports = []

    def pytest_runtest_logreport(self, report):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        self.reports.append([report.nodeid, report.when, report.outcome, reason])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        result = yield
        seen = {
            "reports": sorted(self.reports),
            "status": int(session.exitstatus),
            "unchanged": variables() == before,
            "signals": [getattr(signal.getsignal(one), "__name__", "default") for one in SIGNALS],
            "variables": sorted(before),
            "arguments": sys.argv[1:],
        }
        path = folder / f"{rank or 0}.json"
        path.with_suffix(".part").write_text(json.dumps(seen))
        path.with_suffix(".part").rename(path)
        deadline = time.monotonic() + 300
        while len(list(folder.glob("*.json"))) < int(size or 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        return result


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
'''
"""The module `recorder`, which a session loads with ``-p recorder``."""

_AUTOUSE = {
    "conftest.py": """
        import os

        import pytest
        import torch.distributed as dist


        @pytest.fixture(scope="package", autouse=True)
        def process_group_of_the_suite():
            if "RANK" not in os.environ:
                yield
                return
            dist.init_process_group("gloo")
            yield
            dist.destroy_process_group()
    """,
    "__init__.py": "",
    "test_autouse.py": """
        import os

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.skipif("RANK" not in os.environ, reason="needs torchrun")


        def test_all_reduce():
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2


        def test_fails_on_rank_1():
            assert dist.get_rank() == 0
    """,
}
_OWN_MARK = {
    "conftest.py": """
        import os

        import pytest


        def pytest_configure(config):
            config.addinivalue_line("markers", "distributed(world_size): needs this number of processes")


        def pytest_runtest_setup(item):
            mark = item.get_closest_marker("distributed")
            if mark is not None and int(os.environ.get("WORLD_SIZE", "1")) < mark.args[0]:
                pytest.skip(f"needs {mark.args[0]} processes")
    """,
    "test_own_mark.py": """
        import os

        import pytest


        @pytest.mark.distributed(2)
        def test_two():
            assert int(os.environ["WORLD_SIZE"]) == 2


        @pytest.mark.distributed(2)
        def test_two_on_rank_0():
            assert os.environ["RANK"] == "0"


        @pytest.mark.distributed(4)
        def test_four():
            pass
    """,
}
_PYTEST_MPI = {
    "conftest.py": """
        import os

        import pytest

        SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


        def pytest_addoption(parser):
            parser.addoption("--with-mpi", action="store_true", default=False)


        def pytest_configure(config):
            config.addinivalue_line("markers", "mpi(min_size): runs under MPI")
            config.addinivalue_line("markers", "mpi_skip: does not run under MPI")


        def pytest_collection_modifyitems(config, items):
            size = next((int(os.environ[name]) for name in SIZES if name in os.environ), 1)
            for item in items:
                mark = item.get_closest_marker("mpi")
                if mark is not None and size < mark.kwargs.get("min_size", 1):
                    item.add_marker(pytest.mark.skip(reason=f"needs MPI with {mark.kwargs['min_size']} processes"))
                if size > 1 and item.get_closest_marker("mpi_skip") is not None:
                    item.add_marker(pytest.mark.skip(reason="is not for MPI"))
    """,
    "test_pytest_mpi.py": """
        import os

        import pytest


        @pytest.mark.mpi(min_size=2)
        def test_size():
            assert "2" in (os.environ.get("OMPI_COMM_WORLD_SIZE"), os.environ.get("PMI_SIZE"))


        @pytest.mark.mpi(min_size=2)
        def test_rank_1_has_a_bug():
            assert "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK"))


        @pytest.mark.mpi_skip
        def test_serial():
            pass
    """,
}
_OPTIONS = {
    "conftest.py": """
        import os

        import pytest


        def pytest_addoption(parser):
            parser.addoption("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
            parser.addoption("--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))


        @pytest.fixture
        def world_size(request):
            return request.config.getoption("--world-size")


        @pytest.fixture
        def rank(request):
            return request.config.getoption("--local-rank")
    """,
    "test_options.py": """
        import os


        def test_world_size(world_size):
            assert world_size == int(os.environ.get("WORLD_SIZE", "1"))


        def test_local_rank(rank):
            assert rank == 7


        def test_rank_1_has_a_bug():
            assert os.environ.get("LOCAL_RANK") in (None, "0")
    """,
}
SUITES = {
    "autouse": _AUTOUSE,
    "options": _OPTIONS,
    "own_mark": _OWN_MARK,
    "pytest_mpi_": _PYTEST_MPI,
}
"""The files of each suite, by the name of its folder."""
