"""The scheduler of xdist's controller: sends each free worker the test that the rule chooses (`rule.py`).

An xdist worker starts a test when it knows the next one, because this decides which fixtures stay. A test that is sent
as the next one would be tied to its worker for as long as the first test runs, which costs up to half of the session's
time. Therefore the next test is only a *hint*: its index is sent with the number of tests subtracted, which denotes
the same item of a list. The worker passes over it (`shims.pass_over_hints`), and any worker may get the test.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.struct_messages import decode
from pytest_accel.features.order import stored_durations
from pytest_accel.features.order.rule import RunOrder
from pytest_accel.features.order.test_demand import CHANNEL, Demand

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


class AccelScheduling:
    """A plugin of the controller, and its scheduler: xdist's own one, replaced after the collection if a test needs it.

    xdist has no hook after the collection that could replace it. Its header shows the name of this class.
    """

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._received: list[bytes] = []
        """The demands that workers have sent, all the same; empty if no test needs a world or a resource.

        Threads receive them, and cannot decode two at a time.
        """
        self._scheduler: Any = None
        self.config = session.config  # pytest-rerunfailures uses it.

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of xdist's protocol for schedulers, ``xdist/scheduler/protocol.py``."""
        return getattr(self._scheduler, name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        channel = node.workerinput[CHANNEL] = node.gateway.newchannel()
        channel.setcallback(self._received.append)

    @pytest.hookimpl(optionalhook=True, wrapper=True, trylast=True)
    def pytest_xdist_make_scheduler(self) -> Generator[None, Any, Any]:
        self._scheduler = yield
        # Keep a scheduler that another plugin has made.
        return self if type(self._scheduler).__module__.partition(".")[0] == "xdist" else self._scheduler

    def schedule(self) -> None:
        own, machine = self._scheduler, self._session.machine
        first, *others = getattr(own, "node2collection", {0: []}).values()
        # xdist's own scheduler reports collections that differ.
        if self._received and first and all(other == first for other in others):
            tasks = decode(self._received[0], Demand).tasks(first, stored_durations.recall(self.config), machine)
            stored_durations.record_times(self.config)
            order, most = RunOrder(tasks, machine.slots), self.config.getoption("maxschedchunk")
            self._scheduler = DeviceScheduling(list(first), order, most)
            for node in own.nodes:
                self._scheduler.add_node(node)
                self._scheduler.add_node_collection(node, first)
        self._scheduler.schedule()


class DeviceScheduling:
    """An xdist scheduler that knows which devices tests need; the methods are those of xdist's protocol."""

    collection_is_completed = True

    def __init__(
        self, collection: list[str], order: RunOrder, most: int | None, clock: Callable[[], float] = monotonic
    ) -> None:
        """`most` is the largest number of tests that are sent together (``--maxschedchunk``)."""
        self.collection = collection
        self._order, self._most, self._clock = order, most, clock
        self._tests: dict[Any, list[int]] = {}
        """By worker: the test that it runs, and those that it will certainly run."""
        self._idle: list[Any] = []
        """The workers that wait for a test. The last one was the last to run one."""

    @property
    def nodes(self) -> list[Any]:
        return list(self._tests)

    @property
    def has_pending(self) -> bool:
        return self._order.left > 0 or any(self._tests.values())

    @property
    def tests_finished(self) -> bool:
        return not self.has_pending

    def add_node(self, node: Any) -> None:
        self._tests[node] = []

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Have a worker wait for tests. Exit if one in place of a dead one has collected others: xdist would wait."""
        if self._order.left and list(collection) != self.collection:
            pytest.exit(
                f"worker {node.gateway.id} has collected other tests than the workers before it, so "
                f"{self._order.left} remaining test(s) cannot be run; all workers must collect the same tests in the "
                "same order",
                returncode=pytest.ExitCode.TESTS_FAILED,
            )
        self._idle.insert(0, node)

    def schedule(self) -> None:
        """Start all tests that can start now; shut idle workers down if none remain."""
        self._idle = [node for node in self._idle if not node.shutting_down]
        while self._idle:
            node = self._idle[-1]
            tests = self._order.start(node, self._clock(), len(self._idle) - 1, self._most)
            if not tests and self._order.left:
                return
            self._idle.pop()
            hint = self._order.likely(node) if tests else None
            try:
                if tests:
                    node.send_runtest_some(tests if hint is None else [*tests, hint - len(self.collection)])
            except OSError:  # The worker has died; xdist will call remove_node(), and no test has crashed.
                self._return(node, tests)
                continue
            self._tests[node] = tests
            if hint is None:
                node.shutdown()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        if item_index < 0:
            return  # A hint.
        self._tests[node].remove(item_index)
        self._order.record(item_index, duration)
        if not self._tests[node]:
            self._order.end(node)
            self._idle.append(node)
            self.schedule()

    def mark_test_pending(self, item: str) -> None:
        self._order.put_back(self.collection.index(item))
        self.schedule()

    def remove_node(self, node: Any) -> str | None:
        """Remove a dead worker and return the test that it ran, or None; its other tests go to other workers."""
        tests = self._tests.pop(node)
        self._idle = [one for one in self._idle if one is not node]
        self._return(node, tests[1:])
        self.schedule()
        return self.collection[tests[0]] if tests else None

    def _return(self, node: Any, tests: Sequence[int]) -> None:
        self._order.end(node)
        for index in tests:
            self._order.put_back(index)
