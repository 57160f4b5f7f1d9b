"""Adoption of suites without changes to their files: marks by rule, and for the test classes of torch's harness."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
from collections.abc import Callable, Generator
from inspect import getattr_static
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_accel.core import marks
from pytest_accel.core.marks import as_keywords
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.core.terminal_lines import warn
from pytest_accel.settings.options import ADOPT, RULES

HARNESS = "torch.testing._internal.common_distributed"  # Test files import it; it is looked up in `sys.modules`.
PROCESSES, CONTINUOUS, THREADS = "MultiProcessTestCase", "MultiProcContinuousTest", "MultiThreadedTestCase"
_RUNS = {PROCESSES: "join_or_run", CONTINUOUS: "_ensure_processes_spawned", THREADS: "join_or_run"}
"""The method by which each class of the harness runs tests. A class that overrides it is not adopted."""
UNSET = -2
"""The `world_size` of a `MultiProcContinuousTest` with as many ranks as there are devices."""
_HARNESS_IMPORT = re.compile(r"\btorch\.testing\._internal[\w.]*\b(?:common_(?:distributed|fsdp|dtensor)|rpc_utils)\b")
"""Matches the modules with torch's base classes of such tests, in the text of a test file."""


class Rule(NamedTuple):
    """A line of the ini setting ``accel_rules``: a pattern, and the mark for the tests that it matches."""

    line: str
    pattern: str
    mark: pytest.MarkDecorator

    def matches(self, nodeid: str, *, as_file: bool = False) -> bool:
        """Return True if the pattern matches the test `nodeid` or a folder, file or class that contains it.

        With `as_file`, return True if it may match tests in the file with this node id.
        """
        pattern = self.pattern.partition("::")[0] if as_file else self.pattern
        path, _, names = nodeid.partition("::")
        words = names.partition("[")[0].split("::") if names else ()  # The id of a parameter may have any character.
        nodes = [*accumulate(path.split("/"), "{}/{}".format), *accumulate([path, *words], "{}::{}".format), nodeid]
        # As in .gitignore files, a leading `**/` also matches no folder at all.
        patterns = (pattern, pattern.removeprefix("**/"))
        return any(node == pattern or fnmatch.fnmatchcase(node, one) for node in nodes for one in patterns)


def parse_rule(line: str) -> Rule:
    """Return the rule in `line`, with arguments by name, as ``-m`` compares them. Raise ValueError if it has none."""
    pattern, _, text = (part.strip() for part in line.partition(": "))
    try:
        call = ast.parse(text, mode="eval").body
        call = call if isinstance(call, ast.Call) else ast.Call(call, [], [])
        name = ast.unparse(call.func)
        if name == ADOPT and ast.unparse(call) == f"{ADOPT}(False)":
            return Rule(line, pattern.removesuffix("/"), getattr(pytest.mark, ADOPT)(False))
        if name not in ("devices", "distributed"):
            raise ValueError(name)
        named: dict[Any, Any] = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        decorator: pytest.MarkDecorator = getattr(pytest.mark, name)
        mark = decorator.with_args(*map(ast.literal_eval, call.args), **named).mark
        marks.check(mark)
    except marks.MarkError as error:
        raise ValueError(f"{line!r}: {error}") from None
    except (SyntaxError, ValueError, TypeError):
        form = f"PATTERN: devices(...), PATTERN: distributed(...) or PATTERN: {ADOPT}(False)"
        raise ValueError(f"{line!r}: must be {form}, with a space after the colon and literal arguments") from None
    return Rule(line, pattern.removesuffix("/"), decorator.with_args(**marks.as_keywords(mark).kwargs))


class Adoption:
    """Adds marks to collected tests, by rules and for torch's harness. Registered as a plugin of the session."""

    def __init__(self, config: pytest.Config, capacity: Callable[[], int] | None) -> None:
        """`capacity` returns the number of the session's devices; None in a rank, which collects a part of the suite.

        Raise ``pytest.UsageError`` for a value of the ini file that is not allowed.
        """
        try:
            self._rules = [parse_rule(line) for line in config.getini(RULES)]
        except ValueError as error:
            raise pytest.UsageError(f"ini option {RULES}: {error}") from None
        adopted = config.getini(ADOPT)
        if set(adopted.split()) - {"torch", "spawn"}:
            raise pytest.UsageError(f"ini option {ADOPT}: must be torch, spawn, both or empty, got {adopted!r}")
        self.harness, self.spawn = "torch" in adopted.split(), "spawn" in adopted.split()
        config.addinivalue_line("markers", f"{ADOPT}(False): run the test as without {ADOPT} in the ini file.")
        self._config, self._owners, self._capacity = config, config.stash[OWNERS], capacity
        self._unmatched = dict.fromkeys(rule.line for rule in self._rules)
        for rule in self._rules:
            self._owners.give(rule.mark.mark)

    def marks_in(self, path: Path, text: str) -> set[str]:
        """Return names of the marks that tests in the file may get, judged by its path and `text` before its import."""
        found = {"distributed"} if self.harness and _HARNESS_IMPORT.search(text) else set()
        if path.is_relative_to(self._config.rootpath):
            file = path.relative_to(self._config.rootpath).as_posix()
            rules = (rule for rule in self._rules if rule.matches(file, as_file=True))
            found |= {rule.mark.name for rule in rules} - {ADOPT}
        return found

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add marks before the lists in them divide the tests, so that the command line has the ids of the variants."""
        report = yield
        for node in report.result or ():
            if isinstance(node, pytest.Item):
                self._apply_rules(node)
                if self.harness and (base := harness_of(node)) is not None:
                    self._adopt(node, base)
        return report

    def _apply_rules(self, item: pytest.Item) -> None:
        """Add the marks of all rules that match `item`, except marks that it already has from the plugin."""
        for rule in self._rules:
            if rule.matches(item.nodeid):
                self._unmatched.pop(rule.line, None)
                if not any(map(self._owners.is_ours, item.iter_markers(rule.mark.name))):
                    item.add_marker(rule.mark)

    def _adopt(self, item: Any, base: str) -> None:
        """Give a test of torch's class `base` a mark for as many ranks as torch would start processes.

        Threads of torch share one process, which gets as many devices. A mark ``devices`` of the newer classes stays:
        it gives one process these devices, and torch starts its processes from there.
        """
        mark = next(filter(self._owners.is_ours, item.iter_markers("distributed")), None)
        if base != PROCESSES and any(map(self._owners.is_ours, item.iter_markers("devices"))):
            return
        capacity = 0 if self._capacity is None else self._capacity()
        try:
            size = int(item.cls(getattr(item, "originalname", item.name)).world_size)
            if size == UNSET and base == CONTINUOUS:
                size = max(capacity, 1)
            if size < 1:
                raise ValueError(f"it must be at least 1, got {size}")
        except Exception as error:
            text = f"is not adopted: reading its world_size raised {type(error).__name__}: {error}"
            warn(f"{item.nodeid.rpartition('::')[0]} {text}")
            return
        if base == THREADS and mark is None and capacity:
            adopted = pytest.mark.devices(min(size, capacity))
        else:
            size = 1 if base == THREADS else size
            arguments = {"world_size": size, **({} if mark is None else as_keywords(mark).kwargs), "init": False}
            if mark is None and 0 < capacity < size:
                arguments["kind"] = "cpu"  # In torch's harness, ranks would share devices, which cannot be leased.
            adopted = pytest.mark.distributed(**arguments)
        self._owners.give(adopted.mark)
        item.add_marker(adopted, append=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Warn about rules that match no test, if the session has collected the whole suite without an error."""
        if self._capacity is not None and not session.testsfailed and _collects_all(self._config):
            for line in self._unmatched:
                warn(f"{line}: no test matches")


def may_adopt(item: pytest.Item) -> bool:
    """Return False if a mark or a rule says that the test is to run as without adoption."""
    mark = item.get_closest_marker(ADOPT)
    return mark is None or mark.args != (False,)


def harness_of(item: pytest.Item) -> str | None:
    """Return the name of torch's class by which the test `item` would start its processes or threads, if it does so."""
    harness, case = sys.modules.get(HARNESS), getattr(item, "cls", None) or object
    for name, method in _RUNS.items() if may_adopt(item) else ():
        base: Any = getattr(harness, name, None)
        if base is not None and issubclass(case, base):
            # Older releases of torch start the processes of the continuous class elsewhere.
            own, runs = getattr_static(case, method, None), getattr_static(base, method, None)
            return name if own is runs is not None else None
    return None


def _collects_all(config: pytest.Config) -> bool:
    """Return True if the session collects the whole suite, rather than a part that the command line selects."""
    source = config.args_source
    from_root = source is config.ArgsSource.INVOCATION_DIR and config.invocation_params.dir == config.rootpath
    restricted = any(getattr(config.option, name, None) for name in ("ignore", "ignore_glob", "lf"))
    return (from_root or source is config.ArgsSource.TESTPATHS) and not restricted
