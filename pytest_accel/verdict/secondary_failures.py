"""Failures of a rank that only say that another rank is gone or has not come: pure."""

from __future__ import annotations

from pytest_accel.core.messages import ExceptionSketch

_LOST = "lost its connection to another rank"
_WAITED = "waited in vain for another rank"

_SIGNS = {
    # gloo's transport (gloo/transport/tcp/pair.cc) and c10d's sockets (torch/csrc/distributed/c10d/socket.cpp).
    "Connection closed by peer": _LOST,
    "Connection reset by peer": _LOST,
    "Broken pipe": _LOST,
    "Failed to recv, got 0 bytes": _LOST,
    # NCCL: ncclRemoteError, and what ProcessGroupNCCL says once it has given up a communicator.
    "remote process exited or there was a network error": _LOST,
    "NCCL communicator was aborted": _LOST,
    # TCPStore and its PrefixStore (TCPStore.cpp), gloo's waits, and torch.distributed.monitored_barrier.
    "Socket Timeout": _WAITED,
    "wait timeout after": _WAITED,
    "store.get": _WAITED,
    "Application timeout caused pair closure": _WAITED,
    "failed to pass monitoredBarrier": _WAITED,
    # This plugin's own (bridges/benchmark.py).
    "rank 0 has failed and runs no more of the benchmark": _WAITED,
}
"""Parts of the texts with which torch's backends fail in a rank that another has left alone."""

_TYPES = {
    ("threading", "BrokenBarrierError"): "found a barrier broken",
    ("builtins", "ConnectionResetError"): _LOST,
    ("builtins", "BrokenPipeError"): _LOST,
}


def consequence(error: ExceptionSketch | None) -> str | None:
    """What the failure `error` says of another rank (``lost its connection to another rank``); None: it says more.

    What a test asserts about such a text is a failure of its own. What is raised from such an error is one too.
    """
    if error is not None and error.peer is not None:
        return f"an example failed on rank {error.peer}"
    while error is not None:
        if (error.module, error.qualname) == ("builtins", "AssertionError"):
            return None
        said = _TYPES.get((error.module, error.qualname))
        said = said or next((words for sign, words in _SIGNS.items() if sign in error.text), None)
        if said is not None:
            return said
        error = error.cause
    return None
