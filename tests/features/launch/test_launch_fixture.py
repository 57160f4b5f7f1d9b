"""Tests of the `launch` fixture in sessions: marked and unmarked tests, leases, output, and killed processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.deadline import eventually, scaled
from tests.features.conftest import Suite

TRAINER = """
import json, os
print(json.dumps(dict(os.environ)), flush=True)
"""
WAITS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[-1], f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.long
def test_one_process_for_each_leased_device(suite: Suite) -> None:
    suite.write("trainer.py", TRAINER)
    suite.write(
        "test_it.py",
        """
        import json
        import os

        import pytest

        @pytest.mark.devices(2)
        def test_lease(launch, accel):
            result = launch("trainer.py", launcher="torchrun")
            ranks = {rank: json.loads(text) for rank, text in result.rank_stdout.items()}
            assert sorted(ranks) == [0, 1]
            for rank, environment in ranks.items():
                assert environment["SIM_VISIBLE_DEVICES"] == ",".join(accel.ids)
                assert environment["CUDA_VISIBLE_DEVICES"] == ""
                assert environment["RANK"] == str(rank)

        @pytest.mark.devices(2)
        def test_variables(launch, monkeypatch):
            monkeypatch.setenv("FROM_THE_TEST", "1")
            monkeypatch.setenv("TAKEN_AWAY", "1")
            given = {"MINE": "2", "TAKEN_AWAY": None, "OMP_NUM_THREADS": "7"}
            told = json.loads(launch("trainer.py", launcher="python", env=given).stdout)
            assert (told["MINE"], told["FROM_THE_TEST"], told["OMP_NUM_THREADS"]) == ("2", "1", "7")
            assert "TAKEN_AWAY" not in told and "SIM_VISIBLE_DEVICES" in told
            with pytest.raises(ValueError, match="the lease sets the mask"):
                launch("trainer.py", launcher="python", env={"SIM_VISIBLE_DEVICES": "sim-3"})

        @pytest.mark.distributed(1)
        def test_one_rank(launch, rank):
            assert "RANK" in os.environ and "MASTER_PORT" in os.environ
            told = json.loads(launch("trainer.py", launcher="python").stdout)
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & told.keys()
            assert not [name for name in told if name.startswith("TORCHELASTIC_")]

        def test_unmarked(launch):
            told = json.loads(launch("trainer.py", launcher="python").stdout)
            hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ZE_AFFINITY_MASK": "-1"}
            assert hidden.items() <= told.items()
            assert not [name for name in told if "XDIST" in name or name == "PYTEST_CURRENT_TEST"]

        @pytest.mark.distributed(2)
        def test_two_ranks(launch):
            raise AssertionError("never run")
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 4, "ERROR": 1}
    assert "starts ranks itself, and @pytest.mark.distributed(2) would have 2 copies of the scr" in run.text


@pytest.mark.long
def test_scripts_on_cpu_slots_run_on_the_slots_cores(suite: Suite) -> None:
    suite.write("cores.py", "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])")
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.devices(1, kind="cpu")
        def test_slot(launch, accel):
            (device,) = accel.devices
            told = launch("cores.py", launcher="python").stdout
            assert told == f"{sorted(device.cores)} {len(device.cores)}\\n"

        @pytest.mark.devices(1, kind="cpu")
        def test_threads_of_the_test(launch, accel, monkeypatch):
            monkeypatch.setenv("OMP_NUM_THREADS", "77")
            assert launch("cores.py", launcher="python").stdout.split()[-1] == "77"
            monkeypatch.delenv("OMP_NUM_THREADS")
            assert launch("cores.py", launcher="python").stdout.split()[-1] == str(len(accel.devices[0].cores))

        @pytest.mark.distributed(1, kind="cpu", env={"OMP_NUM_THREADS": "78"})
        def test_threads_of_the_mark(launch):
            assert launch("cores.py", launcher="python").stdout.split()[-1] == "78"
        """,
    )
    assert suite.run("--accel", "cpu:2").count() == {"PASSED": 3}


@pytest.mark.long
def test_a_launcher_that_is_not_there(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(suite.path))
    suite.write("trainer.py", TRAINER)
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.parametrize("launcher", ["srun", "python"])
        def test_parameter(launch, launcher):
            launch("trainer.py", launcher=launcher)

        @pytest.mark.devices(1)
        @pytest.mark.parametrize("launcher", ["mpirun"])
        def test_in_a_rank(launch, launcher):
            launch("trainer.py", launcher=launcher)

        def test_argument(launch):
            launch("trainer.py", launcher="srun")

        @pytest.mark.distributed(2, launcher="mpirun", kind="cpu")
        def test_mark():
            pass
        """,
    )
    run = suite.run("--accel", "sim:1", "-rs")
    assert run.count() == {"PASSED": 1, "SKIPPED": 4}
    skipped = re.findall(r"^SKIPPED \[\d\] test_it.py:\d+: launcher '(\w+)': there is no (\w+) beside", run.text, re.M)
    assert Counter(skipped) == {("srun", "srun"): 2, ("mpirun", "mpirun"): 2}
    assert suite.run("--accel", "sim:1", "--accel-strict").count() == {"PASSED": 1, "FAILED": 3, "ERROR": 1}


def read_pid(file: Path) -> int:
    """Return the process id in `file`; 0 if it is not there yet."""
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("mark", "number"),
    [("@pytest.mark.devices(2)", signal.SIGKILL), ("", signal.SIGINT)],
    ids=["kill-marked", "interrupt"],
)
def test_a_test_process_that_ends_leaves_no_launched_process(suite: Suite, mark: str, number: signal.Signals) -> None:
    suite.write("trainer.py", WAITS)
    path = suite.write(
        "test_it.py",
        f"import os\nimport pathlib\nimport pytest\n\n{mark}\ndef test_it(launch):\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / 'tester').write_text(str(os.getpid()))\n"
        "    launch('trainer.py', here, nproc=2)\n",
    )
    command = [sys.executable, "-m", "pytest", "-p", "accel", "--accel", "sim:2", str(path)]
    with subprocess.Popen(command, cwd=suite.path, stdout=subprocess.PIPE, text=True) as process:
        files = [suite.path / name for name in ("tester", "rank-0", "rank-1")]
        tester, *trainers = [psutil.Process(eventually(str(file), partial(read_pid, file))) for file in files]
        tester.send_signal(number)
        _, alive = psutil.wait_procs(trainers, timeout=scaled(60))
        assert alive == []
        assert process.stdout is not None
        output = process.stdout.read()
    assert ("SIGKILL" in output) == bool(mark)
    assert ("KeyboardInterrupt" in output) == (number == signal.SIGINT)
