"""Adoption of suites without changes to their files: marks by rule, and for torch's ``MultiProcessTestCase``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.marks import as_keywords, compares_arguments
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.features.adoption import marker_rules
from pytest_accel.settings.options import ADOPT, RULES

_HARNESS = "torch.testing._internal.common_distributed"
"""The module of torch's harness. Test files import it; this module only looks it up in ``sys.modules``."""
_HARNESS_IMPORT = re.compile(r"\btorch\.testing\._internal[\w.]*\b(?:common_(?:distributed|fsdp|dtensor)|rpc_utils)\b")
"""Matches the modules with torch's base classes of such tests, in the text of a test file."""
_RPC_FIXTURE = "torch.testing._internal.distributed.rpc.rpc_agent_test_fixture"
_FINDINGS = "accel_adoption"
"""Key of an xdist worker's findings in its ``workeroutput``."""


class Adoption:
    """Adds marks to collected tests, by rules and for torch's harness. Registered as a plugin of the session."""

    def __init__(self, config: pytest.Config, capacity: Callable[[], int]) -> None:
        """`capacity` returns the number of the session's devices.

        Raise ``pytest.UsageError`` for a value of the ini file that is not allowed.
        """
        # The feature `planning` compares arguments by name, and would replace marks that have others.
        by_name = compares_arguments(getattr(config.option, "markexpr", ""))
        try:
            self._rules = [marker_rules.parse(line, by_name=by_name) for line in config.getini(RULES)]
        except ValueError as error:
            raise pytest.UsageError(f"ini option {RULES}: {error}") from None
        self._harness = config.getini(ADOPT).strip()
        if self._harness not in ("", "torch"):
            raise pytest.UsageError(f"ini option {ADOPT}: must be torch or empty, got {self._harness!r}")
        self._config = config
        self._owners = config.stash[OWNERS]
        for rule in self._rules:
            self._owners.give(rule.mark.mark)
        self._capacity = capacity
        self._matched: set[str] = set()
        """Lines of the rules that match a test."""
        self._has_collected = False
        """True after the collection in this process, or in an xdist worker that has sent its findings."""
        self._not_adopted: dict[str, None] = {}
        """Lines for the summary: each class that is not adopted, and why."""

    def marks_in(self, path: Path, text: str) -> set[str]:
        """Return names of the marks that tests in the file may get, judged by its path and `text` before its import."""
        marks = {"distributed"} if self._harness and _HARNESS_IMPORT.search(text) else set()
        if path.is_relative_to(self._config.rootpath):
            file = path.relative_to(self._config.rootpath).as_posix()
            marks |= {rule.mark.name for rule in self._rules if rule.may_match_in(file)}
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
        if self._harness and harness_of(item) is not None:
            self._adopt(item)

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

    def _adopt(self, item: Any) -> None:
        """Give a test of torch's harness a mark with as many ranks as torch would start processes."""
        try:
            size = int(item.cls(getattr(item, "originalname", item.name)).world_size)
            if size < 1:
                raise ValueError(f"it must be at least 1, got {size}")
        except Exception as error:
            text = f"is not adopted: reading its world_size raised {type(error).__name__}: {error}"
            self._not_adopted[f"{item.nodeid.rpartition('::')[0]} {text}"] = None
            return
        mark = next(self._own_marks(item, "distributed"), None)
        arguments = {"world_size": size, **({} if mark is None else as_keywords(mark).kwargs), "init": False}
        if mark is None and 0 < self._capacity() < size:
            arguments["kind"] = "cpu"  # In torch's harness, ranks would share devices, which cannot be leased.
        fixture = getattr(sys.modules.get(_RPC_FIXTURE), "RpcAgentTestFixture", None)
        if fixture is not None and issubclass(item.cls, fixture):
            arguments.setdefault("fresh", True)  # A process can use RPC only once (see `core/torch_api.py`).
        adopted = pytest.mark.distributed(**arguments)
        self._owners.give(adopted.mark)
        item.add_marker(adopted, append=False)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the findings of an xdist worker to the controller: a worker has no terminal."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_FINDINGS] = (sorted(self._matched), list(self._not_adopted))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Merge the findings of an xdist worker. A worker that crashed sends none."""
        if findings := getattr(node, "workeroutput", {}).get(_FINDINGS):
            self._has_collected = True
            self._matched.update(findings[0])
            self._not_adopted |= dict.fromkeys(findings[1])

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        lines = list(self._not_adopted)
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if ended and self._has_collected and _collects_all(self._config):
            lines += [f"{rule.line}: no test matches" for rule in self._rules if rule.line not in self._matched]
        if lines:
            terminalreporter.section("accel: adoption", sep="-")
        for line in lines:
            terminalreporter.write_line(line)


def harness_of(item: pytest.Item) -> Any:
    """Return torch's module if it would start processes for the test `item`; None otherwise."""
    harness, case = sys.modules.get(_HARNESS), getattr(item, "cls", None)
    base: Any = getattr(harness, "MultiProcessTestCase", None)
    if base is None or case is None or not issubclass(case, base):
        return None
    # A class that overrides this method starts no processes.
    return harness if case.join_or_run is base.join_or_run else None


def _collects_all(config: pytest.Config) -> bool:
    """Return True if the session collects the whole suite, rather than a part that the command line selects."""
    source = config.args_source
    from_root = source is config.ArgsSource.INVOCATION_DIR and config.invocation_params.dir == config.rootpath
    restricted = any(getattr(config.option, name, None) for name in ("ignore", "ignore_glob", "lf"))
    return (from_root or source is config.ArgsSource.TESTPATHS) and not restricted
