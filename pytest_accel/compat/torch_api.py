"""All uses of torch's names that are private, or younger than the oldest torch that is supported.

Each function says since which release torch has its names, and what happens without them. A private name without a
release is in all releases that the tests are run with: 2.4 to 2.15. A test forbids such names in other modules, except
names of torch's test harness (`features/adoption/`): the adopted tests import this private module themselves.

Importing this module does not import torch. The functions do, or find it in ``sys.modules``, so they are called where
torch may be imported: in ranks, and in temporary processes. Functions that are called elsewhere get the module as an
argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from json import loads
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from socket import socket
    from types import CodeType

    from torch.distributed import ProcessGroup, Store, TCPStore

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""The methods of `ProcessGroup` that start a collective. Each release has most of them."""
_OF_NO_KEY = ("timeout", "set_timeout", "clone")
"""The methods of `Store` that neither read nor set keys."""


def version() -> str:
    """Return the version of the imported torch."""
    import torch

    return str(torch.__version__)


# Accelerators


def accelerator() -> tuple[str, int] | None:
    """Return the type and the number of devices of torch's accelerator; None if it has none.

    `torch.accelerator`: since torch 2.6. Without it, this raises RuntimeError.
    """
    import torch

    if not hasattr(torch, "accelerator"):
        raise RuntimeError(f"torch {torch.__version__} cannot list them: torch.accelerator is new in torch 2.6")
    kind = accelerator_type(torch)
    return None if kind is None else (kind, torch.accelerator.device_count())


def accelerator_type(torch: Any) -> str | None:
    """Return the type of the accelerator of the module `torch`; None if it has none. This initialises no runtime.

    `torch.accelerator`: since torch 2.6. Without it, the type is ``cuda``, the only type that is looked for. In torch
    2.6, `current_accelerator` raises RuntimeError if there is none.
    """
    if not hasattr(torch, "accelerator"):
        return "cuda"
    with suppress(RuntimeError):
        return getattr(torch.accelerator.current_accelerator(), "type", None)
    return None


def device_uuid(properties: Any) -> Any:
    """Return the UUID in the properties of a device of CUDA or XPU; None if torch does not report it.

    CUDA's properties have it since torch 2.5. Without it, the UUIDs of devices are not compared.
    """
    return getattr(properties, "uuid", None)


def accelerator_error(torch: Any) -> type[Exception] | None:
    """Return the class of the errors of devices.

    `torch.AcceleratorError`: since torch 2.8. Without it, this returns None, and errors that a test has caught stay
    unknown.
    """
    return getattr(torch, "AcceleratorError", None)


def cublas_workspace_clearing(torch: Any) -> Callable[[], object] | None:
    """Return the function that frees the workspaces of cuBLAS, which torch's own leak check calls.

    Return None if torch is not built for CUDA, or is no module.
    """
    return getattr(getattr(torch, "_C", None), "_cuda_clearCublasWorkspaces", None)


def default_device(torch: Any) -> Any:
    """Return the default device of the module `torch`.

    In torch 2.8 and older, `torch.get_default_device` raises AttributeError if ``set_default_device(None)`` has been
    called, which sets torch's initial state: the CPU.
    """
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


# Stores


def serves_with_libuv() -> bool:
    """Return whether :func:`serve_store` uses the implementation with libuv: since torch 2.8.

    libuv's store ends the connection of a client that sends a large key or value; the other store accepts any size.
    """
    import torch

    return torch.__version__ >= "2.8"


def serve_store(host: str, size: int, timeout: Any, listening: socket) -> TCPStore:
    """Return a store that serves at the bound socket `listening`, which it closes. It waits for no clients.

    torch's default implementation, with libuv, can take a socket in torch 2.8, and cannot in 2.6. Clients can use a
    store of either implementation.
    """
    import torch.distributed as dist

    port = listening.getsockname()[1]
    return dist.TCPStore(
        *(host, port, size, True, timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=serves_with_libuv(),
    )


def replace_store_creation(create: Callable[..., Store]) -> None:
    """Replace the function that opens a store for ``env://`` and ``tcp://`` with `create`.

    The first argument of `create` is torch's own function; all others are the arguments of this function.
    """
    # torch.distributed has a function of the same name.
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    rendezvous._create_c10d_store = partial(create, rendezvous._create_c10d_store)


# Process groups


def groups() -> dict[ProcessGroup, str]:
    """Return the process groups of this process and their names; empty if torch.distributed is not imported."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return {} if module is None else module._world.pg_names.copy()


def default_group() -> ProcessGroup | None:
    """Return the default process group of this process; None if it has none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return None if module is None else module._world.default_pg


def created_groups() -> int:
    """Return how many groups torch has numbered in this process. torch derives the name of the next group from it."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return 0 if module is None else int(module._world.group_count)


def make_fake_store(refuse: Callable[..., NoReturn]) -> Store:
    """Register the backend ``fake``; return a store for its groups, whose methods that use keys are `refuse`.

    Both are in a module for torch's own tests. Without it, this raises ImportError.
    """
    import torch.distributed as dist

    fake_pg: Any = import_module("torch.testing._internal.distributed.fake_pg")
    names = [name for name in vars(dist.Store) if name[0] != "_" and name not in _OF_NO_KEY]
    store: Store = type("FakeStore", (dist.Store,), dict.fromkeys(names, refuse))()
    # If a test initialises a fake group without a store, torch makes one of this class, which has no methods.
    fake_pg.FakeStore = lambda: store
    return store


def default_backend(device_type: str) -> str:
    """Return the backend that torch uses for devices of a type.

    `get_default_backend_for_device`, since torch 2.6, reads the same table.
    """
    import torch.distributed as dist

    backend: str | None = dist.Backend.default_device_backend_map.get(device_type)
    if backend is None:
        raise ValueError(f"Default backend not registered for device : {device_type}")  # torch's text.
    return backend


def backend_name(group: ProcessGroup, device: Any) -> str:
    """Return the name of the backend that runs collectives of `group` on tensors of a `torch.device`.

    The name is empty for fake groups in torch 2.8 and older, where their backend has none.
    """
    with suppress(RuntimeError):
        return group._get_backend(device).name()
    return ""


def sequence_number(group: ProcessGroup) -> int | None:
    """Return the number of the last operation of `group`; None if its backend does not number them."""
    with suppress(RuntimeError):
        return group._get_sequence_number_for_group()  # type: ignore[attr-defined, no-any-return]
    return None


def collective_methods() -> Iterator[str]:
    """Return the names of the methods of `ProcessGroup` that start a collective."""
    import torch.distributed as dist

    return (name for name in _COLLECTIVES if hasattr(dist.ProcessGroup, name))


# The flight recorder


def flight_record() -> dict[str, Any] | None:
    """Return torch's record of the collectives of this process; None if torch keeps no record of all backends.

    `_dump_fr_trace_json`: since torch 2.8, the first release that records gloo's collectives. torch's own analyzer
    (torch.distributed.flight_recorder) reads the same record. Without it, reports of hangs and traces name no
    collectives, and deadlocks are found by the test's timeout.
    """
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else loads(dump(True, False))


# RPC
#
# A process can use it only once. torch has one context of remote references in a process, with the agent of the first
# RPC. `rpc.shutdown` marks it as destroyed permanently (torch, ``csrc/distributed/rpc/rref_context.cpp``,
# ``RRefContext::destroyInstance``). A destroyed context does not notify owners of deleted references, so the shutdown
# of a second RPC with references waits forever.


def rpc_initialisations() -> int:
    """Return how often this process has called ``init_rpc``. Import nothing, and take hardly any time."""
    # torch counts the calls, because each has its own prefix in the store.
    return getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0)


def rpc_is_running() -> bool:
    """Return whether the RPC that was initialised last is still running."""
    rpc: Any = sys.modules["torch.distributed.rpc"]
    return bool(rpc._is_current_rpc_agent_set())


# The compiler


def watch_operations(before: Callable[[str], None]) -> Any:
    """Return a context manager in which `before` is called with the name of each operation of a process group.

    The name is the dispatcher's, such as ``allreduce_``. The operation is not issued if `before` raises an
    error. `TorchDispatchMode` is not private, but its module is.

    Compiled code passes its collectives through the dispatcher, too, and operations on fake tensors do not come here.
    TorchScript, which is deprecated, does not work in a mode: constants reach operators as numbers, and traces fail.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    def dispatch(self: object, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        packet = getattr(func, "overloadpacket", "")  # Operators of higher order have none.
        namespace, _, name = str(packet).partition(".")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            before(name)
        return func(*args, **(kwargs or {}))

    skip_in_compiler(dispatch.__code__)
    # torch.compile compiles nothing in modes that are not torch's own, as `is_infra_mode` says since torch 2.5.
    # `supports_higher_order_operators`: since torch 2.9. Without it, operators such as `flex_attention` raise
    # NotImplementedError in the mode, as in any mode, unless they are compiled.
    names = {"is_infra_mode": classmethod(lambda cls: True), "supports_higher_order_operators": True}
    watch: Any = type("Watch", (TorchDispatchMode,), names)
    # torch wraps a method that the class has when it is made, and imports its compiler when the wrapper is called.
    watch.__torch_dispatch__ = dispatch
    return watch()


def skip_in_compiler(code: CodeType) -> None:
    """Make torch.compile compile neither a function with this `code` nor what it calls.

    `set_code_exec_strategy`: since torch 2.7. Before, torch.compile may compile what the function calls. Without
    either, it may break its graph there.
    """
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        else:
            eval_frame.skip_code(code)  # type: ignore[attr-defined]
