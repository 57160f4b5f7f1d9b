"""The state of torch's RPC (``torch.distributed.rpc``) in a rank. A process can use RPC only once.

torch has one context of remote references in a process, with the agent of the first RPC. `rpc.shutdown` marks it as
destroyed permanently (torch, ``csrc/distributed/rpc/rref_context.cpp``, ``RRefContext::destroyInstance``). A destroyed
context does not notify owners of deleted references, so the shutdown of a second RPC with references waits forever.
"""

from __future__ import annotations

import sys
from typing import Any


def initialisations() -> int:
    """Return how often this process has called ``init_rpc``. Import nothing, and take hardly any time."""
    # torch counts the calls, because each has its own prefix in the store.
    return getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0)


def is_running() -> bool:
    """Return whether the RPC that was initialised last is still running."""
    rpc: Any = sys.modules["torch.distributed.rpc"]
    return bool(rpc._is_current_rpc_agent_set())
