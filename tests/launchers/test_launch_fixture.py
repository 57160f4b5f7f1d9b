"""Tests of the `launch` fixture in sessions: marked and unmarked tests, leases, output, and killed processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.deadline import Deadline, scaled

_TIMEOUT = 60.0
"""Seconds after which a session counts as hung."""
TRAINER = """
import json, os
print(json.dumps(dict(os.environ)), flush=True)
"""
WAITS = """
import os, pathlib, sys, time
pathlib.Path(f"{sys.argv[-1]}-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Provide a function that runs a pytest session with no other plugin than this one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.path.joinpath("trainer.py").write_text(TRAINER)

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "accel", "-v", "-rs", *arguments, timeout=scaled(_TIMEOUT))

    return run


@pytest.mark.long
def test_a_marked_test_launches_on_its_lease_or_is_skipped_without_the_launcher(
    session: Callable[..., pytest.RunResult], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(pytester.path))
    pytester.makepyfile(
        """
        import json
        import os

        import pytest

        @pytest.mark.devices(2)
        def test_lease(launch, accel):
            result = launch("trainer.py", launcher="torchrun", output=True)
            ranks = {rank: json.loads(text) for rank, text in result.rank_stdout.items()}
            assert sorted(ranks) == [0, 1]
            for rank, environment in ranks.items():
                assert environment["SIM_VISIBLE_DEVICES"] == ",".join(accel.ids)
                assert environment["CUDA_VISIBLE_DEVICES"] == ""
                assert environment["RANK"] == str(rank)

        @pytest.mark.devices(2)
        def test_python(launch):
            assert "SIM_VISIBLE_DEVICES" in json.loads(launch("trainer.py", launcher="python").stdout)
            with pytest.raises(ValueError, match="the lease sets the mask"):
                launch("trainer.py", launcher="python", env={"SIM_VISIBLE_DEVICES": "sim-3"})

        @pytest.mark.devices(1)
        def test_variables(launch, monkeypatch):
            monkeypatch.setenv("FROM_THE_TEST", "1")
            monkeypatch.setenv("TAKEN_AWAY", "1")
            given = {"MINE": "2", "TAKEN_AWAY": None, "OMP_NUM_THREADS": "7"}
            told = json.loads(launch("trainer.py", launcher="python", env=given).stdout)
            assert (told["MINE"], told["FROM_THE_TEST"], told["OMP_NUM_THREADS"]) == ("2", "1", "7")
            assert "TAKEN_AWAY" not in told

        @pytest.mark.distributed(1)
        def test_one_rank(launch, rank):
            assert "RANK" in os.environ and "MASTER_PORT" in os.environ
            told = json.loads(launch("trainer.py", launcher="python").stdout)
            assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & told.keys()
            assert not [name for name in told if name.startswith("TORCHELASTIC_")]

        @pytest.mark.distributed(2)
        def test_two_ranks(launch):
            raise AssertionError("never run")

        @pytest.fixture
        def after(launch):
            raise AssertionError("never asked for")

        @pytest.mark.devices(1)
        @pytest.mark.parametrize("launcher", ["mpirun"])
        def test_absent(launch, after, launcher):
            pass
        """
    )
    result = session("--accel", "sim:4")
    result.assert_outcomes(passed=4, skipped=1, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "*starts ranks itself, and @pytest.mark.distributed(2) would have 2 copies of the scr*",
            "SKIPPED * launcher 'mpirun': there is no mpirun or mpiexec beside Python or on PATH",
        ]
    )


@pytest.mark.long
def test_an_absent_launcher_skips_the_test_and_fails_it_if_skips_are_errors(
    session: Callable[..., pytest.RunResult], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(pytester.path))
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("launcher", ["srun", "python"])
        def test_parameter(launch, launcher):
            launch("trainer.py", launcher=launcher)

        def test_argument(launch):
            launch("trainer.py", launcher="srun")
        """
    )
    result = session()
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED * test_*.py:*: launcher 'srun': there is no srun beside Python or on PATH"])
    session("--accel-strict").assert_outcomes(passed=1, failed=1, errors=1)


@pytest.mark.long
def test_output_is_shown_while_the_script_runs_on_the_cores_of_its_slot(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script waits for a file that this test makes when it has seen the first line."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.path.joinpath("trainer.py").write_text(
        "import os, pathlib, sys, time\n"
        "print('the first line', sys.argv[1], flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.01)\n"
        "print('the last line', sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    )
    path = pytester.makepyfile(
        """
        import pytest

        def test_in_this_process(launch):
            launch("trainer.py", "go-1", launcher="python")

        @pytest.mark.devices(1, kind="cpu")
        def test_in_a_rank(launch, accel):
            (device,) = accel.devices
            told = launch("trainer.py", "go-2", launcher="python").stdout.splitlines()[-1]
            assert told == f"the last line {sorted(device.cores)} {len(device.cores)}"
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "accel", "-s", "--accel", "cpu:2", str(path)]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if (first := line.partition("the first line ")[2]) != "":
                (pytester.path / first.strip()).touch()
    output = "".join(seen)
    assert process.returncode == 0, output
    assert output.count("the last line") == 2
    assert "2 passed" in output


@pytest.mark.long
def test_a_killed_test_process_leaves_no_launched_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test process that is killed is a rank, and the second one is that of the session."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.path.joinpath("trainer.py").write_text(WAITS)
    path = pytester.makepyfile(
        """
        import os
        import pathlib

        import pytest

        HERE = pathlib.Path(__file__).parent

        @pytest.mark.devices(2)
        def test_in_a_rank(launch):
            (HERE / "rank").write_text(str(os.getpid()))
            launch("trainer.py", HERE / "of-rank", launcher="torchrun", nproc=2)

        def test_in_the_session(launch):
            (HERE / "session").write_text(str(os.getpid()))
            launch("trainer.py", HERE / "of-session", launcher="python")
        """
    )
    command = [sys.executable, "-m", "pytest", "-p", "accel", "-v", "--accel", "sim:2", str(path)]
    with subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.PIPE, text=True) as process:
        for tester, files in (("rank", ("of-rank-0", "of-rank-1")), ("session", ("of-session-0",))):
            trainers = [psutil.Process(wait_for_number(pytester.path / file)) for file in files]
            os.kill(wait_for_number(pytester.path / tester), signal.SIGKILL)
            _, alive = psutil.wait_procs(trainers, timeout=scaled(_TIMEOUT))
            assert alive == [], tester
        assert process.stdout is not None
        output = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert "::test_in_a_rank FAILED" in output


def wait_for_number(path: Path) -> int:
    """Wait until the file `path` has a number, and return it."""
    limit = Deadline(_TIMEOUT)
    while True:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        assert not limit.expired, f"waited {_TIMEOUT:g} s for {path}"
        time.sleep(0.02)


@pytest.mark.long
def test_launched_scripts_are_measured_for_coverage(
    session: Callable[..., pytest.RunResult], pytester: pytest.Pytester
) -> None:
    pytest.importorskip("pytest_cov")
    pytester.path.joinpath(".coveragerc").write_text("[run]\nsource = .\npatch =\n    subprocess\n    _exit\n")
    for name in ("in_rank.py", "in_session.py"):
        pytester.path.joinpath(name).write_text("import sys\n\nif len(sys.argv) > 5:\n    print(5)\nprint(json := 1)\n")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.devices(1)
        def test_in_a_rank(launch):
            launch("in_rank.py", launcher="python", output=True)

        def test_in_this_process(launch):
            launch("in_session.py", launcher="python", output=True)
        """
    )
    result = session("-p", "pytest_cov", "--cov", "--cov-report=term-missing", "--accel", "sim:1")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([rf"in_{place}\.py +4 +1 +75% +4" for place in ("rank", "session")])
