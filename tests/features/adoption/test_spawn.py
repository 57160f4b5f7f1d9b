"""Tests of ``accel_adopt = spawn``: spawned processes of tests are forked, and tests see no difference."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.background_suite import BackgroundSuite, suite
from tests.deadline import eventually, scaled

__all__ = ["suite"]

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="the package torch is not installed")

INI = """[pytest]
accel = sim:4
accel_adopt = spawn
filterwarnings = error
"""
HARNESSES = """
import functools
import os
import signal
import sys
import traceback
import unittest
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest

CONTEXT = multiprocessing.get_context("spawn")


def work(rank, how):
    if how != "pass" and rank == 1:
        if how == "fail":
            raise ValueError("rank 1 fails")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)


def start_all(target, *args, size=2):
    processes = [CONTEXT.Process(target=target, args=(rank, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


# Lists of processes

def joins_and_checks(how):
    joins_and_checks_of(work, how)


def drops_errors(how):
    for process in start_all(work, how):
        process.join()


def of_environment(rank, how, environment):
    os.environ.update(environment)
    assert os.environ["RANK"] == str(rank) and os.environ["FROM_TEST"] == "1" and os.getcwd() == environment["PWD"]
    work(rank, how)


def sends_an_environment(how):
    os.environ["FROM_TEST"] = "1"
    assert "RANK" not in os.environ
    processes = []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500", "PWD": os.getcwd()}
        processes.append(CONTEXT.Process(target=of_environment, args=(rank, how, environment)))
        processes[-1].start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


class DistCall:
    def __init__(self, size):
        self.size = size

    def __call__(self, function):
        name = function.__qualname__

        @functools.wraps(function)
        def call(*args):
            results = CONTEXT.Queue()
            processes = start_all(DistCall.run, name, args, results, size=self.size)
            for process in processes:
                process.join()
                assert process.exitcode == 0, f"exit code {process.exitcode}"
            assert all(results.get() for process in processes)

        call.original = function
        return call

    @staticmethod
    def run(rank, name, args, results):
        globals()[name].original(rank, *args)
        results.put(True)


@DistCall(2)
def decorated(rank, how):
    work(rank, how)


def of_barrier(rank, how, barrier, lock, count, values):
    work(rank, how)
    with lock:
        count.value += 1
        values[rank] = rank
    barrier.wait(60 if how == "pass" else 0.3)


def synchronizes(how):
    barrier, lock, count, values = CONTEXT.Barrier(2), CONTEXT.Lock(), CONTEXT.Value("i", 0), CONTEXT.Array("d", 2)
    processes = start_all(of_barrier, how, barrier, lock, count, values)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert count.value == 2 and values[:] == [0, 1]


def of_manager(rank, how, shared):
    work(rank, how)
    shared[rank] = os.getpid()


def shares_a_manager(how):
    with CONTEXT.Manager() as manager:
        shared = manager.dict()
        processes = start_all(of_manager, how, shared)
        for process in processes:
            process.join()
        assert dict(shared) == {rank: process.pid for rank, process in enumerate(processes)}


def of_pool(rank, how):
    work(rank, how)
    return rank


def maps_in_an_executor(how):
    with ProcessPoolExecutor(2, mp_context=CONTEXT) as executor:
        assert list(executor.map(of_pool, range(2), [how] * 2)) == [0, 1]


def of_nested(rank, how):
    inner = multiprocessing.get_context("spawn").Process(target=work, args=(rank, how))
    inner.start()
    inner.join()
    sys.exit(inner.exitcode and 1)


def nests(how):
    joins_and_checks_of(of_nested, how)


def joins_and_checks_of(target, *args):
    for process in start_all(target, *args):
        process.join()
        assert process.exitcode == 0


@contextmanager
def default_method():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def of_default(rank, how, parent):
    assert multiprocessing.get_start_method() == "spawn" and multiprocessing.parent_process().pid == parent
    assert multiprocessing.current_process().name == f"rank {rank}" and __name__ == "test_harnesses"
    assert sys.modules["__main__"].__name__ == "__mp_main__" or not hasattr(sys.modules["__main__"], "__file__")
    work(rank, how)


def sets_the_default_method(how):
    with default_method():
        processes = [
            multiprocessing.Process(target=of_default, args=(rank, how, os.getpid()), name=f"rank {rank}")
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]


def of_exit(rank, how, path):
    import atexit
    import threading
    import time

    def write(line):
        with open(path, "a") as file:
            file.write(line)

    go = threading.Event()
    threading.Thread(target=lambda: (go.wait(), time.sleep(0.05), write("thread "))).start()
    atexit.register(write, "exit ")
    threading.Timer(0.05, go.set).start()
    work(rank, how)


def leaves_in_order(how):
    path = f"left by {how}"
    joins_and_checks_of(of_exit, how, path)
    with open(path) as file:
        assert sorted(file.read().split()) == ["exit", "exit", "thread", "thread"]


class ProcessCase(unittest.TestCase):
    def test_case(self):
        drops_errors("fail")
        with self.assertRaises(AssertionError):
            joins_and_checks("exit")


# torch.multiprocessing

def function_of_world(rank, size, port, how, extra=0):
    assert size == 2 and port and extra == 1
    work(rank, how)


def spawns_a_partial(how):
    import torch.multiprocessing as mp

    mp.spawn(functools.partial(function_of_world, size=2, port=29500, how=how, extra=1), nprocs=2)


def forks_with_start_processes(how):
    import torch.multiprocessing as mp

    mp.start_processes(work, args=(how,), nprocs=2, start_method="fork")


def of_tensors(rank, how, tensor, results):
    work(rank, how)
    tensor[rank] += rank + 1
    results.put(tensor[rank : rank + 1])
    results.join()


def shares_tensors(how):
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    tensor, results = torch.zeros(2).share_memory_(), context.JoinableQueue()
    arguments = how, tensor, results
    processes = [context.Process(target=of_tensors, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    total = sum(results.get(timeout=60 if how == "pass" else 1).item() for process in processes)
    for process in processes:
        results.task_done()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert total == 3 and tensor.tolist() == [1, 2]


def of_group(rank, how, port):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    work(rank, how)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


def makes_a_group(how):
    import torch.multiprocessing as mp
    from pytest_accel.core.interpreter import hold_port

    with hold_port() as held:
        mp.spawn(of_group, args=(how, held.getsockname()[1]), nprocs=2)


EACH = [
    joins_and_checks, drops_errors, sends_an_environment, decorated, synchronizes, shares_a_manager,
    maps_in_an_executor, nests, sets_the_default_method, leaves_in_order, spawns_a_partial, forks_with_start_processes,
    shares_tensors, makes_a_group,
]


@pytest.mark.parametrize("how", ["pass", "fail", "exit", "kill"])
@pytest.mark.parametrize("harness", EACH, ids=lambda harness: getattr(harness, "__name__", ""))
def test_(harness, how, monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_TEST", "0")
    monkeypatch.chdir(tmp_path)
    harness(how)
"""
"""Harnesses in the styles of public projects, each with ranks that pass, and one rank that fails in three ways."""


ENDS = ("pass", "fail", "exit", "kill")
HANGS = """
    import signal

    import pytest
    import torch.multiprocessing as mp


    def first(rank):
        signal.pause()


    def second(rank):
        if rank == 1:
            first(rank)


    def test_spawn():
        mp.spawn(second, nprocs=2)


    def test_two():
        mp.spawn(first, nprocs=2)


    def test_queue():
        context = mp.get_context("spawn")
        results = context.Queue()
        context.Process(target=first, args=(0,)).start()
        results.get()


    def test_pool():
        with mp.get_context("spawn").Pool(3) as pool:
            pool.map(first, [0])


    def test_leaves_a_pool():
        global POOL
        POOL = mp.get_context("spawn").Pool(1)
        assert POOL.map(abs, [-1]) == [1]


    @pytest.fixture(scope="module")
    def server():
        server = mp.get_context("spawn").Process(target=first, args=(0,), name="server")
        server.start()
        yield server
        server.terminate()
        server.join()
        assert server.exitcode == -signal.SIGTERM


    def test_1_with_a_server(server):
        mp.spawn(print, nprocs=1)


    def test_2_with_a_server(server):
        assert server.is_alive()
"""
DEVICES = """
    import json
    import multiprocessing
    import os
    import sys

    import pytest
    import torch
    import torch.multiprocessing as mp

    CONTEXT = multiprocessing.get_context("spawn")
    MASK = os.environ.get("SIM_VISIBLE_DEVICES", "")  # A worker of xdist has one.


    def show(rank, folder, *more):
        with open(f"{folder}/{rank}", "w") as file:
            json.dump([os.environ.get("SIM_VISIBLE_DEVICES", ""), os.getppid()], file)


    def show_alone(tmp_path, *more):
        process = CONTEXT.Process(target=show, args=(0, str(tmp_path), *more))
        process.start()
        process.join()
        assert process.exitcode == 0


    @pytest.fixture
    def shown(tmp_path):
        def read():
            return [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]

        return read


    @pytest.mark.parametrize("method", ["spawn", "fork"])
    @pytest.mark.parametrize("size, devices", [(1, 1), (2, 2), (5, 4)])
    def test_leased(size, devices, method, shown, tmp_path):
        mp.start_processes(show, args=(str(tmp_path),), nprocs=size, start_method=method)
        masks = {mask for mask, _ in shown()}
        assert len(masks) == 1 and len(masks.pop().split(",")) == devices
        assert os.environ.get("SIM_VISIBLE_DEVICES", "") == MASK


    def show_variables(rank, folder):
        with open(f"{folder}/{rank}", "w") as file:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            json.dump([os.environ.get(name) for name in names], file)


    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_variables_of_ranks(method, shown, tmp_path, monkeypatch):
        mp.start_processes(show_variables, args=(str(tmp_path),), nprocs=2, start_method=method)
        first, second = shown()
        assert first == ["0", "0", "2", "127.0.0.1", first[4]] and int(first[4]) > 0
        assert second == ["1", "1", *first[2:]]
        assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ
        monkeypatch.setenv("WORLD_SIZE", "2")  # A harness that sets variables itself may need the others to be missing.
        mp.start_processes(show_variables, args=(str(tmp_path),), nprocs=2, start_method=method)
        assert shown() == [[None, None, "2", None, None]] * 2


    def test_not_joined(shown, tmp_path):
        first = mp.spawn(show, args=(str(tmp_path),), nprocs=2, join=False)
        second = mp.spawn(show, args=(str(tmp_path),), nprocs=2, join=False)
        for context in (first, second):
            while not context.join():
                pass
        assert {len(mask.split(",")) for mask, _ in shown()} == {2}


    def test_in_a_rank(shown, tmp_path):
        show_alone(tmp_path)
        ((mask, parent),) = shown()
        assert len(mask.split(",")) == 3 and parent != os.getpid()


    @pytest.mark.accel_adopt(False)
    def test_marked(shown, tmp_path):
        show_alone(tmp_path)
        assert shown() == [[MASK, os.getpid()]]


    def test_by_rule(shown, tmp_path):
        show_alone(tmp_path)
        assert shown() == [[MASK, os.getpid()]]


    def show_threads(rank, folder):
        with open(f"{folder}/{rank}", "w") as file:
            json.dump([os.getppid(), torch.get_num_threads()], file)


    def test_a_variable_that_torch_reads_when_it_is_imported(shown, tmp_path, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        mp.spawn(show_threads, args=(str(tmp_path),), nprocs=1)
        ((parent, threads),) = shown()
        assert threads == 1 and parent != os.getpid()


    def test_more_descriptors_than_the_server_takes(shown, tmp_path):
        connections = [one for _ in range(130) for one in CONTEXT.Pipe()]
        show_alone(tmp_path, connections)
        assert shown()[0][1] == os.getpid()
        for connection in connections:
            connection.close()


    def draw(rank, results):
        import random

        import numpy

        results.put((random.random(), numpy.random.rand()))


    def test_random_states():
        pytest.importorskip("numpy")
        results = CONTEXT.SimpleQueue()
        mp.spawn(draw, args=(results,), nprocs=2)
        drawn = results.get(), results.get()
        assert len({*drawn[0], *drawn[1]}) == 4


    def write(rank):
        print("of process", rank)
        print("error of", rank, file=sys.stderr)


    def test_output(capfd):
        mp.spawn(write, nprocs=2)
        output = capfd.readouterr()
        assert sorted(output.out.split()) == ["0", "1", "of", "of", "process", "process"]
        assert sorted(output.err.split()) == ["0", "1", "error", "error", "of", "of"]
"""


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        pytest.param(("-n", "1", "-k", "pass or kill"), ("pass", "kill"), id="adopted"),
        pytest.param(("--accel=cpu:2",), ENDS, id="adopted on cpu", marks=pytest.mark.long),
        *(
            pytest.param(
                ("-o", "accel_adopt=", "-k", f"{first} or {second}"),
                (first, second),
                id=f"not adopted, {first} or {second}",
                marks=pytest.mark.long,
            )
            for first, second in (("pass", "exit"), ("fail", "kill"))
        ),
    ],
)
def test_harnesses_have_their_verdicts(suite: BackgroundSuite, options: tuple[str, ...], ends: tuple[str, ...]) -> None:
    suite.write("pytest.ini", INI)
    (suite.path / "test_harnesses.py").write_text(HARNESSES)
    run = suite.run(*options)
    expected = {} if "-k" in options else {"test_case": "PASSED"}
    for harness in re.findall(r"\w+", HARNESSES.partition("EACH = [")[2].partition("]")[0]):
        for end in ends:
            passes = end == "pass" or harness == "drops_errors"
            expected[f"test_[{harness}-{end}]"] = "PASSED" if passes else "FAILED"
    run.expect(expected)
    if "kill" in ends:
        assert "process 1 terminated with signal SIGKILL" in run.failure("test_[spawns_a_partial-kill]")
        assert "exit code -9" in run.failure("test_[decorated-kill]")
    if "fail" in ends:
        text = run.failure("test_[spawns_a_partial-fail]")
        assert "ProcessRaisedException" in text
        assert 'in work\nE           raise ValueError("rank 1 fails")' in text
    if "exit" in ends:
        assert "process 1 terminated with exit code 3" in run.failure("test_[spawns_a_partial-exit]")


def test_processes_that_hang_are_killed_and_their_stacks_shown(suite: BackgroundSuite) -> None:
    limit = round(scaled(4))  # In this time, the ranks come to their places.
    suite.write("pytest.ini", f"{INI}accel_timeout = {limit}\n")
    suite.write("test_hangs.py", HANGS)
    run = suite.run()
    passed = dict.fromkeys(("test_1_with_a_server", "test_2_with_a_server", "test_leaves_a_pool"), "PASSED")
    run.expect({**dict.fromkeys(("test_spawn", "test_two", "test_queue", "test_pool"), "FAILED"), **passed})
    text = run.failure("test_spawn")
    assert f"timed out after {limit} s (--accel-timeout)" in text
    assert text.count("--- stack of SpawnProcess-") == 1
    assert re.search(r'test_hangs\.py", line \d+ in first\n.* in second\n.* in _wrap$', text, re.MULTILINE)
    assert run.failure("test_two").count(" in first") == 2
    assert run.failure("test_queue").count(" in first") == 1
    assert run.failure("test_pool").count(" in first") == 1


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.long)])
def test_processes_have_what_a_new_interpreter_would_have(suite: BackgroundSuite, options: tuple[str, ...]) -> None:
    preload = "accel_preload = numpy.random\n" if find_spec("numpy") else ""
    rules = "accel_rules =\n    **::test_in_a_rank: devices(3)\n    **::*_by_rule: accel_adopt(False)\n"
    suite.write("pytest.ini", INI + preload + rules)
    suite.write("test_devices.py", DEVICES)
    run = suite.run(*options)
    assert set(run.outcomes().values()) == {"PASSED"}, run.text
    assert "accel_adopt: processes that were not forked: 1 (too many fds)" in run.text


def test_without_a_server_multiprocessing_starts_the_processes(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", INI + "accel_preload = no_such_module\n")
    suite.write(
        "test_two.py",
        """
        import multiprocessing


        def test_one():
            processes = [multiprocessing.get_context("spawn").Process(target=print) for _ in range(2)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                assert process.exitcode == 0
        """,
    )
    run = suite.run("-rP")
    run.expect({"test_one": "PASSED"})
    assert "accel_adopt: processes that were not forked: 2 (" in run.text
    assert "no_such_module cannot be imported" in run.text


def test_coverage_measures_spawned_processes(suite: BackgroundSuite) -> None:
    coverage = pytest.importorskip("coverage")
    suite.write("pytest.ini", INI)
    suite.write(".coveragerc", "[run]\nparallel = true\n")
    suite.write("called.py", "def called():\n    return 1\n")
    suite.write(
        "test_covered.py",
        """
        import multiprocessing

        from called import called


        def test_called():
            process = multiprocessing.get_context("spawn").Process(target=called)
            process.start()
            process.join()
            assert process.exitcode == 0
        """,
    )
    settings = {"COVERAGE_PROCESS_START": str(suite.path / ".coveragerc")}
    suite.start(environment=settings).finish().expect({"test_called": "PASSED"})
    lines: set[int] = set()
    for path in suite.path.glob(".coverage.*"):
        data = coverage.CoverageData(path)
        data.read()
        lines |= set(data.lines(str(suite.path / "called.py")) or ())
    assert 2 in lines, "only the spawned process calls the function"


def test_a_killed_session_leaves_no_process(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", INI.replace("sim:4", "none"))
    suite.write(
        "test_killed.py",
        """
        import pathlib
        import signal
        import subprocess
        import torch.multiprocessing as mp


        def hang(rank):
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            pathlib.Path("hangs").write_text("1\\n")
            signal.pause()


        def test_hangs():
            mp.spawn(hang, nprocs=1)
        """,
    )
    session = suite.start()
    assert suite.read("hangs") == "1"
    session.process.kill()
    session.process.wait()
    eventually("all processes to end", lambda: not suite.processes())
