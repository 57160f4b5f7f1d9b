"""Failures of calls that a fake process group cannot serve. Runs in ranks only.

A receive leaves its buffer as it is, and a send that nobody receives completes. Functions that exchange objects read
sizes from uninitialised memory, or return one rank's object as that of each, so that a comparison of the ranks always
passes. These are refused, except for a broadcast from this rank, after which a real rank has the same objects.

Collectives of tensors are not: they leave this rank's own data, or copies of it, in their results (older releases of
torch leave some results uninitialised). The results could be filled with NaN instead, so that no comparison of values
passes. That was rejected: a loss of NaN changes what the code under test does (loss scaling, checks for finite
gradients), integers have no NaN, and some of them are sizes (of the tokens for each expert). On the meta device there
are no values, and reading one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import dumps
from sys import _getframe
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_accel.core import torch_api
from pytest_accel.rank.point_to_point import find_place, replace_method

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_accel.core.world_key import WorldKey

_size = 0
"""Number of ranks of the fake process group."""
_refused: list[str] = []
"""The messages of the calls that were refused in the call of the running test."""


@contextmanager
def failing_after_refusal() -> Iterator[None]:
    """Fail the test that is called in the ``with`` block if it has handled the exception of a refused call."""
    __tracebackhide__ = True
    _refused.clear()
    yield
    if _refused:
        pytest.fail(_refused[0], pytrace=False)


def install(key: WorldKey) -> None:
    """Refuse messages and the exchange of objects in this process from now on."""
    global _size
    import torch.distributed as dist

    _size = key.group_size
    for name in ("send", "recv", "recv_anysource"):
        replace_method(dist.ProcessGroup, name, _refusing(name))
    torch_api.replace_exchanges(_call.__code__)


def refuse_store(*args: object, **named: object) -> NoReturn:
    """Fail the test, which waits for other ranks in the store of the process group."""
    __tracebackhide__ = True
    _refuse("the store of the process group")


def _refusing(name: str) -> Any:
    """Return a function that replaces the method `name` of a process group."""

    def method(self: object, *args: object, **named: object) -> NoReturn:
        __tracebackhide__ = True
        _refuse(find_place(name, _getframe(1))[0])

    return method


def _call(*args: Any, **named: Any) -> None:
    """Call `exchange`. This code replaces that of functions of torch, and runs with the names of torch's module."""
    __tracebackhide__ = True
    from pytest_accel.features.fake_group.refused_calls import exchange

    exchange(*args, **named)


def exchange(*args: Any, **named: Any) -> None:
    """Fail the test, unless the function of torch that calls this broadcasts the objects of this rank."""
    __tracebackhide__ = True
    function = _getframe(1).f_code.co_name
    if function != "broadcast_object_list" or not _broadcasts(*args, **named):
        _refuse(f"dist.{function}")


def _broadcasts(
    object_list: Sequence[object],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
    **options: object,
) -> bool:
    """Return whether this rank is the source of a broadcast. Raise the error of pickle if it cannot send an object."""
    import torch.distributed as dist

    group = group or dist.group.WORLD
    assert group is not None
    source = dist.get_group_rank(group, src or 0) if group_src is None else group_src
    if group.rank() != source:
        return False
    dumps(object_list)
    return True


def _refuse(what: str) -> NoReturn:
    """Fail the test, because `what` needs other ranks.

    The exception is pytest's, which code that handles errors of torch does not handle. It may be lost in a thread.
    """
    __tracebackhide__ = True
    text = (
        f'{what} needs other ranks, and @pytest.mark.distributed({_size}, backend="fake") runs one process: '
        "use another backend, and no more ranks than the machine can run"
    )
    _refused.append(text)
    pytest.fail(text)
