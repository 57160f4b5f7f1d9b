"""Suites that run in worlds without a change to their files: marks by rule, and torch's ``MultiProcessTestCase``.

The same is done in the driver and in the ranks, which collect a file on their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import marker_rules
from pytest_accel.settings.options import ADOPT, RULES

if TYPE_CHECKING:
    from pytest_accel.marker_rules import Rule

_HARNESS = "torch.testing._internal.common_distributed"
"""The module of torch's own harness. A test file that has such tests imports it; we only look whether one has."""
_HELPERS = re.compile(r"\btorch\.testing\._internal[\w.]*\b(?:common_(?:distributed|fsdp|dtensor)|rpc_utils)\b")
"""The modules in which torch has its classes of such tests, where a test file names one of them."""
_RPC = "torch.testing._internal.distributed.rpc.rpc_agent_test_fixture"
_CHANNEL = "accel_adoption"


def make(
    config: pytest.Config, capacity: Callable[[], int], on_harness: Callable[[Any], None] | None = None
) -> Adoption | None:
    """What the ini file asks for; None: nothing. Raises ``pytest.UsageError``. See :class:`Adoption`."""
    try:
        found = marker_rules.parse(config.getini(RULES))
    except marker_rules.RuleError as error:
        raise pytest.UsageError(f"ini option {RULES}: {error}") from None
    harness = config.getini(ADOPT).strip()
    if harness not in ("", "torch"):
        raise pytest.UsageError(f"ini option {ADOPT}: must be torch or empty, got {harness!r}")
    return Adoption(config, found, harness == "torch", capacity, on_harness) if found or harness else None


class Adoption:
    """Gives tests the marks that their files do not have."""

    def __init__(
        self,
        config: pytest.Config,
        rules: tuple[Rule, ...],
        harness: bool,
        capacity: Callable[[], int],
        on_harness: Callable[[Any], None] | None,
    ) -> None:
        """`capacity` gives the number of the session's devices; `on_harness` is told of torch's module, when it is
        there."""
        self._config = config
        self._rules = rules
        self._harness = harness
        self._capacity = capacity
        self._on_harness = on_harness
        self._unmatched = {rule.line for rule in rules}
        self._given: list[tuple[pytest.Item, pytest.Mark]] = []
        self._left: dict[str, None] = {}
        """The classes that run as torch runs them, and why; in the order in which they were found."""

    def marks_in(self, path: Path, text: str) -> set[str]:
        """Which of our marks the tests of a file may get, by its name and its `text`, before it is imported."""
        marks: set[str] = set()
        if path.is_relative_to(self._config.rootpath):
            file = path.relative_to(self._config.rootpath).as_posix()
            marks = {rule.mark.name for rule in self._rules if rule.may_match_in(file)}
        if self.imports(text):
            marks.add("distributed")
        return marks

    def imports(self, text: str) -> set[str]:
        """The modules of torch's harness that a test file of this `text` imports, where such tests are adopted."""
        return {_HARNESS, *_HELPERS.findall(text)} if self._harness and _HELPERS.search(text) else set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Before a list of world sizes parametrizes: the tests that are made of it are asked about once more."""
        self._apply_rules(metafunc.definition)

    @pytest.hookimpl(trylast=True)
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """After what conftests add in this hook, and before ``-m`` chooses."""
        self._apply_rules(item)
        if self._harness:
            self._adopt(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self) -> Generator[None, None, None]:
        """A mark that a conftest has added in this hook beats a rule's as well."""
        try:
            yield
        finally:
            given, self._given = self._given, []
            for item, mark in given:
                if any(other.name == mark.name and other is not mark for other in item.iter_markers()):
                    item.own_markers.remove(mark)

    def _apply_rules(self, item: pytest.Item) -> None:
        for rule in self._rules:
            if rule.matches(item.nodeid):
                self._unmatched.discard(rule.line)
                if item.get_closest_marker(rule.mark.name) is None:
                    item.add_marker(rule.mark)
                    self._given.append((item, rule.mark.mark))

    def _adopt(self, item: pytest.Item) -> None:
        harness = sys.modules.get(_HARNESS)
        test_class: Any = getattr(item, "cls", None)
        base = getattr(harness, "MultiProcessTestCase", None)
        if base is None or test_class is None or not issubclass(test_class, base):
            return
        if test_class.join_or_run is not base.join_or_run:
            return  # It starts no processes.
        if self._on_harness is not None:
            self._on_harness(harness)
        try:
            size = _world_size(test_class, item.name)
        except Exception as error:
            self._left[f"{item.nodeid.rpartition('::')[0]} runs as torch runs it: {error}"] = None
            return
        own = item.get_closest_marker("distributed")
        arguments = {**own.kwargs} if own is not None else {}
        asked = own.args[0] if own is not None and own.args else arguments.get("world_size", size)
        if own is None and 0 < self._capacity() < size:
            arguments["device"] = "cpu"  # Its ranks would have shared devices, which is nothing that we can lease.
        fixture = getattr(sys.modules.get(_RPC), "RpcAgentTestFixture", None)
        if fixture is not None and issubclass(test_class, fixture):
            arguments.setdefault("fresh", True)  # A process is good for one RPC (see `rank/rpc.py`).
        arguments |= {"world_size": asked, "init": False}
        item.add_marker(pytest.mark.distributed(**arguments), append=False)

    # What a person is told

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker of xdist has no terminal."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_CHANNEL] = (sorted(self._unmatched), list(self._left))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist has ended, and has said what it found if it ended well."""
        unmatched, left = getattr(node, "workeroutput", {}).get(_CHANNEL, ((), ()))
        self._unmatched &= set(unmatched)
        self._left |= dict.fromkeys(left)

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        lines = list(self._left)
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and _collects_all(self._config):
            lines += [f"{rule.line}: no test matches" for rule in self._rules if rule.line in self._unmatched]
        if lines:
            terminalreporter.section("accel: adoption", sep="-")
            for line in lines:
                terminalreporter.write_line(line)


def _world_size(test_class: Any, test: str) -> int:
    """How many processes torch would start for `test`; ValueError where the class does not say."""
    try:
        size = int(test_class(test).world_size)
    except Exception as error:
        raise ValueError(f"its world_size cannot be had ({type(error).__name__}: {error})") from error
    if size < 1:
        raise ValueError(f"its world_size is {size}")
    return size


def _collects_all(config: pytest.Config) -> bool:
    """Whether the session has looked at the whole suite, and not at a part of it that was asked for."""
    source = config.args_source
    from_root = source is config.ArgsSource.INVOCATION_DIR and config.invocation_params.dir == config.rootpath
    option = config.option
    some = any(getattr(option, name, None) for name in ("ignore", "ignore_glob", "lf"))
    return (from_root or source is config.ArgsSource.TESTPATHS) and not some
