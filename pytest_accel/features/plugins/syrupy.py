"""Brings syrupy's assertions from ranks to the driver, whose session counts, reports and writes the snapshots.

A rank compares with the stored snapshots and writes nothing. With the report of each phase it sends the asserted
snapshots, the results, and the values that syrupy would write. The driver adds them to its own `SnapshotSession`, as if
the test had run there. Thus ``--snapshot-update`` has one writer in a process, unused snapshots are known, and syrupy's
own merging of xdist workers works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from inspect import ismodule
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.stash_keys import MARKED
from pytest_accel.features.plugins.by_rank import difference, fail, number_of_ranks, shown_path
from pytest_accel.features.plugins.refusals import named_plugins, uses
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, require_parameters, take

WITHOUT = WithoutBridge(
    "syrupy",
    damage="the snapshots of marked tests would count as unused, and --snapshot-update would delete them",
    applies=uses("snapshot"),
)

_RESULT = (
    *("snapshot_location", "snapshot_name", "test_location", "asserted_data", "recalled_data"),
    *("created", "updated", "success", "exception"),
)
"""The fields of syrupy's `AssertionResult`."""
_Change = Literal["created", "updated", "none", "failed"]
"""The change that an assertion makes to a snapshot. ``none``: the stored value is equal."""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps a rank from writing, and sends the assertions of its tests."""
    return _InRank(config)


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that adds the ranks' assertions to this session.

    Raise an error for an unknown release of syrupy.
    """
    session = take("syrupy.session", "SnapshotSession")
    require(session, "finish", "flush_snapshot_write_queue", "queue_snapshot_write", "ran_item")
    require(session, "recall_snapshot", "register_request")
    assertion = take("syrupy.assertion", "SnapshotAssertion")
    require(assertion, "executions", "extension", "num_executions")
    extension = take("syrupy.extensions.base", "AbstractSyrupyExtension")
    require(extension, "get_location", "get_snapshot_name", "matches")
    require_parameters(take("syrupy.assertion", "AssertionResult"), *_RESULT)
    require(_module("exceptions"), "SnapshotDoesNotExist", "TaintedSnapshotError")
    return _InDriver(config)


def _module(name: str) -> Any:
    return import_module(f"syrupy.{name}")


class _InRank:
    """Collects the assertions of a rank's tests, and the values that syrupy would write."""

    def __init__(self, config: pytest.Config) -> None:
        self._config: Any = config
        options = ("update_snapshots", "update_new_snapshots_only")
        self._updates = any(getattr(config.option, name, False) for name in options)
        self._session: Any = None
        self._assertions: list[Any] = []
        """All `SnapshotAssertion` of the running test."""
        self._sent: list[int] = []
        """The number of executions of each assertion that were sent. Shorter than `_assertions` if some are new."""
        self._written: dict[tuple[type, str, object], Any] = {}
        """The values that the running test would write, and reads back: by extension, location and index."""
        self._writes: dict[tuple[str, str], tuple[type, object]] = {}
        """The extension and the index of each of these values: by location and name."""
        # syrupy listens to reports, so a rank does not call its pytest_sessionstart, which makes its session.
        plugin: Any = config.pluginmanager.get_plugin("syrupy")
        plugin.pytest_sessionstart(SimpleNamespace(config=config))
        self._take_over()

    def _take_over(self) -> None:
        """Keep syrupy's session from looking for snapshots and from writing them."""
        session = self._session = self._config._syrupy
        self._recall = session.recall_snapshot
        session.register_request = self._assertions.append
        session.queue_snapshot_write = self._queue_write
        session.recall_snapshot = self._recall_written
        session.flush_snapshot_write_queue = session.finish = lambda: 0

    def _queue_write(self, extension: Any, test_location: Any, data: Any, index: Any) -> None:
        location = extension.get_location(test_location=test_location, index=index)
        name = extension.get_snapshot_name(test_location=test_location, index=index)
        self._written[type(extension), location, index] = data
        self._writes[location, name] = type(extension), index

    def _recall_written(self, extension: Any, test_location: Any, index: Any) -> Any:
        location = extension.get_location(test_location=test_location, index=index)
        data = self._written.get((type(extension), location, index))
        return data if data is not None else self._recall(extension, test_location, index)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._config._syrupy is not self._session:
            self._take_over()  # With `accel_rank_plugins`, syrupy's own hooks may create another session.
        self._assertions.clear()
        self._sent.clear()
        self._writes.clear()
        self._written.clear()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        """Return the assertions of this phase, even if there are none: without data a rank may use any snapshot."""
        results = list(self._new_results())
        requested = [self._reference(type(each.extension)) for each in self._assertions[len(self._sent) :]]
        self._sent[:] = [each.num_executions for each in self._assertions]
        return {"failed": report.failed, "extensions": requested, "results": results}

    def _new_results(self) -> Iterator[dict[str, Any]]:
        for number, assertion in enumerate(self._assertions):
            first = self._sent[number] if number < len(self._sent) else 0
            for at in range(first, assertion.num_executions):
                yield self._result(assertion, assertion.executions[at])

    def _result(self, assertion: Any, result: Any) -> dict[str, Any]:
        write = None
        if result.created or result.updated:
            kind, index = self._writes[result.snapshot_location, result.snapshot_name]
            write = self._reference(kind), str(index) if isinstance(index, str) else int(index)  # type: ignore[call-overload]
        return {
            "extension": self._reference(type(assertion.extension)),
            "location": result.snapshot_location,
            "name": result.snapshot_name,
            # The driver needs a value that matches the stored one only if other ranks may change it.
            "data": _plain(result.asserted_data) if self._updates or not result.success else None,
            "success": result.success,
            "write": write,
        }

    def _reference(self, kind: type) -> tuple[str, str, str | None]:
        """Return where the driver finds the class `kind`: module, qualified name and file."""
        module, name = kind.__module__, kind.__qualname__
        for candidate in _modules(self._config, module):
            if _member(candidate, name) is kind:
                return module, name, getattr(candidate, "__file__", None)
        return module, name, None


class _InDriver:
    """Adds the assertions of ranks to syrupy's session in this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config: Any = config
        self._incomplete: set[str] = set()
        """The ids of tests that have begun, until all ranks have reported the snapshots that they use."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if MARKED in item.stash:
            self._incomplete.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the snapshots of a test that some rank has not reported, as syrupy does for skipped tests."""
        if report.failed and report.when != "teardown" and report.nodeid in self._incomplete:
            self._config._syrupy.ran_item(report.nodeid, "skipped")

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        complete = len(sent) == number_of_ranks(item)
        if complete and (report.when == "call" or all(one["failed"] for one in sent.values())):
            self._incomplete.discard(item.nodeid)
        _Merge(self._config, item, report, sent).run()


@dataclass
class _Merge:
    """Adds the assertions of one phase of a test to syrupy's session."""

    config: Any
    item: pytest.Item
    report: pytest.TestReport
    sent: dict[int, dict[str, Any]]
    """The data by rank."""
    _assertions: dict[type, Any] = field(default_factory=dict)

    @cached_property
    def _test_location(self) -> Any:
        """syrupy's location of the test. Created on demand, because only functions and doctests have one."""
        return _module("location").PyTestLocation(self.item)

    def run(self) -> None:
        for one in self.sent.values():
            for reference in one["extensions"]:
                self._assertion(reference)
        results: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {}
        for rank, one in self.sent.items():
            times: dict[tuple[str, str], int] = {}
            for result in one["results"]:
                place = result["location"], result["name"]
                times[place] = times.get(place, 0) + 1
                results.setdefault((*place, times[place]), {})[rank] = result
        for (location, name, _), by_rank in results.items():
            self._enter(location, name, by_rank)

    def _enter(self, location: str, name: str, by_rank: dict[int, dict[str, Any]]) -> None:
        """Add one assertion of the ranks to the session; have syrupy write its value if the ranks agree on it."""
        success = self._agree(location, name, by_rank) and all(result["success"] for result in by_rank.values())
        change: _Change = "none" if success else "failed"
        writes = [result for result in by_rank.values() if result["write"] is not None]
        if success and writes:
            change = self._write(location, name, writes[0])
        first = next(iter(by_rank.values()))
        executions = self._assertion(first["extension"]).executions
        executions[len(executions)] = _module("assertion").AssertionResult(
            snapshot_location=location,
            snapshot_name=name,
            asserted_data=first["data"],
            recalled_data=None,
            created=change == "created",
            updated=change == "updated",
            success=change != "failed",
            exception=None,
            test_location=self._test_location,
        )

    def _agree(self, location: str, name: str, by_rank: dict[int, dict[str, Any]]) -> bool:
        """Return whether the ranks have asserted the same value. Fail the test if they have not."""
        values = {rank: result["data"] for rank, result in by_rank.items() if result["data"] is not None}
        write = next((result["write"] for result in by_rank.values() if result["write"] is not None), None)
        matches = None if write is None else self._extension(write[0])().matches

        def same(left: Any, right: Any) -> bool:
            if type(left) is type(right) and left == right:
                return True
            return matches is not None and bool(matches(serialized_data=right, snapshot_data=left))

        text = difference(values, same)
        if text is not None:
            place = shown_path(self.config, location)
            self._fail(f"the snapshot {name!r} differs between ranks ({place}); it is left as it was\n{text}")
        return text is None

    def _write(self, location: str, name: str, result: dict[str, Any]) -> _Change:
        """Have syrupy write a value on which the ranks agree, and return how that changes the snapshot.

        Compare with the pending writes of this session, which ranks do not know: the test may have run before.
        """
        if len(self.sent) < number_of_ranks(self.item):
            who = ranks_text(list(self.sent))
            return self._left(location, name, f"only {who} reported")
        reference, index = result["write"]
        extension = self._extension(reference)()
        here = (
            extension.get_location(test_location=self._test_location, index=index),
            extension.get_snapshot_name(test_location=self._test_location, index=index),
        )
        if here != (location, name):
            self._fail(
                f"the snapshot {name!r} of {location} cannot be written: outside of the test's ranks "
                f"{reference[0]}.{reference[1]} calls it {here[1]!r} of {here[0]}"
            )
            return "failed"
        stored, tainted = self._recall(extension, index)
        if stored is not None and not tainted:
            if extension.matches(serialized_data=result["data"], snapshot_data=stored):
                return "none"
            if not self.config.option.update_snapshots:
                return self._left(location, name, "this session has created it with another value")
        self.config._syrupy.queue_snapshot_write(
            extension=extension, test_location=self._test_location, data=result["data"], index=index
        )
        return "created" if stored is None else "updated"

    def _recall(self, extension: Any, index: Any) -> tuple[Any, bool]:
        """Return the value that is stored or about to be written (None: there is none), and whether it is tainted."""
        exceptions = _module("exceptions")
        try:
            return self.config._syrupy.recall_snapshot(extension, self._test_location, index), False
        except exceptions.SnapshotDoesNotExist:
            return None, False
        except exceptions.TaintedSnapshotError as error:
            return error.snapshot_data, True

    def _left(self, location: str, name: str, reason: str) -> _Change:
        self._fail(f"the snapshot {name!r} is left as it was ({shown_path(self.config, location)}): {reason}")
        return "failed"

    def _fail(self, text: str) -> None:
        fail(self.report, "syrupy", text)

    def _assertion(self, reference: tuple[str, str, str | None]) -> Any:
        """Return this session's assertion with the extension `reference`. Creating it has syrupy discover snapshots."""
        extension = self._extension(reference)
        if extension not in self._assertions:
            self._assertions[extension] = _module("assertion").SnapshotAssertion(
                session=self.config._syrupy,
                extension_class=extension,
                test_location=self._test_location,
                update_snapshots=self.config.option.update_snapshots,
            )
        return self._assertions[extension]

    def _extension(self, reference: tuple[str, str, str | None]) -> Any:
        """Return the class of the extension `reference` in this process; raise LookupError if it cannot be found."""
        module, name, file = reference
        if file is not None:
            with suppress(ImportError):
                import_module(module)  # A test may have imported it in the ranks only.
            for candidate in _modules(self.config, module):
                found = _member(candidate, name)
                if isinstance(found, type) and getattr(candidate, "__file__", None) == file:
                    return found
        raise LookupError(
            f"the snapshot extension {module}.{name} cannot be found outside of the test's ranks; "
            "define it at the top level of a module, a test file or a conftest"
        )


def _modules(config: pytest.Config, name: str) -> Iterator[object]:
    """Yield the modules called `name`. Conftests of several folders may have the same name."""
    if name in sys.modules:
        yield sys.modules[name]
    for _, plugin in named_plugins(config):
        if ismodule(plugin) and plugin.__name__ == name:
            yield plugin


def _member(module: object, name: str) -> object:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _plain(data: Any) -> Any:
    """Return serialized data as plain str or bytes, whatever subclass an extension has made."""
    return str(data) if isinstance(data, str) else bytes(data) if isinstance(data, (bytearray, bytes)) else data
