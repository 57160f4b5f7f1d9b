"""A mixed suite under three workers, while processes of it are killed at random.

The short form is part of every run; ``--chaos 1000`` kills so many. A seed that fails is shown; ``--chaos-seed`` takes
it again.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.faults.conftest import Session

if TYPE_CHECKING:
    from tests.faults.conftest import Suite

STEPS = 6
"""Tests that any process begins or ends between two kills."""
CONFTEST = """
import json
import os
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def note(name, *facts):
    # One write a line, which the kernel keeps whole.
    file = os.open(HERE / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(facts) + "\\n").encode())
    os.close(file)


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
import torch
import torch.distributed as dist


def works():
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
@pytest.mark.distributed(3, device="cpu")
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
KINDS = 10
COUNT = 20
"""Tests of each kind in a file."""


@dataclass(frozen=True)
class Kill:
    """A process that was killed."""

    what: str
    pid: int
    at: float


class Killer(threading.Thread):
    """Kills something each time that the suite has got on a little, so many times."""

    def __init__(self, suite: Suite, session: Session, draw: random.Random, kills: int) -> None:
        super().__init__(daemon=True)
        self._suite, self._session, self._draw, self._left = suite, session, draw, kills
        self.kills: list[Kill] = []

    def run(self) -> None:
        seen = 0
        while self._session.process.poll() is None and self._left:
            lines = len(self._lines())
            if lines < seen + STEPS:
                time.sleep(0.01)
                continue
            seen = lines
            what = self._draw.choice(["rank"] * 6 + ["worker", "server"])
            victims = []
            with contextlib.suppress(psutil.Error):  # The session may have come to its end.
                victims = self._find(what)
            if victims:
                victim = self._draw.choice(victims)
                # Before: what it does until then is not held against anybody.
                self.kills.append(Kill(what, victim.pid, time.monotonic()))
                self._left -= 1
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    self.kills.pop()
                    self._left += 1

    def _lines(self, name: str = "trace") -> list[str]:
        path = self._suite.path / name
        return path.read_text().splitlines() if path.exists() else []

    def _find(self, what: str) -> list[psutil.Process]:
        children = psutil.Process(self._session.process.pid).children()
        servers = [child for child in children if "forkserver.server import main" in command_line(child)]
        if what == "server":
            return servers
        if what == "worker":
            # One that execnet is still starting takes the whole session down with it (execnet.gateway_bootstrap).
            begun = {pid for (pid,) in map(json.loads, self._lines("workers"))}
            return [child for child in children if child.pid in begun and command_line(child)]
        ranks: list[psutil.Process] = []
        for server in servers:
            with contextlib.suppress(psutil.Error):
                ranks += server.children(recursive=True)
        return ranks


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended, which may stay in the list until its parent asks for it."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


OWN = {
    "test_fails": ("call", "failed"),
    "test_skips": ("call", "skipped"),
    "test_errs": ("setup", "failed"),
    "test_xfails": ("call", "skipped"),
}


def own_verdict(nodeid: str) -> tuple[str, str]:
    """The phase and outcome that decide a test when nothing is killed."""
    return OWN.get(nodeid.rpartition("::")[2].partition("[")[0], ("call", "passed"))


@pytest.mark.long
def test_each_test_has_one_verdict_whatever_is_killed(suite: Suite, request: pytest.FixtureRequest) -> None:
    kills = request.config.getoption("--chaos")
    seed = request.config.getoption("--chaos-seed") or random.SystemRandom().randrange(1 << 32)
    suite.write("conftest.py", CONFTEST)
    # Some two tests pass between two kills. A rank that is new collects the whole file of its test.
    files = max(1, kills * 4 // (KINDS * COUNT))
    for number in range(files):
        suite.write(f"test_{number}.py", TESTS.replace("COUNT", str(COUNT)))
    session = suite.start("-n3", "--max-worker-restart=100000", "--accel-timeout=60", "-q", "-q", "--tb=short")
    killer = Killer(suite, session, random.Random(seed), kills)
    killer.start()
    text, _ = session.process.communicate(timeout=120 + 5 * kills)
    killer.join()
    try:
        assert len(killer.kills) == kills, "the suite came to its end before that"
        check(suite, text, killer.kills, files * COUNT * KINDS)
    except AssertionError as error:
        history = "\n".join(map(str, killer.kills))
        raise AssertionError(f"--chaos {kills} --chaos-seed {seed}\n{error}\n{history}\n{text[-20_000:]}") from None
    suite.expect_nothing_left()


def check(suite: Suite, text: str, kills: list[Kill], count: int) -> None:
    """Check the output `text` of a session of `count` tests."""
    assert "INTERNALERROR" not in text
    reports: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for line in (suite.path / "verdicts").read_text().splitlines():
        nodeid, when, outcome, _, said = json.loads(line)
        reports[nodeid].append((when, outcome, said))
    assert len(reports) == count, f"{count - len(reports)} tests have no report"

    spoilt: dict[str, str] = {}
    for nodeid, told in reports.items():
        when, outcome = own_verdict(nodeid)
        crashed = [said for phase, _, said in told if phase == "???"]
        deciding = [phase for phase, result, _ in told if phase == "call" or (phase == "setup" and result != "passed")]
        assert len(crashed) <= 1, f"{nodeid} is told to have crashed {len(crashed)} times"
        assert len(deciding) == 1 or (crashed and not deciding), f"{nodeid} has {told}"
        found = {(phase, result) for phase, result, _ in told}
        if crashed or (when, outcome) not in found or ("teardown", "failed") in found:
            spoilt[nodeid] = "\n".join(said for _, result, said in told if result != "passed")

    # A test that is not what it would have been says which kill did that.
    for nodeid, said in spoilt.items():
        assert any(sign in said for sign in SIGNS), f"{nodeid} was spoilt by nobody:\n{said}"
    # And no more are spoilt than kills account for: a rank is in one test, a worker has one, a server has three.
    weights = Counter({"rank": 1, "worker": 1, "server": 3})
    assert len(spoilt) <= sum(weights[kill.what] for kill in kills), f"{len(spoilt)} tests were spoilt"
    # A rank that was killed between the first line of a test and the last has spoilt it.
    trace = [json.loads(line) for line in (suite.path / "trace").read_text().splitlines()]
    for kill in kills:
        running = None
        for moment, pid, nodeid, at in trace:
            if pid == kill.pid and at < kill.at + 1:  # The moment is that before the signal was sent.
                running = nodeid if moment == "begin" else None
        if kill.what == "rank" and running is not None and own_verdict(running) == ("call", "passed"):
            assert running in spoilt, f"{running} has passed without {kill}"


SIGNS = ("SIGKILL", "exit status unknown", "crashed while running", "fork server", "worker 'gw")
