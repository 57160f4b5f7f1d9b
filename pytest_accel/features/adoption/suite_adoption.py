"""Adoption of suites without changes to their files: marks by rule, and for torch's ``MultiProcessTestCase``.

Driver and ranks collect the test files independently, so both adopt the tests.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.features.adoption import marker_rules
from pytest_accel.settings.options import ADOPT, RULES

if TYPE_CHECKING:
    from pytest_accel.core.marks import MarkOwners
    from pytest_accel.features.adoption.marker_rules import Rule

_HARNESS = "torch.testing._internal.common_distributed"
"""The module of torch's harness. Test files import it; this module only looks it up in ``sys.modules``."""
_HARNESS_IMPORT = re.compile(r"\btorch\.testing\._internal[\w.]*\b(?:common_(?:distributed|fsdp|dtensor)|rpc_utils)\b")
"""Matches the modules with torch's base classes of such tests, in the text of a test file."""
_RPC_FIXTURE = "torch.testing._internal.distributed.rpc.rpc_agent_test_fixture"
_WORKER_OUTPUT = "accel_adoption"
"""Key of an xdist worker's findings in its ``workeroutput``."""


def make(
    config: pytest.Config, capacity: Callable[[], int], on_harness: Callable[[Any], None] | None, *, by_name: bool
) -> Adoption | None:
    """Return the :class:`Adoption` that the ini file asks for, or None.

    With `by_name`, rules give all arguments of their marks by name, so that `selection.name_arguments` keeps the marks.
    Raise ``pytest.UsageError`` for a value that is not allowed.
    """
    try:
        rules = marker_rules.parse(config.getini(RULES))
    except marker_rules.RuleError as error:
        raise pytest.UsageError(f"ini option {RULES}: {error}") from None
    harness = config.getini(ADOPT).strip()
    if harness not in ("", "torch"):
        raise pytest.UsageError(f"ini option {ADOPT}: must be torch or empty, got {harness!r}")
    if by_name:
        rules = tuple(rule.by_name() for rule in rules)
    return Adoption(config, rules, harness == "torch", capacity, on_harness) if rules or harness else None


class Adoption:
    """Adds marks to collected tests, by rules and for torch's harness. Registered as a plugin of the session."""

    def __init__(
        self,
        config: pytest.Config,
        rules: tuple[Rule, ...],
        harness: bool,
        capacity: Callable[[], int],
        on_harness: Callable[[Any], None] | None,
    ) -> None:
        """`harness`: True to adopt torch's tests. `capacity` returns the number of the session's devices.

        `on_harness` is called with torch's module for each test of its harness.
        """
        self._config = config
        self._owners: MarkOwners = config.stash[OWNERS]
        for rule in rules:
            self._owners.give(rule.mark.mark)
        self._rules = rules
        self._harness = harness
        self._capacity = capacity
        self._on_harness = on_harness
        self._matched: set[str] = set()
        """Lines of the rules that match a test."""
        self._has_collected = False
        """True after the collection in this process, or in an xdist worker that has sent its findings."""
        self._not_adopted: dict[str, None] = {}
        """Lines for the summary: each class that is not adopted, and why. A dict keeps the order without duplicates."""

    def marks_in(self, path: Path, text: str) -> set[str]:
        """Return names of the marks that tests in the file may get, judged by its path and `text` before its import."""
        marks: set[str] = set()
        if path.is_relative_to(self._config.rootpath):
            file = path.relative_to(self._config.rootpath).as_posix()
            marks = {rule.mark.name for rule in self._rules if rule.may_match_in(file)}
        if self._harness and _HARNESS_IMPORT.search(text):
            marks.add("distributed")
        return marks

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add marks before the lists in them divide the tests, so that the command line has the ids of the variants."""
        report = yield
        for node in report.result or ():
            if isinstance(node, pytest.Item):
                self._apply_rules(node)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Add marks to variants and to torch's tests, before ``-m`` selects tests."""
        self._apply_rules(item)
        if self._harness:
            self._adopt_torch_test(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Remove the mark of a rule if the test has another of that name: a conftest may have added it in a hook."""
        self._has_collected = True
        try:
            yield
        finally:
            of_rules = {id(rule.mark.mark) for rule in self._rules}
            for item in items:
                for mark in [mark for mark in item.own_markers if id(mark) in of_rules]:
                    if any(other is not mark for other in self._own_marks(item, mark.name)):
                        item.own_markers.remove(mark)

    def _apply_rules(self, item: pytest.Item) -> None:
        """Add the marks of all rules that match `item` and whose mark it lacks."""
        for rule in self._rules:
            if rule.matches(item.nodeid):
                self._matched.add(rule.line)
                if next(self._own_marks(item, rule.mark.name), None) is None:
                    item.add_marker(rule.mark)

    def _own_marks(self, item: pytest.Item, name: str) -> Iterator[pytest.Mark]:
        """Yield the marks `name` of `item`, the closest first, that are not the project's own."""
        return filter(self._owners.is_ours, item.iter_markers(name))

    def _adopt_torch_test(self, item: pytest.Item) -> None:
        harness = sys.modules.get(_HARNESS)
        test_class: Any = getattr(item, "cls", None)
        base = getattr(harness, "MultiProcessTestCase", None)
        if base is None or test_class is None or not issubclass(test_class, base):
            return
        if test_class.join_or_run is not base.join_or_run:
            return  # A class that overrides this method starts no processes.
        if self._on_harness is not None:
            self._on_harness(harness)
        try:
            size = _world_size(test_class, getattr(item, "originalname", item.name))
        except Exception as error:
            self._not_adopted[f"{item.nodeid.rpartition('::')[0]} is not adopted: {error}"] = None
            return
        mark = next(self._own_marks(item, "distributed"), None)
        arguments = {**mark.kwargs} if mark is not None else {}
        world_size = mark.args[0] if mark is not None and mark.args else arguments.get("world_size", size)
        if mark is None and 0 < self._capacity() < size:
            arguments["kind"] = "cpu"  # In torch's harness, ranks would share devices, which cannot be leased.
        fixture = getattr(sys.modules.get(_RPC_FIXTURE), "RpcAgentTestFixture", None)
        if fixture is not None and issubclass(test_class, fixture):
            arguments.setdefault("fresh", True)  # A process can use RPC only once (see `core/torch_api.py`).
        arguments |= {"world_size": world_size, "init": False}
        adopted = pytest.mark.distributed(**arguments)
        self._owners.give(adopted.mark)
        item.add_marker(adopted, append=False)

    # Terminal summary

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the findings of an xdist worker to the controller: a worker has no terminal."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_WORKER_OUTPUT] = (sorted(self._matched), list(self._not_adopted))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Merge the findings of an xdist worker. A worker that crashed sends none."""
        findings = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT)
        if findings is not None:
            matched, not_adopted = findings
            self._has_collected = True
            self._matched.update(matched)
            self._not_adopted |= dict.fromkeys(not_adopted)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        lines = list(self._not_adopted)
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if ended and self._has_collected and _collects_all(self._config):
            lines += [f"{rule.line}: no test matches" for rule in self._rules if rule.line not in self._matched]
        if lines:
            terminalreporter.section("accel: adoption", sep="-")
            for line in lines:
                terminalreporter.write_line(line)


def _world_size(test_class: Any, test: str) -> int:
    """Return the number of processes that torch would start for `test`. Raise ValueError if the class gives none."""
    try:
        size = int(test_class(test).world_size)
    except Exception as error:
        raise ValueError(f"reading its world_size raised {type(error).__name__}: {error}") from error
    if size < 1:
        raise ValueError(f"its world_size must be at least 1, got {size}")
    return size


def _collects_all(config: pytest.Config) -> bool:
    """Return True if the session collects the whole suite, rather than a part that the command line selects."""
    source = config.args_source
    from_root = source is config.ArgsSource.INVOCATION_DIR and config.invocation_params.dir == config.rootpath
    option = config.option
    restricted = any(getattr(option, name, None) for name in ("ignore", "ignore_glob", "lf"))
    return (from_root or source is config.ArgsSource.TESTPATHS) and not restricted
