"""Test of a mixed suite with three xdist workers while processes of the session are killed at random.

``--chaos N`` sets the number of kills; the default is small. The message of a failure shows the seed, and
``--chaos-seed`` repeats a run with it.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import psutil
import pytest

from tests.background_suite import BackgroundSession, BackgroundSuite, command_line
from tests.deadline import scaled

STEPS = 6
"""The number of test starts and ends, in all processes together, between two kills."""
CONFTEST = """
import json
import os
import time
from pathlib import Path

import pytest
from tests import inner

HERE = Path(__file__).parent


def note(name, *facts):
    inner.note(HERE / name, json.dumps(facts))


@pytest.fixture(autouse=True)
def traced(request):
    note("trace", "begin", os.getpid(), request.node.nodeid, time.monotonic())
    yield
    note("trace", "end", os.getpid(), request.node.nodeid, time.monotonic())


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        note("workers", os.getpid())
    config.addinivalue_line("markers", "own(word): the verdict of the test when nothing is killed")
    if not hasattr(config, "workerinput") and "RANK" not in os.environ and "ACCEL" not in os.environ:
        config.pluginmanager.register(Controller())


class Controller:
    def pytest_runtest_logreport(self, report):
        if hasattr(report, "node") or report.when == "???":  # From a worker, or of one that has crashed.
            text = str(report.longrepr or "")
            note("verdicts", report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail"), text)

"""
TESTS = """
import threading

import pytest


def works():
    import torch
    import torch.distributed as dist

    for _ in range(20):
        tensor = torch.ones(64)
        dist.all_reduce(tensor)
        assert tensor[0].item() == dist.get_world_size()


@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2)
def test_passes(n):
    works()

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2)
def test_fails(n, rank):
    works()
    assert rank == 0, "by itself"

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(3, kind="cpu")
def test_passes_on_cpu(n):
    works()

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.devices(1)
def test_device_passes(n):
    threading.Event().wait(0.01)

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.devices(share=0.5)
def test_share_passes(n):
    threading.Event().wait(0.01)

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2, fresh=True)
def test_fresh_passes(n):
    works()

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2)
def test_skips(n):
    pytest.skip("by itself")

@pytest.fixture
def broken():
    raise ValueError("by itself")

@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2)
def test_errs(n, broken): ...

@pytest.mark.xfail
@pytest.mark.parametrize("n", range(COUNT))
@pytest.mark.distributed(2)
def test_xfails(n):
    assert not "by itself"

@pytest.mark.parametrize("n", range(COUNT))
def test_plain_passes(n):
    threading.Event().wait(0.01)
"""
KIND_COUNT = 10
COUNT = 5
"""The number of tests of each kind in a file."""


@dataclass(frozen=True)
class Kill:
    """A kill of one process: its type, its pid, and the time after which it did nothing more."""

    what: str
    pid: int
    at: float


class Killer(threading.Thread):
    """A thread that kills `kills` random processes of a session, one after every `STEPS` starts and ends of tests."""

    def __init__(self, suite: BackgroundSuite, session: BackgroundSession, draw: random.Random, kills: int) -> None:
        super().__init__(daemon=True)
        self._suite, self._session, self._draw, self._left = suite, session, draw, kills
        self.kills: list[Kill] = []

    def run(self) -> None:
        previous = 0
        while self._session.process.poll() is None and self._left:
            lines = len(self._lines())
            if lines < previous + STEPS:
                time.sleep(0.01)
                continue
            previous = lines
            what = self._draw.choice(["rank"] * 6 + ["worker", "server"])
            victims = []
            with contextlib.suppress(psutil.Error):  # The session may have ended.
                victims = self._find(what)
            if victims:
                victim = self._draw.choice(victims)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
                    self.kills.append(Kill(what, victim.pid, time.monotonic()))
                    self._left -= 1

    def _lines(self, name: str = "trace") -> list[str]:
        path = self._suite.path / name
        return path.read_text().splitlines() if path.exists() else []

    def _find(self, what: str) -> list[psutil.Process]:
        servers = self._session.fork_servers()
        if what == "server":
            return servers
        if what == "worker":
            # Killing a worker that execnet is still starting would end the session (execnet.gateway_bootstrap).
            begun = {pid for (pid,) in map(json.loads, self._lines("workers"))}
            children = psutil.Process(self._session.process.pid).children()
            return [child for child in children if child.pid in begun and command_line(child)]
        ranks: list[psutil.Process] = []
        for server in servers:
            with contextlib.suppress(psutil.Error):
                ranks += server.children(recursive=True)
        return ranks


UNDISTURBED_VERDICTS = {
    "test_fails": ("call", "failed"),
    "test_skips": ("call", "skipped"),
    "test_errs": ("setup", "failed"),
    "test_xfails": ("call", "skipped"),
}


def undisturbed_verdict(nodeid: str) -> tuple[str, str]:
    """Return the phase and the outcome that decide the test `nodeid` when nothing is killed."""
    return UNDISTURBED_VERDICTS.get(nodeid.rpartition("::")[2].partition("[")[0], ("call", "passed"))


@pytest.mark.long
def test_each_test_has_one_verdict_if_random_processes_are_killed(
    suite: BackgroundSuite, request: pytest.FixtureRequest
) -> None:
    kills = request.config.getoption("--chaos")
    seed = request.config.getoption("--chaos-seed") or random.SystemRandom().randrange(1 << 32)
    suite.write("conftest.py", CONFTEST)
    # There are enough tests for all kills, with about two tests between two kills. They are spread over several files,
    # since a new rank collects the whole file of its test.
    files = -(-kills * 4 // (KIND_COUNT * COUNT))
    for number in range(files):
        suite.write(f"test_{number}.py", TESTS.replace("COUNT", str(COUNT)))
    session = suite.start("-n3", "--max-worker-restart=100000", "--accel-timeout=60", "-q", "-q", "--tb=short")
    killer = Killer(suite, session, random.Random(seed), kills)
    killer.start()
    text, _ = session.process.communicate(timeout=scaled(600 + 5 * kills))
    killer.join()
    try:
        assert len(killer.kills) == kills, f"the session ended after {len(killer.kills)} of {kills} kills"
        check(suite, text, killer.kills, files * COUNT * KIND_COUNT)
    except AssertionError as error:
        history = "\n".join(map(str, killer.kills))
        raise AssertionError(f"--chaos {kills} --chaos-seed {seed}\n{error}\n{history}\n{text[-20_000:]}") from None


def check(suite: BackgroundSuite, text: str, kills: list[Kill], count: int) -> None:
    """Check the verdicts and the output `text` of a session of `count` tests against the `kills`."""
    assert "INTERNALERROR" not in text
    reports: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for line in (suite.path / "verdicts").read_text().splitlines():
        nodeid, when, outcome, _, longrepr = json.loads(line)
        reports[nodeid].append((when, outcome, longrepr))
    assert len(reports) == count, f"{count - len(reports)} tests have no report"

    changed: dict[str, str] = {}
    for nodeid, phases in reports.items():
        when, outcome = undisturbed_verdict(nodeid)
        crashed = [longrepr for phase, _, longrepr in phases if phase == "???"]
        deciding = [
            phase for phase, result, _ in phases if phase == "call" or (phase == "setup" and result != "passed")
        ]
        assert len(crashed) <= 1, f"{nodeid} was reported as crashed {len(crashed)} times"
        assert len(deciding) == 1 or (crashed and not deciding), f"{nodeid} has the reports {phases}"
        found = {(phase, result) for phase, result, _ in phases}
        if crashed or (when, outcome) not in found or ("teardown", "failed") in found:
            changed[nodeid] = "\n".join(longrepr for _, result, longrepr in phases if result != "passed")

    # The report of a test whose verdict was changed by a kill names this kill.
    for nodeid, longrepr in changed.items():
        assert any(message in longrepr for message in KILL_MESSAGES), (
            f"the verdict of {nodeid} was changed, but not by a kill:\n{longrepr}"
        )
    # A kill changes few verdicts: a rank or a worker runs one test, and a fork server has the ranks of three tests.
    weights = Counter({"rank": 1, "worker": 1, "server": 3})
    assert len(changed) <= sum(weights[kill.what] for kill in kills), f"{len(changed)} verdicts were changed"
    # A test cannot pass if one of its ranks was killed while it ran.
    trace = [json.loads(line) for line in (suite.path / "trace").read_text().splitlines()]
    for kill in kills:
        running = None
        for event, pid, nodeid, at in trace:
            if pid == kill.pid and at < kill.at:  # Later, another process may have the number.
                running = nodeid if event == "begin" else None
        if kill.what == "rank" and running is not None and undisturbed_verdict(running) == ("call", "passed"):
            assert running in changed, f"{running} passed despite {kill}"


KILL_MESSAGES = ("SIGKILL", "exit status unknown", "crashed while running", "fork server", "worker 'gw")
