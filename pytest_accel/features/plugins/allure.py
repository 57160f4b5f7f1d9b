"""allure-pytest: steps, attachments, fixtures and what tests set with ``allure.dynamic`` on rank 0.

Rank 0 has allure's own listener, which builds the same objects as in a session without ranks. It has no logger that
writes them: they are sent when the test has ended, and added to the test's result in the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any
from uuid import uuid4

import pluggy
import pytest

from pytest_accel.features.plugins.rows import named
from pytest_accel.messages.serialization import plain
from pytest_accel.rank.context import RANK

_LISTENER = "allure_listener"
"""The name under which allure-pytest registers its listener."""
_TITLE = ("name", "description", "descriptionHtml")
_LISTS = {"steps": "TestStepResult", "attachments": "Attachment", "labels": "Label", "links": "Link"}
"""The lists of a result, and allure's classes of their entries."""
_PARTS = {**_LISTS, "parameters": "Parameter"}
_allure_hook = pluggy.HookimplMarker("allure")


def in_rank(config: pytest.Config) -> object | None:
    """Return the plugin that sends what allure has built on rank 0; None on other ranks, and without results."""
    manager = named("allure_commons", "plugin_manager")
    manager.register(named("allure_pytest.helper", "AllureTestHelper")(config))  # Turns decorators into marks.
    if not config.option.allure_report_dir or config.stash[RANK].rank:
        return None
    # A rank calls all hooks of a class of this module. The driver adds labels of marks, statuses and captured output.
    without = {"pytest_runtest_makereport": None, "pytest_runtest_teardown": None}
    listener: Any = type("RankListener", (named("allure_pytest.listener", "AllureListener"),), without)(config)
    manager.register(listener)
    config.pluginmanager.register(listener, _LISTENER)
    rank = _InRank(listener)
    manager.register(rank)
    return rank


def in_driver(config: pytest.Config) -> object | None:
    """Return the plugin that adds these objects to the results of marked tests; None if no results are written."""
    listener = config.pluginmanager.get_plugin(_LISTENER)
    return None if listener is None else _InDriver(listener)


def _containers(listener: Any) -> list[Any]:
    """Return the open containers of `listener`: a container for each fixture that is set up."""
    items, kind = listener.allure_logger._items, named("allure_commons.model2", "TestResultContainer")
    return [item for item in map(items.get, list(items)) if isinstance(item, kind)]


class _InRank:
    """Sends the objects that allure's `listener` has built. Hooks without ``pytest_`` are allure's."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._closed: list[Any] = []
        self._bodies: dict[str, bytes] = {}

    def send(self, item: pytest.Item, report: pytest.TestReport) -> object:
        result = self._listener.allure_logger.get_test(None)
        if result is None:
            return None
        title = {name: getattr(result, name) for name in _TITLE}
        known = {"title": title, "parameters": [_as_data(one) for one in result.parameters]}
        if report.when != "teardown":
            return plain(known)  # When the driver tears the test down, allure makes an id of the parameters.
        used = [one for one in (*_containers(self._listener), *self._closed) if result.uuid in one.children]
        fixtures = [_entries(container, ("befores", "afters")) for container in used if container.befores]
        sent = {**_entries(result, _LISTS), **known, "fixtures": fixtures, "bodies": self._bodies}
        self._closed, self._bodies = [], {}
        return plain(sent)

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


class _InDriver:
    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._hook = named("allure_commons", "plugin_manager").hook

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        result, data = self._listener.allure_logger.get_test(None), sent[0]
        if result is None:
            return
        for container in _containers(self._listener):
            # The listener has added the test to containers of the driver's fixtures that have the same names.
            container.children[:] = [uuid for uuid in container.children if uuid != result.uuid]
        for name, value in data["title"].items():
            setattr(result, name, value)
        result.parameters = [_build("Parameter", one) for one in data["parameters"]]
        if report.when != "teardown":
            return
        for name, kind in _LISTS.items():
            entries = getattr(result, name)
            entries += [made for one in data[name] if (made := _build(kind, one)) not in entries]
        for one in data["fixtures"]:
            made = {"befores": "TestBeforeResult", "afters": "TestAfterResult"}
            parts = {name: [_build(kind, part) for part in one[name]] for name, kind in made.items()}
            container = named("allure_commons.model2", "TestResultContainer")(uuid=str(uuid4()), **parts)
            container.children.append(result.uuid)
            self._hook.report_container(container=container)
        for name, body in data["bodies"].items():
            self._hook.report_attached_data(body=body, file_name=name)


def _entries(owner: Any, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    return {name: [_as_data(entry) for entry in getattr(owner, name)] for name in names}


def _as_data(entry: Any) -> dict[str, Any]:
    """Return an object of allure's model as a dict without empty values, as allure writes it."""
    data: dict[str, Any] = import_module("attr").asdict(entry, filter=lambda _, value: value or value is False)
    return data


def _build(kind: str, data: dict[str, Any]) -> Any:
    """Return an object of allure's class `kind` with the attributes `data`."""
    made = dict(data)
    for name, part in _PARTS.items():
        if name in data:
            made[name] = [_build(part, one) for one in data[name]]
    if "statusDetails" in data:
        made["statusDetails"] = named("allure_commons.model2", "StatusDetails")(**data["statusDetails"])
    return named("allure_commons.model2", kind)(**made)
