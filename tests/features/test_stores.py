"""Tests of data exchange over the world's store: in fixtures of any scope, and safe from other users."""

from __future__ import annotations

import os
import re

import pytest

from tests.features.conftest import Suite
from tests.run import Run
from tests.torch_release import needs_torch

_OTHER_USER = """
import encodings.idna  # Which this user may have no right to read.
import os
import socket
import struct
import sys

address, port, key, value, other = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
SET, GET = 1, 3  # torch/csrc/distributed/c10d/TCPStoreBackend.hpp


def text(data):
    return struct.pack("<Q", len(data)) + data


with socket.create_connection((address, int(port))) as store, store.makefile("rb") as answers:

    def get(key):
        store.sendall(bytes([GET]) + text(key.encode()))
        return answers.read(*struct.unpack("<Q", answers.read(8)))

    store.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
    value = get(other) if other else bytes.fromhex(value)
    store.sendall(bytes([SET]) + text(key.encode()) + text(value))
    assert get(key) == value
"""
"""Script that sets a key of a TCPStore as a user without privileges. It does not need torch."""

_ATTACKS = """
    import os
    import pickle
    import subprocess
    import sys
    from pathlib import Path

    import pytest

    from pytest_accel.rank.context import RANK

    pytestmark = pytest.mark.distributed(2, kind="cpu")


    class Payload:
        def __reduce__(self):
            return exec, (f"import os; open({os.path.abspath('ran')!r}, 'a').write(f'as uid {os.getuid()}')",)


    @pytest.fixture
    def attack(gather, rank, dist_store, pytestconfig):
        '''Have a stranger set what rank 1 tells rank 0, before rank 1 does.'''

        def attack(call, value=b"", other=0):
            if rank == 0:
                store = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
                name = f"/accel/gather/{pytestconfig.stash[RANK].tests}/{{}}/1".format
                words = name(call), value.hex(), name(other) if other else ""
                command = [sys.executable, "-I", "-S", "-c", Path("stranger.py").read_text(), *store, *words]
                subprocess.run(command, check=True)
            else:
                dist_store.get("over")
            try:
                gather(rank)
            finally:
                dist_store.set("over", "")

        return attack


    def test_forged(attack):
        attack(1, pickle.dumps(Payload()))


    def test_copied_from_another_call(attack, gather, rank):
        assert gather(rank) == [0, 1]
        attack(2, other=1)


    def test_next(gather, rank):
        assert gather(rank) == [0, 1]
"""


def _check_attacks(suite: Suite, run: Run) -> None:
    """Check the tests in whose store another user has written."""
    assert not (suite.path / "ran").exists(), f"code of another user has run: {(suite.path / 'ran').read_text()}"
    names = ("test_forged", "test_copied_from_another_call")
    assert {name: run.result(name) for name in (*names, "test_next")} == {
        **dict.fromkeys(names, "FAILED"),
        "test_next": "PASSED",
    }
    # The traceback ends at the test's call, not in the plugin's code.
    error = (
        r"^>           gather\(rank\)\n"
        r"E .*'gather/\d+/\d/1' in the world's store was not written by a rank of this test"
    )
    assert len(re.findall(error, run.text, re.MULTILINE)) == 2, run.text
    assert run.text.count("rank 0: failed at test_attacks.py:") == 2


_LARGE = """
    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu")
    MIB = 1 << 20


    @pytest.mark.parametrize("size", [4 * MIB, 8 * MIB, 9 * MIB + 1])
    def test_gather(size, gather, rank):
        assert gather(bytes([rank]) * size) == [bytes([rank]) * size for rank in range(2)]


    def test_forgotten(gather, world_store):
        import torch.distributed as dist

        def count_keys():
            gather(None)
            dist.barrier()  # All ranks have removed what they set before.
            count = world_store.num_keys()
            dist.barrier()
            return count

        count_keys()  # The first barrier sets keys.
        before = count_keys()
        gather(bytes(9 * MIB))
        assert count_keys() == before


    def test_refused(dist_store):
        dist_store.set("weights", bytes(9 * MIB))
        dist_store.get("weights")


    def test_after_refused(gather, rank):
        assert gather(rank) == [0, 1]


    def test_not_noticed(dist_store, rank):
        if rank == 0:
            try:
                dist_store.append("weights", "x" * (8 * MIB + 1))
            except RuntimeError:
                pass


    def test_after_not_noticed(process_group, gather, rank):
        import torch.distributed as dist

        group = dist.new_group()
        assert gather(rank) == [0, 1]  # A rank may still connect to the others.
        dist.destroy_process_group(group)
"""


@needs_torch(2, 8)
def test_large_values_are_gathered_and_neither_they_nor_those_of_other_users_reach_the_next_test(suite: Suite) -> None:
    """Only root can act as another user."""
    suite.write("test_large.py", _LARGE)
    if os.geteuid() == 0:
        suite.write("stranger.py", _OTHER_USER)
        suite.write("test_attacks.py", _ATTACKS)
    run = suite.run("--accel-timeout=60", "-p", "no:randomly")

    names = [f"test_gather[{size}]" for size in (4 << 20, 8 << 20, (9 << 20) + 1)]
    names += ["test_forgotten", "test_after_refused", "test_not_noticed", "test_after_not_noticed"]
    assert {name: run.result(name) for name in names} == dict.fromkeys(names, "PASSED")
    assert run.result("test_refused") == "FAILED"
    text = "torch's store ends the connection of a rank that sends a value of more than 8 MiB"
    assert text in run.failure("test_refused")
    if os.geteuid() == 0:
        _check_attacks(suite, run)


_SCOPES = """
    import os
    import time

    import psutil
    import pytest
    from tests.inner import note


    @pytest.fixture(scope="session")
    def token(gather, world_store, rank):
        first = gather(os.getpid())[0]
        if rank == 0:
            world_store.set("token", f"of {first}")
            note("begun", first)
        yield world_store.get("token").decode()
        assert gather(os.getpid())[0] == first
        if rank == 1:
            # The store ends with rank 0, which has nothing more to do.
            until = time.monotonic() + 0.2
            while psutil.pid_exists(first) and time.monotonic() < until:
                time.sleep(0.01)
            assert world_store.get("token")
            note("ended", first)


    @pytest.fixture(scope="module")
    def service(request, gather, rank):
        started = f"for {request.module.__name__}" if rank == 0 else None
        yield gather(started)[0]
        assert gather(rank) == [0, 1]
        if rank == 0:
            note("services", started)
"""
_TEST_SCOPES = """
    import pytest


    @pytest.mark.distributed(2, init=False)
    @pytest.mark.parametrize("number", range(3))
    def test_{name}(number, service, token, gather, world_store, dist_store, free_port, rank):
        assert service == "for test_{name}"
        assert gather((number, token, free_port)) == [(number, token, free_port)] * 2
        assert world_store.get("token") == token.encode()
        assert dist_store.add("asked", 1) <= 2
        gather(None)
        assert dist_store.add("asked", 0) == 2
        assert not (number == {failing} and rank == 1)
"""


@pytest.mark.long
def test_fixtures_of_any_scope_can_exchange_data(suite: Suite) -> None:
    """This includes their teardown: after the last test, before the next test, and when ranks are shut down."""
    suite.write("conftest.py", _SCOPES)
    suite.write("test_one.py", _TEST_SCOPES.format(name="one", failing=1))
    suite.write("test_two.py", _TEST_SCOPES.format(name="two", failing=None))
    run = suite.run()

    assert run.outcomes() == {
        **{f"test_one[{number}]": "FAILED" if number == 1 else "PASSED" for number in range(3)},
        **{f"test_two[{number}]": "PASSED" for number in range(3)},
    }
    # The ranks of the failed test end while the other tests run.
    assert sorted(suite.read("services")) == ["for test_one", "for test_one", "for test_two"]
    # The ranks of the failed test are replaced. Before they exit, they tear down their fixtures as other ranks do.
    assert len(set(suite.read("begun"))) == 2
    assert sorted(suite.read("ended")) == sorted(suite.read("begun"))
    assert "of its session" not in run.text
