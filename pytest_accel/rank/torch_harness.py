"""torch's ``MultiProcessTestCase`` in a rank that is there already.

Read from ``torch/testing/_internal/common_distributed.py`` of torch 2.13. There a parent process runs ``setUp``, which
starts a process for each rank; each makes the test case anew, runs its method without ``setUp`` and ``tearDown``, and
ends; the parent looks at the exit codes and runs ``tearDown``. Here each rank is the parent of itself: where the parent
would join its processes, the rank does what the child would have done, with what rank 0 had for its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import unittest
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_accel.rank import process_group, rank_environment

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext
    from pytest_accel.rank.signed_store import SignedStore

_NAMES_THE_TEST = "PYTEST_CURRENT_TEST"
_SKIP_PATIENCE = timedelta(seconds=10)
"""How long rank 0, which skips, leaves the others what its `tearDown` may remove. Those that go on may never end."""

_GROUP_PATIENCE = timedelta(seconds=1)
"""How long a rank keeps its groups for others that may still be connecting to it.

torch's calls that make a group return when this rank has its connections; closing them at once fails a slower rank. Not
for longer: a test may be about a rank that has gone.
"""


class _Start(NamedTuple):
    """What rank 0 has for its children."""

    file_name: str
    environment: dict[str, str | None]
    """What it has changed; None: unset."""


class HarnessInRank:
    """Has test cases that would start ranks be run by this one."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._identity = rank_environment.identity(context.spec, context.rank, port=0).keys()
        """The names of the variables that say which rank this is: torch's harness says it to the test case alone."""
        self._at_first = {name: value for name, value in os.environ.items() if name not in self._identity}
        self._harness: Any = None
        self._starter: Any = None
        """torch's own `_start_processes`."""
        self._joiner: Any = None
        self._files: list[str] = []
        """The test's, which torch leaves where the test does not remove them."""

    def install(self, harness: Any) -> None:
        """Replace what torch's module does with processes; once is enough."""
        if self._harness is not None:
            return
        self._harness, case = harness, harness.MultiProcessTestCase
        self._starter, self._joiner = case._start_processes, case._join_processes
        case._start_processes = _note_start
        case._join_processes = lambda case, fn: self._join(case, fn)
        case.run_test = lambda case, test_name, parent_pipe: self._run_test(case, test_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Clears up. What identifies the rank is hidden from the parent that it plays, which may set it."""
        __tracebackhide__ = True
        base = getattr(self._harness, "MultiProcessTestCase", None)
        case: Any = getattr(item, "cls", None)
        if base is None or case is None or not issubclass(case, base) or case.join_or_run is not base.join_or_run:
            return (yield)
        for hidden in self._identity:
            os.environ.pop(hidden, None)
        try:
            return (yield)
        finally:
            for name, value in self._context.variables.items():
                if value is None:
                    os.environb.pop(name, None)
                elif os.environb.get(name) != value:
                    os.environb[name] = value
            while self._files:
                Path(self._files.pop()).unlink(missing_ok=True)

    def _join(self, case: Any, function: Any) -> None:
        """In place of the parent's waiting for its processes."""
        __tracebackhide__ = True
        self._files.append(case.file_name)
        start = self._agree(case)
        if start is None:
            raise unittest.SkipTest("its setUp has started no processes")
        if function in case.skip_return_code_checks or function in case.special_return_code_checks:
            self._run_as_torch(case, function)
            return
        ranks = self._context.spec.ranks
        assert int(case.world_size) == ranks, f"the test case's world_size is {case.world_size}, its world has {ranks}"
        process_group.watch(self._context)
        try:
            with _environment(self._childs_environment(start.environment)):
                self._be_a_child(case, start.file_name)
        except unittest.SkipTest:
            self._end(_SKIP_PATIENCE)
            raise
        self._end(process_group.PATIENCE)

    def _agree(self, case: Any) -> _Start | None:
        """What all ranks are started with, which rank 0 says; None: nothing is to be started."""
        __tracebackhide__ = True
        key = self._key("start")
        if self._context.rank == 0:
            environment = getattr(case, "_accel_environment", None)
            start = None if environment is None else _Start(case.file_name, self._changes(environment))
            self._store.set(key, json.dumps(start).encode())
            return start
        told = json.loads(self._store.get(key))
        return None if told is None else _Start(*told)

    def _changes(self, environment: dict[str, str]) -> dict[str, str | None]:
        """What is set otherwise than it was when the rank began."""
        names = (environment.keys() | self._at_first.keys()) - {_NAMES_THE_TEST}
        return {name: environment.get(name) for name in names if environment.get(name) != self._at_first.get(name)}

    def _childs_environment(self, changes: dict[str, str | None]) -> dict[str, str]:
        """This rank's, with rank 0's changes in place of its own."""
        changed = {**self._at_first, _NAMES_THE_TEST: os.environ.get(_NAMES_THE_TEST), **changes}
        return {name: value for name, value in changed.items() if value is not None}

    def _be_a_child(self, case: Any, file_name: str) -> None:
        """What torch runs in a process of its own, and what its end says there."""
        __tracebackhide__ = True
        options = {"fake_pg": True} if getattr(case, "fake_pg", False) else {}
        try:
            type(case)._run(self._context.rank, case._current_test_name(), file_name, None, **options)
        except SystemExit as end:
            for skip in self._harness.TEST_SKIPS.values():
                if end.code == skip.exit_code:
                    raise unittest.SkipTest(skip.message) from None
            if end.code not in (None, 0):
                raise RuntimeError(f"the rank called sys.exit({end.code!r})") from end

    def _run_test(self, case: Any, test: str) -> None:
        """As in torch, less the thread that hears of a time-out and the exit codes."""
        __tracebackhide__ = True
        self._harness.common_utils.set_rng_seed()
        getattr(case, test)()
        self._meet("left", _GROUP_PATIENCE)
        if case.destroy_pg_upon_exit:
            _destroy_groups()

    def _end(self, patience: timedelta) -> None:
        """Take away what a process would have taken with it; rank 0 then waits for the others as their parent does."""
        _destroy_groups()
        self._meet("ended", patience if self._context.rank == 0 else None)
        if self._context.rank == 0:
            for key in (self._key("start"), *self._keys("left"), *self._keys("ended")):
                self._store.delete(key)

    def _meet(self, word: str, patience: timedelta | None) -> None:
        """Say that this rank has come so far, and wait until all have, but not for longer than `patience`."""
        __tracebackhide__ = True
        keys = self._keys(word)
        self._store.set(keys[self._context.rank], b"")
        if patience is None:
            return
        try:
            self._store.wait(keys, patience)
        except RuntimeError:  # torch's DistStoreError is one.
            return
        for key in keys:
            self._store.get(key)

    @property
    def _store(self) -> SignedStore:
        assert self._context.signed_store is not None
        return self._context.signed_store

    def _key(self, word: str) -> str:
        return f"adopted {self._context.tests} {word}"

    def _keys(self, word: str) -> list[str]:
        """Return the keys by which each rank says `word`."""
        return [self._key(f"{word} {rank}") for rank in range(self._context.spec.ranks)]

    def _run_as_torch(self, case: Any, function: Any) -> None:
        """A test that expects its processes to die is run by rank 0 as torch runs it."""
        __tracebackhide__ = True
        if self._context.rank == 0:
            self._starter(case, case._accel_process)
            self._joiner(case, function)


def _note_start(case: Any, process: Any) -> None:
    """In place of `_start_processes`, in which the children get the parent's environment of that moment."""
    case._accel_environment = dict(os.environ)
    case._accel_process = process


@contextlib.contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """The environment as it is `wanted`, and as it was afterwards, whatever was done to it."""
    before = dict(os.environ)
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: dict[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _destroy_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
