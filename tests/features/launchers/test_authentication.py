"""Tests of the proofs of a shared secret, and of the frames of an authenticated connection."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from pytest_accel.features.launchers.authentication import (
    ForgedFrame,
    Peer,
    SealedFrames,
    WrongSecret,
    admit_caller,
    prove_caller,
)
from pytest_accel.features.launchers.handshakes import Refused
from pytest_accel.messages.struct_messages import LENGTH, frame
from tests.features.launchers.links import frames_pair


def take_all(frames: SealedFrames, received: bytes) -> list[bytes]:
    at, found = 0, []
    while at < len(received) and not frames.missing(received, at):
        data, at = frames.take(received, at)
        found.append(data)
    return found


def test_frames_arrive_in_both_directions() -> None:
    here, there = frames_pair()
    for sender, receiver in ((here, there), (there, here)):
        sent = sender.pack(b"first") + sender.pack(b"")
        assert receiver.missing(sent[:2]) == LENGTH.size - 2
        assert receiver.missing(sent[: LENGTH.size]) == len(b"first") + 16
        assert take_all(receiver, sent) == [b"first", b""]


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda one, two: one + frame(b"other") + one[-16:], id="forged"),
        pytest.param(lambda one, two: one + two[:5] + b"X" + two[6:], id="altered"),
        pytest.param(lambda one, two: one + one, id="replayed"),
        pytest.param(lambda one, two: two, id="left out"),
        pytest.param(lambda one, two: one + LENGTH.pack((1 << 24) + 1), id="too long"),
        pytest.param(lambda one, two: one + LENGTH.pack(-1), id="negative length"),
    ],
)
def test_a_manipulated_frame_is_detected(tamper: Callable[[bytes, bytes], bytes]) -> None:
    here, there = frames_pair()
    with pytest.raises(ForgedFrame, match="a frame failed authentication"):
        take_all(there, tamper(here.pack(b"first"), here.pack(b"second")))


def test_a_frame_that_is_sent_back_is_detected() -> None:
    here, _ = frames_pair()
    with pytest.raises(ForgedFrame):
        take_all(here, here.pack(b"first"))


JOB = ("mpirun", "a")
SECRET = b"nobody can guess this one"


def admit() -> Generator[bytes | int, bytes, Peer]:
    """Return a listener that waits for a caller's random number."""
    listener = admit_caller(SECRET, JOB, range(1, 3), print)
    assert next(listener) == 40
    return listener


def test_both_ends_of_an_honest_handshake_have_one_key() -> None:
    listener, caller = admit(), prove_caller(SECRET, JOB, 2)
    call = next(caller)
    assert isinstance(call, bytes)
    answer = listener.send(call)
    caller.send(b"")
    assert isinstance(answer, bytes)
    listener.send(b"")
    proof = caller.send(answer)
    assert isinstance(proof, bytes)
    with pytest.raises(StopIteration) as here:
        listener.send(proof)
    with pytest.raises(StopIteration) as there:
        caller.send(b"")
    assert here.value.value == there.value.value
    assert here.value.value.rank == 2


@pytest.mark.parametrize("on_another", [False, True])
def test_a_listener_rejects_its_own_messages_as_proof(on_another: bool) -> None:
    first, second = admit(), admit()
    answer = first.send(b"accel-2\n" + bytes(32))
    assert isinstance(answer, bytes)
    if on_another:
        answer = second.send(b"accel-2\n" + answer[8:40])
        assert isinstance(answer, bytes)
    assert first.send(b"") == 37
    with pytest.raises(Refused, match="does not know the secret"):
        first.send(b"\x01" + (1).to_bytes(4, "little") + answer[40:])


@pytest.mark.parametrize("whose", ["its own", "another caller's"])
def test_a_caller_rejects_messages_of_callers_and_says_nothing_but_its_rank(whose: str) -> None:
    callers = [prove_caller(SECRET, JOB, rank) for rank in (1, 2)]
    calls = [next(caller) for caller in callers]
    assert calls[0] != calls[1]
    relayed = calls[0] if whose == "its own" else calls[1]
    assert isinstance(relayed, bytes)
    assert callers[0].send(b"") == 72
    assert callers[0].send(relayed + relayed[8:]) == b"\0" + (1).to_bytes(4, "little") + bytes(32)
    with pytest.raises(WrongSecret):
        callers[0].send(b"")
