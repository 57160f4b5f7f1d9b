"""allure-pytest: steps, attachments, fixtures and what tests set with ``allure.dynamic`` in ranks.

A rank has allure's own listener, which builds the same objects as in a session without ranks. It has no logger that
writes them: they are sent to the driver, and added to the test's result there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from uuid import uuid4

import pluggy
import pytest

from pytest_accel.features.plugins.by_rank import (
    by_name,
    group_equal,
    merge_equal,
    number_of_ranks,
    rank_label,
    to_plain,
)
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require

WITHOUT = WithoutBridge("allure-pytest", "steps, attachments, fixtures and other data of ranks")

_LISTENER = "allure_listener"
"""The name under which allure-pytest registers its listener."""

_allure_hook = pluggy.HookimplMarker("allure")

Plain = dict[str, Any]
"""An object of allure's model as plain data."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends what allure has built in a rank; None if no results are written."""
    manager = import_module("allure_commons").plugin_manager
    manager.register(import_module("allure_pytest.helper").AllureTestHelper(config))  # Turns decorators into marks.
    if not config.option.allure_report_dir:
        return None
    # A rank calls all hooks of a class of this module. The driver adds labels of marks, statuses and captured output.
    without = {"pytest_runtest_makereport": None, "pytest_runtest_teardown": None}
    listener: Any = type("RankListener", (import_module("allure_pytest.listener").AllureListener,), without)(config)
    _check(listener)
    manager.register(listener)
    config.pluginmanager.register(listener, _LISTENER)
    rank = _InRank(listener)
    manager.register(rank)
    return rank


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' objects to the results of marked tests; None if no results are written."""
    listener = config.pluginmanager.get_plugin(_LISTENER)
    if listener is None:
        return None
    _check(listener)
    return _InDriver(listener)


def _check(listener: Any) -> None:
    require(listener, "allure_logger")
    require(listener.allure_logger, "get_test", "_items")


def _containers(listener: Any) -> list[Any]:
    """Return the open containers of `listener`: one for each fixture that is set up."""
    items = listener.allure_logger._items
    kind = _model("TestResultContainer")
    return [item for item in map(items.get, list(items)) if isinstance(item, kind)]


def _model(name: str) -> Any:
    return getattr(import_module("allure_commons.model2"), name)


class _InRank:
    """Sends the objects that allure's `listener` has built in a rank. Hooks without ``pytest_`` are allure's."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._test: str | None = None
        self._sent: dict[str, Any] = {}
        """The part of the running test that was sent: its title and parameters, and the length of each list."""
        self._used: set[str] = set()
        """The containers that the driver knows to be used by the running test."""
        self._open: set[str] = set()
        """The containers that the driver knows and that have not been closed."""
        self._closed: list[Any] = []
        self._bodies: dict[str, bytes] = {}
        self._globals: list[Plain] = []

    def send(self, item: pytest.Item, report: pytest.TestReport) -> object:
        result = self._listener.allure_logger.get_test(None)
        if result is None:
            return None
        if result.uuid != self._test:
            self._test, self._sent, self._used = result.uuid, {}, set()
        now = {
            "title": {name: getattr(result, name) for name in ("name", "description", "descriptionHtml")},
            "parameters": _dynamic(item, result.parameters),
        }
        new: dict[str, Any] = {name: self._new(result, name) for name in ("steps", "attachments", "labels", "links")}
        new |= self._fixtures(result.uuid)
        new |= {"globals": self._globals, "bodies": self._bodies}
        self._globals, self._bodies = [], {}
        if not any(new.values()) and all(self._sent.get(name) == value for name, value in now.items()):
            return None
        self._sent |= now
        return to_plain({**now, **new})

    def _new(self, result: Any, name: str) -> list[Plain]:
        entries = getattr(result, name)
        first, self._sent[name] = self._sent.get(name, 0), len(entries)
        return [_as_data(entry) for entry in entries[first:]]

    def _fixtures(self, test: str) -> dict[str, Any]:
        """Return the containers that are new to the driver, those that the `test` uses, and those that were closed."""
        used = [one for one in _containers(self._listener) + self._closed if test in one.children and one.befores]
        used = [one for one in used if one.uuid not in self._used]
        new = [one for one in used if one.uuid not in self._open]
        closed = [one for one in self._closed if one.uuid in self._open or one in new]
        self._used.update(one.uuid for one in used)
        self._open.update(one.uuid for one in new)
        self._open.difference_update(one.uuid for one in closed)
        self._closed = []
        return {
            "fixtures": [
                {"uuid": one.uuid, "start": one.start, "befores": [_as_data(before) for before in one.befores]}
                for one in new
            ],
            "used": [one.uuid for one in used],
            "closed": [
                {"uuid": one.uuid, "stop": one.stop, "afters": [_as_data(after) for after in one.afters]}
                for one in closed
            ],
        }

    @_allure_hook
    def report_container(self, container: Any) -> None:
        self._closed.append(container)

    @_allure_hook
    def report_attached_data(self, body: Any, file_name: str) -> None:
        self._bodies[file_name] = body if isinstance(body, bytes) else str(body).encode()

    @_allure_hook
    def report_attached_file(self, source: str, file_name: str) -> None:
        with open(source, "rb") as file:
            self._bodies[file_name] = file.read()

    @_allure_hook
    def report_globals(self, globals_item: Any) -> None:
        self._globals.append(_as_data(globals_item))


class _InDriver:
    """Adds the objects of ranks to the test's result in the driver's `listener`, and reports the ranks' fixtures."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._hook = import_module("allure_commons").plugin_manager.hook
        self._containers: dict[str, Any] = {}
        """The merged container of each container that is open in a rank, by the uuid in that rank."""

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, Plain]) -> None:
        result = self._listener.allure_logger.get_test(None)
        if result is None:
            return
        for container in _containers(self._listener):
            # The listener has added the test to containers of the driver's fixtures that have the same names.
            container.children[:] = [uuid for uuid in container.children if uuid != result.uuid]
        merge = _Merge(sent, number_of_ranks(item))
        for name, value in next(iter(sent.values()))["title"].items():
            setattr(result, name, value)
        for parameter in merge.parameters():
            _set_parameter(result, parameter)
        for name, kind in (("labels", "Label"), ("links", "Link")):
            entries = getattr(result, name)
            entries += [made for _, data in merge.entries(name) if (made := merge.build(kind, data)) not in entries]
        result.steps += [merge.build("TestStepResult", step, label) for label, step in merge.entries("steps")]
        result.attachments += [merge.build("Attachment", data, label) for label, data in merge.entries("attachments")]
        self._merge_containers(merge, result.uuid)
        for _, data in merge.entries("globals"):
            self._hook.report_globals(globals_item=merge.build("Globals", data))
        for name, body in merge.attached.items():
            self._hook.report_attached_data(body=body, file_name=name)

    def _merge_containers(self, merge: _Merge, test: str) -> None:
        """Create containers for new fixtures, add the `test` to those it uses, and report those that all closed."""
        for group in merge.groups("fixtures"):
            data, label = next(iter(group.values())), rank_label(group, merge.ranks)
            befores = [merge.build("TestBeforeResult", before, label) for before in data["befores"]]
            container = _model("TestResultContainer")(uuid=str(uuid4()), start=data["start"], befores=befores)
            self._containers |= {one["uuid"]: container for one in group.values()}
        for sent in merge.received.values():
            for container in map(self._containers.get, sent["used"]):
                if container is not None and test not in container.children:
                    container.children.append(test)
        closed: dict[str, tuple[Any, dict[int, list[Plain]]]] = {}
        for rank, sent in merge.received.items():
            for end in sent["closed"]:
                if (container := self._containers.pop(end["uuid"], None)) is not None:
                    container.stop = end["stop"]
                    closed.setdefault(container.uuid, (container, {}))[1][rank] = end["afters"]
        for container, afters in closed.values():
            merged = merge_equal(afters, merge.ranks, merge.content)
            container.afters += [merge.build("TestAfterResult", after, label) for label, after in merged]
            if not any(one is container for one in self._containers.values()):
                self._hook.report_container(container=container)

    def pytest_sessionfinish(self) -> None:
        """Report the fixtures that outlive the last test of their world."""
        remaining = {container.uuid: container for container in self._containers.values()}
        self._containers.clear()
        for container in remaining.values():
            self._hook.report_container(container=container)


class _Merge:
    """Merges the data that the ranks of a test have sent with one phase."""

    def __init__(self, received: Mapping[int, Plain], ranks: int) -> None:
        """`received` is the data by rank; `ranks` is the number of all ranks of the test."""
        self.received = received
        self.ranks = ranks
        self.attached: dict[str, bytes] = {}
        """Contents of the attachments of the objects built so far, by file name."""
        self._bodies: dict[str, bytes] = {
            name: body for sent in received.values() for name, body in sent["bodies"].items()
        }

    def groups(self, name: str) -> list[dict[int, Plain]]:
        """Return the entries under `name`; equal entries of several ranks form one group."""
        return group_equal({rank: sent[name] for rank, sent in self.received.items()}, self.content)

    def entries(self, name: str) -> list[tuple[str, Plain]]:
        """Return each distinct entry under `name`, with the label of its ranks before it."""
        return merge_equal({rank: sent[name] for rank, sent in self.received.items()}, self.ranks, self.content)

    def parameters(self) -> list[Plain]:
        """Return the parameters that tests have set; where ranks differ, one for each rank."""
        named = by_name(
            {rank: {one["name"]: one for one in sent["parameters"]} for rank, sent in self.received.items()}
        )
        return [{**parameter, "name": name} for name, parameter in named.items()]

    def content(self, data: object) -> str:
        """Return the content of `data` without parts that depend on process or time, for comparison."""
        if isinstance(data, dict):
            named = {name: value for name, value in data.items() if name not in _PROCESS_SPECIFIC}
            if "source" in data:
                named["source"] = self._bodies.get(data["source"])
            return repr({name: self.content(value) for name, value in named.items()})
        return repr([self.content(part) for part in data]) if isinstance(data, list) else repr(data)

    def build(self, kind: str, data: Plain, label: str = "") -> Any:
        """Return an object of allure's class `kind` with the attributes `data`, and `label` appended to its name."""
        made = dict(data)
        for name, part in _PARTS.items():
            if name in data:
                part = "GlobalAttachment" if kind == "Globals" and name == "attachments" else part
                made[name] = [self.build(part, one) for one in data[name]]
        if "statusDetails" in data:
            made["statusDetails"] = _model("StatusDetails")(**data["statusDetails"])
        if label:
            made["name"] = f"{data.get('name') or ''}{label}"
        if data.get("source") in self._bodies:
            self.attached[data["source"]] = self._bodies[data["source"]]
        return _model(kind)(**made)


_PROCESS_SPECIFIC = ("uuid", "start", "stop", "timestamp", "source")
_PARTS = {"steps": "TestStepResult", "attachments": "Attachment", "parameters": "Parameter", "errors": "GlobalError"}
"""Attributes of allure's objects that are lists of other objects, and the class of these."""


def _dynamic(item: pytest.Item, parameters: Sequence[Any]) -> list[Plain]:
    """Return those `parameters` that allure has not taken from the parametrization of `item`."""
    represent = import_module("allure_commons.utils").represent
    given = getattr(getattr(item, "callspec", None), "params", {})
    return [
        _as_data(one)
        for one in parameters
        if one.name not in given or one.excluded or one.mode or one.value != represent(given[one.name])
    ]


def _set_parameter(result: Any, data: Plain) -> None:
    made = _model("Parameter")(**data)
    for parameter in result.parameters:
        if parameter.name == made.name:
            parameter.value, parameter.excluded, parameter.mode = made.value, made.excluded, made.mode
            return
    result.parameters.append(made)


def _as_data(entry: Any) -> Plain:
    """Return an object of allure's model as a dict without empty values, as allure writes it."""
    data: Plain = import_module("attr").asdict(entry, filter=lambda _, value: value or value is False)
    return data
