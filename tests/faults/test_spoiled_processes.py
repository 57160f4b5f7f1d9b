"""Tests of what a test sees after one that has spoiled its process.

That is what plain pytest would show, the state before, or new ranks.
"""

from __future__ import annotations

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

_SUITE = '''
import asyncio
import atexit
import locale
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.lazy_torch import dist, rpc, torch

pytestmark = [
    pytest.mark.distributed(2, kind="cpu", timeout=120),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:You are using a Backend"),
]
WAYS, STARTED = {}, os.getpid()
SITE = os.path.abspath("lib/python3/site-packages")


def way(read):
    """Return a decorator for a function that spoils what `read` returns."""

    def decorate(spoil):
        WAYS[spoil.__name__] = spoil, read
        return spoil

    return decorate


# Put back, and reported.


@way(lambda: os.environ.get("LEFT"))
def environment():
    os.environ["LEFT"] = "1"


@way(lambda: os.environ["RANK"])
def variable_of_the_rank():
    del os.environ["RANK"]


@way(os.getcwd)
def folder():
    os.chdir("/")


@way(lambda: [os.umask(mask := os.umask(0)), mask][1])
def umask():
    os.umask(0)


@way(lambda: list(sys.path))
def sys_path():
    sys.path.insert(0, "/elsewhere")


@way(lambda: list(sys.argv))
def sys_argv():
    sys.argv = ["train.py"]


@way(lambda: signal.getsignal(signal.SIGUSR1))
def handler():
    signal.signal(signal.SIGUSR1, lambda *_: None)


@way(lambda: signal.getsignal(signal.SIGCHLD))
def ended_processes():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@way(lambda: signal.getitimer(signal.ITIMER_REAL)[0])
def timer():
    signal.alarm(1000)


@way(lambda: (logging.root.level, logging.root.manager.disable))
def threshold():
    logging.root.setLevel(5)
    logging.disable(logging.CRITICAL)


@way(lambda: torch.get_default_dtype())
def dtype():
    torch.set_default_dtype(torch.float64)


@way(lambda: torch.ones(1).device.type)
def device():
    torch.set_default_device("meta")


@way(lambda: torch.is_grad_enabled())
def grad_mode():
    torch.set_grad_enabled(False)


@way(lambda: torch.get_deterministic_debug_mode())
def deterministic():
    torch.set_deterministic_debug_mode("warn")


@way(lambda: torch.get_float32_matmul_precision())
def precision():
    torch.set_float32_matmul_precision("high")


@way(lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
def cudnn():
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True


@way(lambda: dist.barrier.__module__)
def patched_function():
    import torch.distributed

    torch.distributed.barrier = lambda *_, **__: None


# As under plain pytest: it stays, or pytest itself puts it back.


@way(lambda: os.getpid() == STARTED)
def seeds():
    random.seed(7)
    torch.manual_seed(7)


@way(lambda: [one for one in warnings.filters if one[0] == "once"])
def warning_filters():
    warnings.simplefilter("once")


@way(lambda: None)
def stays():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    locale.setlocale(locale.LC_ALL, "C")
    sys.modules["left"] = sys
    torch.set_autocast_enabled("cpu", True)
    asyncio.set_event_loop(asyncio.new_event_loop())
    atexit.register(print, "at exit")
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    random.left = "a monkeypatch"
    threading.Thread(target=threading.Event().wait, daemon=True, name="daemon").start()


def sees():
    return (
        resource.getrlimit(resource.RLIMIT_CORE)[0],
        sys.modules.pop("left", None) is sys,
        torch.is_autocast_enabled("cpu"),
        vars(random).pop("left", None),
        "daemon" in {thread.name for thread in threading.enumerate()},
    )


@way(lambda: os.getpid() == STARTED)
def child_that_ends():
    subprocess.Popen([sys.executable, "-c", ""])


@way(lambda: os.getpid() == STARTED)
def executor():
    random.executor = ThreadPoolExecutor(1)
    random.executor.submit(int).result()


@way(lambda: os.getpid() == STARTED)
def mesh():
    made = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    dist.barrier(made.get_group("data"))


@way(lambda: None)
def library():
    sys.path.append(SITE)
    import used_library

    used_library.start()


def sees_library():
    import used_library

    return used_library.state() == (True, True, True), SITE in sys.path


# Stays, and is reported.


@way(lambda: os.getpid() == STARTED)
def thread():
    threading.Thread(target=threading.Event().wait, name="forgotten").start()


@way(lambda: os.getpid() == STARTED)
def child():
    subprocess.Popen(["sleep", "1000"])


@way(lambda: os.getpid() == STARTED)
def group():
    dist.new_group()


@way(lambda: os.getpid() == STARTED)
def group_named_after_its_ranks():
    return dist.new_group([0, 1], use_local_synchronization=True)


# New ranks.


def new_ranks():
    """Stand for what only new ranks have."""


@way(new_ranks)
def group_of_one_rank():
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


@way(new_ranks)
def rpc_agent():
    rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=2)


def use_rpc():
    other = f"worker{1 - dist.get_rank()}"
    reference = rpc.remote(other, torch.add, args=(torch.zeros(2), 1))
    assert rpc.rpc_sync(other, torch.add, args=(reference.to_here(), 1)).sum() == 4
    rpc.shutdown()


@way(new_ranks)
def more_groups_than_a_rank_may_have():
    for _ in range(101):
        dist.new_group()


@way(new_ranks)
def default_group():
    dist.destroy_process_group()


BEFORE = {}
SPOILED = []


@pytest.mark.parametrize("step", ["spoils", "sees"])
@pytest.mark.parametrize("way", list(WAYS))
def test_way(way, step):
    spoil, read = WAYS[way]
    if step == "spoils":
        SPOILED.append(way)
        BEFORE[way] = None if read is new_ranks else read()
        spoil()
        return
    if read is new_ranks:
        assert SPOILED == [], "the ranks are not new"
    else:
        assert SPOILED[-1] == way, "the ranks are new"
        assert read() == BEFORE[way]
    if way == "library":
        assert sees_library() == (True, True)
    if way == "stays":
        assert sees() == (0, True, True, "a monkeypatch", True)
        torch.set_autocast_enabled("cpu", False)
    if way == "rpc_agent":
        spoil()
        use_rpc()
    if way == "group_named_after_its_ranks":
        dist.destroy_process_group(spoil())
    dist.barrier()
'''
_LIBRARY = """
import os
import signal

import torch.distributed as dist


def handle(*_):
    pass


def gather(*_):
    pass


def start():
    os.environ["USED_" + "LIBRARY"] = "running"
    signal.signal(signal.SIGUSR2, handle)
    dist.gather = gather


def state():
    return "USED_" + "LIBRARY" in os.environ, signal.getsignal(signal.SIGUSR2) is handle, dist.gather is gather
"""
_PUT_BACK = {
    "environment": "the environment variable LEFT changed from unset to '1'",
    "variable_of_the_rank": "the environment variable RANK changed from '0' to unset",
    "folder": "the working directory changed from",
    "umask": "the umask changed from 0o022 to 0o000",
    "sys_path": "sys.path changed from",
    "sys_argv": "sys.argv changed from",
    "handler": "the handler of SIGUSR1 changed from",
    "ended_processes": "the handler of SIGCHLD changed from SIG_DFL to SIG_IGN",
    "timer": "the alarm timer changed from off to on",
    "threshold": "logging.disable changed from 0 to 50",
    "dtype": "torch's default dtype changed from torch.float32 to torch.float64",
    "device": "torch's default device changed from cpu to meta",
    "grad_mode": "torch's grad mode changed from True to False",
    "deterministic": "torch.use_deterministic_algorithms changed from 0 to 1",
    "precision": "torch's float32 matmul precision changed from highest to high",
    "cudnn": "torch.backends.cudnn.deterministic changed from False to True",
    "patched_function": "torch.distributed.barrier changed from",
}
_GROUPS = ("group", "group_named_after_its_ranks", "group_of_one_rank", "more_groups_than_a_rank_may_have")
_STAY = {"thread": "thread", "child": "process", "rpc_agent": "rpc", **dict.fromkeys(_GROUPS, "process group")}


def test_what_a_test_sees_after_one_that_has_spoiled_its_process(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _SUITE)
    suite.write("lib/python3/site-packages/used_library.py", _LIBRARY)
    run = suite.start("--accel", "none", "-p", "no:randomly", "-o", "accel_leaks=fail", CAUSES).finish()
    expected = dict.fromkeys(run.outcomes(), "PASSED")
    for way, text in _PUT_BACK.items():
        expected[f"test_way[{way}-spoils]"] = "PASSED ERROR leaked: setting; ranks 0-1"
        assert text in run.failure(f"test_way[{way}-spoils]")
    for way, kind in _STAY.items():
        ranks = "rank 0" if way == "group_of_one_rank" else "ranks 0-1"
        expected[f"test_way[{way}-spoils]"] = f"PASSED ERROR leaked: {kind}; {ranks}"
    run.expect(expected)
    assert len(expected) == 2 * 32
    reason = "some ranks have process groups that others have not"
    assert f"test_it.py::test_way[group_of_one_rank-spoils]: {reason}" in run.text
