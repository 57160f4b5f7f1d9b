"""Tests of the shortening of gloo's errors in the report of a failure."""

from __future__ import annotations

import pytest

from pytest_accel.core.truncation import cut_failure, cut_gloo

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:28074. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
    "before reporting an error. GLHF! \N{BEACH WITH UMBRELLA}\N{VARIATION SELECTOR-16}"
)
RESET = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:420: Connection reset by peer. This "
    "is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote worker "
    "before reporting an error. GLHF! \N{BEACH WITH UMBRELLA}\N{VARIATION SELECTOR-16}"
)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (CLOSED, "gloo: Connection closed by peer [127.0.0.1]:28074"),
        (f"E   RuntimeError: {RESET}", "E   RuntimeError: gloo: Read error [127.0.0.1]:420: Connection reset by peer"),
        (f"{CLOSED}\nin step 3", "gloo: Connection closed by peer [127.0.0.1]:28074\nin step 3"),
        ("[/home/me/step.cc:3] Connection closed by peer", "[/home/me/step.cc:3] Connection closed by peer"),
    ],
)
def test_an_error_of_gloo_is_shortened(text: str, short: str) -> None:
    assert cut_gloo(text) == short


def test_a_failure_has_the_shortened_error_in_its_traceback_and_message() -> None:
    traceback = {"reprentries": [{"data": {"lines": [f"E   RuntimeError: {CLOSED}"]}}, {"data": None}]}
    crash = {"path": "test_it.py", "lineno": 3, "message": f"RuntimeError: {CLOSED}"}
    longrepr = {"reprtraceback": traceback, "reprcrash": crash, "chain": [(traceback, crash, None)]}
    cut_failure(longrepr)
    assert crash["message"] == "RuntimeError: gloo: Connection closed by peer [127.0.0.1]:28074"
    assert "typically" not in str(longrepr)
