"""Tests of the hints for errors of torch, which are recognized by their text."""

from __future__ import annotations

import socket

import pytest

from pytest_accel.compat.torch_errors import add_hint, explain

_NO_GROUP = ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
_NO_RANK = ValueError(
    "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"
)
_NO_LOCAL_RANK = RuntimeError("LOCAL_RANK is not in the environment. Consider passing fallback_rank to allow ...")
_SECOND_INIT = ValueError("trying to initialize the default process group twice!")
_LISTEN_FAILED = "The server socket has failed to listen on any local network address. "
_IN_USE = f"{_LISTEN_FAILED}port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
_IN_USE_OLD_TORCH = (
    f"{_LISTEN_FAILED}The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
)


@pytest.mark.parametrize(
    ("error", "grouped", "init", "hint"),
    [
        (_NO_GROUP, False, True, "this test has no @pytest.mark.distributed, so it ran in one process"),
        (_NO_GROUP, True, True, None),
        (RuntimeError(f"a child has failed:\n{_NO_GROUP}"), False, True, None),
        (_SECOND_INIT, True, True, "@pytest.mark.distributed(init=False)"),
        (_SECOND_INIT, True, False, None),
        (_SECOND_INIT, False, False, None),
        (RuntimeError(_IN_USE), True, True, "free_port"),
        (RuntimeError(_IN_USE_OLD_TORCH), True, True, "free_port"),
        (RuntimeError(f"Traceback of a child:\nError: {_IN_USE}"), True, True, "free_port"),
        (RuntimeError(_LISTEN_FAILED), True, True, None),
    ],
)
def test_an_error_is_explained_by_what_the_mark_of_its_test_says(
    error: Exception, grouped: bool, init: bool, hint: str | None
) -> None:
    found = explain(error, grouped=grouped, init=init)
    assert found is None if hint is None else hint in str(found)


@pytest.mark.parametrize("error", [_NO_GROUP, _NO_RANK, _NO_LOCAL_RANK])
def test_a_missing_group_is_not_explained_in_a_process_of_a_launcher(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain(error, grouped=False) is not None
    place = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert explain(error, grouped=False) is None


def test_a_port_in_use_of_a_socket_is_explained_in_ranks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use") as raised:
        socket.create_server(server.getsockname())
    assert explain(raised.value, grouped=True) == "the fixture free_port has a port that no other test uses"
    assert explain(raised.value, grouped=False) is None


def test_causes_are_searched_unless_the_error_is_an_assertion() -> None:
    error = RuntimeError("no group")
    error.__cause__ = _SECOND_INIT
    assert explain(error, grouped=True, init=True) == explain(_SECOND_INIT, grouped=True, init=True)
    assertion = AssertionError(str(_SECOND_INIT))
    assertion.__cause__ = _SECOND_INIT
    assert explain(assertion, grouped=True, init=True) is None


def test_an_error_that_is_raised_again_has_one_hint() -> None:
    error = ValueError(str(_SECOND_INIT))
    found = explain(error, grouped=True, init=True)
    assert found is not None
    add_hint(error, found)
    add_hint(error, found)
    assert vars(error)["__notes__"] == [found]
