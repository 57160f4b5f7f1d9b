"""Ranks without processes: ``distributed(4096, backend="fake")`` runs one process of a group of any size.

The process group is torch's fake group. Its collectives exchange nothing, so a test in such a group sees shapes,
placements and memory of sizes that no machine has, and never values. A call that needs another rank fails the test.

Messages and functions that exchange objects are refused. Collectives of tensors are not: they leave this rank's own
data, or copies of it, in their results (older releases of torch leave some results uninitialised). Filling the
results with NaN, so that no comparison of values passes, was rejected: a loss of NaN changes what the code under test
does (loss scaling, checks for finite gradients), integers have no NaN, and some of them are sizes (of the tokens for
each expert). On the meta device there are no values, and reading one is an error.

The module runs in ranks only. The kernel opens the group like any other, with a size of its own
(`core.world_key.WorldKey.fake_size`), and knows which arguments of the marks and which fixtures have no meaning in it
(`driver/item_plan.py`, `core/missing_mark.py`). The world key has the backend, so the process runs no other tests, and
the functions that are replaced in it are not restored.

Tests: ``tests/features/fake_group``. Section: "Sizes that no machine has" in ``docs/how-to/process-groups.md``.
"""

from __future__ import annotations

from collections.abc import Generator
from os.path import relpath
from sys import _getframe
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_accel.compat import torch_api
from pytest_accel.rank.operations import find_place, replace_method
from pytest_accel.rank.process_group import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from pytest_accel.rank.context import RankContext

_MESSAGES = ("send", "recv", "recv_anysource")


class _RefusedCalls:
    """Pytest plugin of a rank that fails a phase if the exception of a refused call was handled, or lost in a thread.

    A test, a fixture or a library may make the call. A call in a thread counts for the phase that runs at the time.
    """

    def __init__(self, folder: str) -> None:
        """Places are named relative to `folder`."""
        self._folder = folder
        self._texts: list[str] = []

    def refuse(self, what: str, path: str, line: int) -> NoReturn:
        """Fail the test with an exception of pytest, which code that handles errors of torch does not handle."""
        __tracebackhide__ = True
        self._texts.append(f"{what} ({relpath(path, self._folder)}:{line})")
        pytest.fail(what)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        __tracebackhide__ = True
        try:
            result = yield
        except pytest.skip.Exception:
            self._fail_if_refused()
            raise
        except BaseException:
            self._texts.clear()
            raise
        self._fail_if_refused()
        return result

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def _fail_if_refused(self) -> None:
        __tracebackhide__ = True
        texts, self._texts = self._texts, []
        if texts:
            raise pytest.fail.Exception(texts[0], pytrace=False) from None


def pytest_accel_open_fake_group(context: RankContext) -> Store:
    """Have torch refuse what needs other ranks, from now on; return a store for fake process groups.

    Raise :class:`BackendError` if torch lacks the backend.
    """
    import torch.distributed as dist

    calls = _RefusedCalls(str(context.config.invocation_params.dir))
    context.config.pluginmanager.register(calls, "accel-refused-calls")
    why = (
        f'needs other ranks, and @pytest.mark.distributed({context.spec.key.group_size}, backend="fake") runs one '
        "process: use another backend, and no more ranks than the machine can run"
    )

    def issue(original: Any, group: ProcessGroup, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        name = original.__name__
        function, code, line = find_place(name, _getframe(2))
        # A receive would leave its buffer as it is, and a send that nobody receives would complete. Functions that
        # exchange objects would read sizes from uninitialised memory, or return one rank's object for each, so that a
        # comparison of ranks always passes. After a broadcast from this rank, a real rank has the same objects.
        is_of_objects = "_object" in function and not (name == "broadcast" and args[1].rootRank == group.rank())
        if name in _MESSAGES or is_of_objects:
            calls.refuse(f"{function} {why}", code.co_filename, line)
        return original(group, *args, **named)

    def refuse_store(*args: object, **named: object) -> NoReturn:
        __tracebackhide__ = True
        _, code, line = find_place("", _getframe(1))
        calls.refuse(f"the store of the process group {why}", code.co_filename, line)

    for name in (*_MESSAGES, *torch_api.collective_methods()):
        replace_method(dist.ProcessGroup, name, issue)
    dist.set_debug_level(dist.DebugLevel.OFF)  # Else torch compares the collectives of all ranks through the store.
    try:
        store = torch_api.make_fake_store(refuse_store)
    except ImportError as error:
        raise BackendError(
            f'backend="fake" is not available in torch {torch_api.version()}: {error}; use another torch or backend'
        ) from error
    # Another backend would wait at the address of the group for ranks that do not exist.
    torch_api.replace_store_creation(lambda *args, **named: store)
    return store
