"""--accel-retry-dead: a test whose world went down for a reason outside of it is retried, and the summary says so."""

from __future__ import annotations

import contextlib
import re
import uuid
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, Suite

_HEADLINE = "accel: retried, since the world died (--accel-retry-dead)"
_GONE = "ended with the fork server, which is gone"
_LOSES_THE_SERVER = """
    import os
    import signal
    from pathlib import Path

    import psutil
    import pytest
    import torch
    import torch.distributed as dist

    pytestmark = pytest.mark.distributed(2)


    def first_time(name):
        try:
            Path(__file__).with_name(name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


    def lose_the_server(rank, name):
        dist.barrier()  # else the other rank may be a phase behind, and that is what would be told
        if rank == 0 and first_time(name):
            end_the_server()
        dist.barrier()


    def end_the_server():
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()


    @pytest.fixture
    def lost_in_setup(rank):
        lose_the_server(rank, "setup")


    @pytest.fixture
    def lost_in_teardown(rank):
        yield
        lose_the_server(rank, "teardown")


    def test_setup(lost_in_setup):
        pass


    def test_call(rank):
        lose_the_server(rank, "call")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2


    def test_teardown(lost_in_teardown):
        pass


    def test_fails_the_second_time(rank):
        lose_the_server(rank, "fails")
        assert rank == 0


    def test_each_time(rank):
        dist.barrier()
        if rank == 0:
            end_the_server()
        dist.barrier()


    def test_own_fault(rank):
        assert rank == 0 or first_time("own-fault"), "was retried"
        if rank == 1:
            os._exit(0)
        dist.barrier()
"""


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("setup", marks=pytest.mark.nightly),
        "call",
        pytest.param("teardown", marks=pytest.mark.nightly),
    ],
)
def test_a_test_is_retried_if_the_fork_server_dies(suite: Suite, phase: str) -> None:
    suite.write("test_it.py", _LOSES_THE_SERVER)
    run = suite.run("--accel-retry-dead", "-k", f"test_{phase}", "--junitxml=report.xml")
    run.expect({f"test_{phase}": "PASSED"})
    when = "" if phase == "call" else f" in the {phase} phase"
    why = f"ranks 0-1 {_GONE}{when} (the fork server was lost)"
    assert _listed(run) == {f"test_{phase}": why}
    properties = xml.etree.ElementTree.parse(suite.path / "report.xml").findall(".//property[@name='accel_retried']")
    assert [found.attrib["value"] for found in properties] == [why]


@pytest.mark.nightly
@pytest.mark.parametrize("test", ["test_fails_the_second_time", "test_each_time", "test_own_fault"])
def test_the_result_of_the_retry_counts(suite: Suite, test: str) -> None:
    suite.write("test_it.py", _LOSES_THE_SERVER)
    run = suite.run("--accel-retry-dead", "-k", test)
    run.expect({test: "FAILED"})
    said = {
        "test_fails_the_second_time": "AssertionError",
        "test_each_time": f"ranks 0-1 {_GONE}",
        "test_own_fault": "rank 1 exited with status 0",
    }
    assert said[test] in run.failure(test)
    assert set(_listed(run)) == {test} - {"test_own_fault"}


def _listed(run: Run) -> dict[str, str]:
    """The tests that the summary says were retried, and why."""
    return dict(re.findall(r"^test_it\.py::(\w+): (.*)$", run.text.partition(_HEADLINE)[2], re.MULTILINE))


@pytest.mark.nightly
def test_without_the_option_the_death_is_reported_and_not_retried(suite: Suite) -> None:
    suite.write("test_it.py", _LOSES_THE_SERVER)
    run = suite.run("-k", "test_call or test_own_fault")
    run.expect({"test_call": "FAILED", "test_own_fault": "FAILED"})
    assert _GONE in run.failure("test_call")
    assert _HEADLINE not in run.text


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group of which processes are killed when they use more than 1.5 GB together."""
    roots = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for root, limit in roots.items():
        group = root / f"accel-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(1_500_000_000))
                with contextlib.suppress(OSError):  # Not on every machine, nor needed there.
                    (group / "memory.swap.max").write_text("0")
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip("no control group can be made here: not root, or no memory controller")


@pytest.mark.long
def test_an_out_of_memory_kill_is_reported_and_retried(suite: Suite, little_memory: Path) -> None:
    suite.write(
        "test_it.py",
        """
        from pathlib import Path

        import pytest
        import torch
        import torch.distributed as dist


        @pytest.mark.distributed(2)
        def test_wants_too_much(rank):
            if rank == 1:
                with Path(__file__).with_name("times").open("a") as times:
                    times.write("x")
                if len(Path(__file__).with_name("times").read_text()) == 1:
                    kept = [torch.ones(1 << 26) for _ in range(20)]
            dist.barrier()
        """,
    )
    suite.control_group = little_memory
    run = suite.run("--accel-retry-dead")
    run.expect({"test_wants_too_much": "PASSED"})
    assert (
        "test_it.py::test_wants_too_much: rank 1 was killed by SIGKILL: out of memory (the "
        "oom_kill counter of the control group went up) (a rank was killed: out of memory)"
    ) in run.text
    assert (suite.path / "times").read_text() == "xx"
