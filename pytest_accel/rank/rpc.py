"""torch's RPC (``torch.distributed.rpc``) in a rank: how often it was initialised, and whether it runs.

torch keeps one context of remote references in a process, with the agent of the first RPC. `rpc.shutdown` marks it as
destroyed, for good (torch, ``csrc/distributed/rpc/rref_context.cpp``, ``RRefContext::destroyInstance``). It then tells
no owner that a reference is gone, so that a second RPC with references waits for ever when it is shut down. A process
is therefore good for one RPC.
"""

from __future__ import annotations

import sys
from typing import Any


def initialisations() -> int:
    """Return how often this process has called ``init_rpc``. Costs next to nothing, and imports nothing."""
    # torch counts the calls to give each a prefix of its own in the store.
    return getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0)


def is_running() -> bool:
    """Return whether the RPC that was initialised last has not been shut down."""
    rpc: Any = sys.modules["torch.distributed.rpc"]
    return bool(rpc._is_current_rpc_agent_set())
