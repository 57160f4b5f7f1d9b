"""Tests of ``accel_retry_dead``: a test is retried if its world died for a reason outside of the test."""

from __future__ import annotations

import contextlib
import re
import uuid
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.run import CAUSES

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite
    from tests.run import Run

_HEADLINE = "accel: retried, since the world died (accel_retry_dead)"
_HAS_SUBTESTS = hasattr(pytest, "Subtests")
_TESTS = """
    import os
    import signal
    from pathlib import Path

    import psutil
    import pytest

    pytestmark = pytest.mark.distributed(2)
    needs_subtests = pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="needs pytest's subtests")


    def first_time(name):
        try:
            Path(__file__).with_name(name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


    def lose_the_server(rank, name):
        import torch.distributed as dist

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
    def lost_in_teardown(rank, request):
        yield
        lose_the_server(rank, request.node.name)


    def test_setup(lost_in_setup):
        pass


    def test_call(rank):
        import torch
        import torch.distributed as dist

        lose_the_server(rank, "call")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2


    def test_teardown(lost_in_teardown):
        pass


    def test_skips_before_the_teardown(lost_in_teardown):
        pytest.skip("not now")


    @needs_subtests
    def test_subtests_in_call(subtests, rank):
        with subtests.test("fails once"):
            assert not first_time(f"rank-{rank}")
        lose_the_server(rank, "subtests")


    @needs_subtests
    def test_subtests_before_teardown(subtests, lost_in_teardown):
        with subtests.test("passes"):
            pass


    def test_fails_the_second_time(rank):
        lose_the_server(rank, "fails")
        assert rank == 0


    def test_each_time(rank):
        import torch.distributed as dist

        dist.barrier()
        if rank == 0:
            end_the_server()
        dist.barrier()


    def test_own_fault(rank):
        import torch.distributed as dist

        assert rank == 0 or first_time("own-fault"), "was retried"
        if rank == 1:
            os._exit(0)
        dist.barrier()
"""


def test_a_test_is_retried_if_the_fork_server_dies(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    phases = {"test_setup": " in the setup phase", "test_call": "", "test_teardown": " in the teardown phase"}
    run = suite.run("-o", "accel_retry_dead=on", "-k", " or ".join(phases), "--junitxml=report.xml")
    run.expect(dict.fromkeys(phases, "PASSED"))
    lost = "ranks 0-1 ended with the fork server, which is gone"
    reasons = {test: f"{lost}{phase} (the fork server was lost)" for test, phase in phases.items()}
    assert _retried_tests(run) == reasons
    cases = xml.etree.ElementTree.parse(suite.path / "report.xml").findall(".//testcase")
    recorded = {
        case.get("name"): [found.get("value") for found in case.findall(".//property[@name='accel_retried']")]
        for case in cases
    }
    assert recorded == {test: [reason] for test, reason in reasons.items()}


@pytest.mark.long
def test_the_result_of_the_retry_counts(suite: BackgroundSuite) -> None:
    """Each subtest of a retried test is reported once. A test that was skipped before its teardown is not retried."""
    suite.write("test_it.py", _TESTS)
    run = suite.run("-o", "accel_retry_dead=on", CAUSES, "-k", "not test_setup and not test_call and not test_teardown")
    subtests = {"test_subtests_in_call": "SUBPASSED PASSED", "test_subtests_before_teardown": "SUBPASSED PASSED"}
    run.expect(
        {
            "test_skips_before_the_teardown": "SKIPPED ERROR died: server ended; ranks 0-1",
            "test_fails_the_second_time": "FAILED failed: AssertionError; rank 1",
            "test_each_time": "FAILED died: server ended; ranks 0-1",
            "test_own_fault": "FAILED died: status 0; rank 1",
            **(subtests if _HAS_SUBTESTS else dict.fromkeys(subtests, "SKIPPED")),
        }
    )
    expected = {"test_fails_the_second_time", "test_each_time", *(subtests if _HAS_SUBTESTS else ())}
    assert set(_retried_tests(run)) == expected


def _retried_tests(run: Run) -> dict[str, str]:
    """Return the tests that the summary lists as retried, with the reason of each."""
    return dict(re.findall(r"^test_it\.py::(\w+): (.*)$", run.text.partition(_HEADLINE)[2], re.MULTILINE))


@pytest.mark.long
def test_without_the_option_the_death_is_reported_and_not_retried(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run(CAUSES, "-k", "test_call or test_own_fault")
    run.expect({"test_call": "FAILED died: server ended; ranks 0-1", "test_own_fault": "FAILED died: status 0; rank 1"})
    assert _HEADLINE not in run.text


@pytest.fixture
def limited_memory() -> Iterator[Path]:
    """Provide a control group that is limited to 1.5 GB: the kernel kills processes that exceed this together."""
    roots = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for root, limit in roots.items():
        group = root / f"accel-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(1_500_000_000))
                with contextlib.suppress(OSError):  # Not every machine has this file, and not every one needs it.
                    (group / "memory.swap.max").write_text("0")
                yield group
            finally:
                group.rmdir()
            return
    pytest.skip("cannot create a control group: not root, or no memory controller")


@pytest.mark.long
def test_an_out_of_memory_kill_is_reported_and_retried(suite: BackgroundSuite, limited_memory: Path) -> None:
    suite.write(
        "test_it.py",
        """
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2)
        def test_wants_too_much(rank):
            import torch
            import torch.distributed as dist

            if rank == 1:
                with Path(__file__).with_name("times").open("a") as times:
                    times.write("x")
                if len(Path(__file__).with_name("times").read_text()) == 1:
                    kept = [torch.ones(1 << 26) for _ in range(20)]
            dist.barrier()
        """,
    )
    suite.control_group = limited_memory
    run = suite.run("-o", "accel_retry_dead=on")
    run.expect({"test_wants_too_much": "PASSED"})
    assert "(a rank was killed: out of memory)" in _retried_tests(run)["test_wants_too_much"]
    assert (suite.path / "times").read_text() == "xx"
