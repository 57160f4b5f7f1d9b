"""Tests of failures of ranks outside of tests, and of `pytest.exit` in a rank."""

from __future__ import annotations

import itertools
import re

import pytest

from pytest_accel.core.truncation import ranks_text
from tests.background_suite import BackgroundSuite
from tests.deadline import scaled
from tests.run import CAUSES

FAULTS = {
    "fails": ("raise ValueError('by hand')", "unstarted"),
    "sys_exit_0": ("sys.exit(0)", "unstarted"),
    "skips": ("pytest.skip('by hand', allow_module_level=True)", "disagreed: skip"),
    "exit_0": ("os._exit(0)", "died: status 0"),
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", "died: SIGKILL"),
}
"""Code, and the cause of the failure."""
IMPORT = """
import os
import signal
import sys

import pytest

if int(os.environ.get("RANK", "-1")) in {WHO}:
    {CODE}
"""
TEST = """
import pytest

pytestmark = [pytest.mark.distributed(2, init=False), *{MARKS}]

def test_{SITE}_{WAY}():
    assert not "reached"
"""


@pytest.mark.long(except_for="one")
@pytest.mark.parametrize("ranks", [pytest.param({1}, id="one"), pytest.param({0, 1}, id="all")])
def test_a_failing_import_in_ranks_is_an_error_of_the_test(suite: BackgroundSuite, ranks: set[int]) -> None:
    suite.without_torch()
    cases = list(itertools.product(("module", "conftest"), FAULTS))
    for site, fault in cases:
        failing_import = IMPORT.replace("{WHO}", repr(ranks)).replace("{CODE}", FAULTS[fault][0])
        # A failure that is expected of the test does not cover one before it.
        marks = "[]" if fault == "skips" else "[pytest.mark.xfail]"
        test = TEST.replace("{SITE}", site).replace("{WAY}", fault).replace("{MARKS}", marks)
        folder = f"{site}_{fault}"
        suite.write(f"{folder}/conftest.py", failing_import if site == "conftest" else "")
        suite.write(f"{folder}/test_{folder}.py", failing_import + test if site == "module" else test)
    suite.write("test_z_last.py", TEST.replace("{SITE}_{WAY}", "last").replace("{MARKS}", "[pytest.mark.xfail]"))
    run = suite.run("--accel", "none", CAUSES)
    who = ranks_text([*ranks])
    causes = {fault: cause if fault == "skips" else f"{cause}; {who}" for fault, (_, cause) in FAULTS.items()}
    verdicts = {fault: f"ERROR {cause}" for fault, cause in causes.items()}
    if len(ranks) == 2:
        verdicts["skips"] = "SKIPPED"
    run.expect(
        {"test_last": "XFAIL failed: AssertionError; ranks 0-1"}
        | {f"test_{site}_{fault}": verdicts[fault] for site, fault in cases}
    )
    assert not any(f"pytest_accel/{package}" in run.text for package in ("driver", "verdict"))


@pytest.mark.long
def test_failures_at_the_exit_of_a_rank_are_reported(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_it.py",
        """
        import atexit
        import logging.handlers
        import os
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context, util

        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)
        HERE = os.path.dirname(__file__)
        KEPT = []


        def leave(name):
            with open(os.path.join(HERE, name), "a") as file:
                file.write("was here\\n")


        @pytest.fixture(scope="session")
        def executor():
            KEPT.append(ProcessPoolExecutor(1, get_context("spawn")))
            KEPT[0].submit(os.getpid).result()


        def test_registers(rank):
            atexit.register(leave, f"rank{rank}")


        def test_multiprocessing(rank, executor):
            util.Finalize(None, leave, (f"finalized{rank}",), exitpriority=-1)
            leave(os.path.join(util.get_temp_dir(), "inside"))


        def test_logs(rank):
            file = logging.FileHandler(os.path.join(HERE, f"logged{rank}"))
            logging.getLogger("kept").addHandler(logging.handlers.MemoryHandler(10, target=file))
            logging.getLogger("kept").warning("was here")


        def test_last():
            pass
        """,
    )
    run = suite.run("--accel", "none")
    run.expect(dict.fromkeys(("test_registers", "test_multiprocessing", "test_logs", "test_last"), "PASSED"))
    assert run.ret == 0, run.text
    suite.expect_nothing_left()
    for rank, prefix in itertools.product(range(2), ("rank", "finalized", "logged")):
        assert (suite.path / f"{prefix}{rank}").read_text() == "was here\n"
    assert list(suite.temporary.glob("pymp-*")) == []


@pytest.mark.parametrize(
    ("code", "ranks", "status", "text"),
    [
        ("pytest.exit('by hand', returncode=7)", "01", 7, "by hand"),
        ("raise KeyboardInterrupt", "1", 2, "KeyboardInterrupt"),
        ("request.addfinalizer(lambda: pytest.exit('late', returncode=7))", "1", 7, "late"),
    ],
    ids=["exit", "interrupt", "exit in teardown"],
)
def test_the_end_that_a_rank_requests_names_its_reason_test_rank_and_line(
    suite: BackgroundSuite, code: str, ranks: str, status: int, text: str
) -> None:
    suite.without_torch()
    suite.write(
        "test_it.py",
        f"""
        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)

        def test_first(): pass

        def test_ends(rank, request):
            if str(rank) in {ranks!r}:
                {code}

        def test_never(): pass
        """,
    )
    run = suite.run("--accel", "none")
    assert run.outcomes().get("test_first") == "PASSED"
    assert "test_never" not in run.outcomes()
    assert (run.outcomes().get("test_ends") == "PASSED") is (text == "late")
    assert run.ret == status, run.text
    assert re.search(rf"{text} \(test_it.py::test_ends, rank [{ranks}] at test_it.py:10\)", run.text), run.text


_FAILING_RESOURCE = """
    import os
    from pathlib import Path

    import pytest

    @pytest.fixture(scope="module", autouse=True)
    def resource(request):
        yield
        Path(f"{request.path.stem}-{os.environ['RANK']}").touch()
        raise RuntimeError("not given back")
"""
_REPLACES_ITS_WORLD = {
    "destroys": "dist.destroy_process_group()",
    "fails": "pytest.raises(RuntimeError, dist.irecv(torch.ones(1), 1 - rank).wait, timedelta(milliseconds=50))",
    "groups": "rank or dist.new_group([0], use_local_synchronization=True)",
    "dies": "os.kill(os.getpid(), 9) if rank else None",
}
_REPLACING_TEST = """
    import os
    from datetime import timedelta

    import pytest
    from tests.lazy_torch import dist, torch

    @pytest.mark.distributed(2)
    def test_{name}(rank):
        {code}

    @pytest.mark.distributed(2)
    def test_after_{name}(rank):
        pass
"""


_HANGING = """
    import os
    import time
    from pathlib import Path

    import pytest
    from tests.inner import hang_here
    from tests.lazy_torch import dist, torch

    @pytest.fixture(scope="module")
    def account():
        yield
        Path(f"closed-{os.environ['RANK']}").touch()

    @pytest.fixture
    def folder():
        yield
        Path(f"removed-{os.environ['RANK']}").touch()

    @pytest.mark.distributed(2)
    def test_hangs(account, folder, rank):
        hang_here()
        if rank == 0:
            time.sleep(1000)
        dist.barrier()

    @pytest.mark.distributed(2, timeout=6)
    def test_hangs_in_c(account, rank):
        dist.recv(torch.ones(1), 1 - rank)
"""


_IMPORTING = """
    import os
    from pathlib import Path

    import pytest

    assert "RANK" not in os.environ or __name__ == "test_a"

    @pytest.fixture(scope="session")
    def folder():
        yield
        Path(f"cleaned-{{os.environ['RANK']}}").touch()

    @pytest.mark.distributed(2)
    def test_in_{name}(folder): ...
"""


def test_fixtures_are_torn_down_before_a_world_is_replaced(suite: BackgroundSuite) -> None:
    """The world that runs the second test of each file is a new one. Without the teardown, an error would be lost."""
    suite.write("replacing/conftest.py", _FAILING_RESOURCE)
    for name, code in _REPLACES_ITS_WORLD.items():
        suite.write(f"replacing/test_{name}.py", _REPLACING_TEST.format(name=name, code=code))
    suite.write("test_hanging.py", _HANGING)
    for name in ("a", "b"):
        suite.write(f"importing/test_{name}.py", _IMPORTING.format(name=name))
    # A busy rank has longer to react to the timeout.
    suite.write("conftest.py", f"from pytest_accel.driver import rank_monitor\nrank_monitor._REACTION = {scaled(2)}\n")
    run = suite.run("-p", "no:randomly", "-p", "tests.late_driver")
    outcomes = {f"test_{name}": "PASSED ERROR" for name in _REPLACES_ITS_WORLD} | {"test_dies": "FAILED ERROR"}
    outcomes |= {"test_hangs": "FAILED", "test_hangs_in_c": "FAILED", "test_in_a": "PASSED", "test_in_b": "ERROR"}
    run.expect(outcomes | {f"test_after_{name}": "PASSED ERROR" for name in _REPLACES_ITS_WORLD})
    text = "ranks 0-1: RuntimeError: not given back (fixtures were torn down after this test, since its processes are"
    assert run.failure("test_destroys").startswith(text)
    torn_down = {path.name for path in suite.path.glob("test_*-*")}
    assert torn_down == {f"test_{name}-{rank}" for name in _REPLACES_ITS_WORLD for rank in range(2)}
    _, title, rest = run.text.partition("accel: fixtures that were not torn down, since their ranks had died or hung")
    assert title, run.text
    assert rest.splitlines()[1:3] == [
        "replacing/test_dies.py::test_dies: resource (rank 1)",
        "test_hanging.py::test_hangs_in_c: account (ranks 0-1)",
    ]
    assert "test_hanging.py::test_hangs: account" not in rest
    # When rank 0 has ended, the barrier of rank 1 fails.
    hanging = sorted(path.name for path in suite.path.glob("*d-?"))
    assert hanging == ["cleaned-0", "cleaned-1", "closed-0", "closed-1", "removed-0", "removed-1"]
    assert "outside of any test" not in run.text
