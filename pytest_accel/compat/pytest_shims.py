"""All uses of private attributes and classes of pytest that have no public equivalent."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, fcntl
from pathlib import Path
from typing import Any, Literal

import _pytest.logging
import pytest
from _pytest import assertion, debugging, junitxml, skipping, unittest
from _pytest._code import Traceback
from _pytest.mark.structures import NodeKeywords

from pytest_accel.core.frames import is_library


def base_temporary_directory(config: pytest.Config) -> Path | None:
    """Return the base temporary directory of a session.

    Return None if the tmpdir plugin is disabled, or if pytest's default cannot be used, for example because another
    user owns it: pytest then fails the tests of this process that need it. Raise :class:`pytest.UsageError` for an
    option ``--basetemp`` that cannot be used.
    """
    # The public way is the fixture `tmp_path_factory`, but the ranks' folders are named before any test runs. xdist
    # reads the same attribute for its workers.
    factory = getattr(config, "_tmp_path_factory", None)
    try:
        return None if factory is None else Path(factory.getbasetemp())
    except OSError as error:
        given = config.getoption("basetemp")
        if given is None:
            return None
        why = error.strerror or str(error)
        raise pytest.UsageError(
            f"--basetemp={given}: {why}; allowed is a folder that can be made anew in an existing one"
        ) from None


def rewrite_asserts_of_initial_files(session: pytest.Session) -> None:
    """Make pytest rewrite the asserts of the files given to `session`, even if they are not named like tests.

    pytest does so when it starts to collect; a rank collects each file separately. Call this once the session has its
    arguments.
    """
    config = session.config
    # All files on the command line, since one file may import another.
    named = (config.invocation_params.dir / str(argument).partition("::")[0] for argument in config.args)
    session._initialpaths |= {Path(os.path.abspath(path)) for path in named}
    assertion.pytest_collection(session)


def teardown_to(session: pytest.Session, following: pytest.Item | None) -> None:
    """Tear down the fixtures that `following` does not use (all if it is None), when no test runs that would do it.

    The public hook, `pytest_runtest_teardown`, is for an item whose phases run; plugins fail for others.
    Errors of the fixtures propagate.
    """
    session._setupstate.teardown_exact(following)


def tear_down_after(item: pytest.Item, following: pytest.Item | None) -> None:
    """Call :func:`teardown_to` between two tests; report an error as a teardown error of `item`.

    Hooks of the report are left out: `item` may not have run here, for which that of pytest-rerunfailures fails.
    """
    call = pytest.CallInfo.from_call(lambda: teardown_to(item.session, following), when="teardown")
    if call.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))


def requested_fixtures(item: pytest.Item) -> tuple[Any, ...]:
    """Return the definitions of the fixtures that `item` uses, including fixtures that it has requested by name.

    The definitions are known from the item's setup to its teardown.
    """
    return tuple(getattr(getattr(item, "_request", None), "_fixture_defs", {}).values())


def wider_fixtures(item: pytest.Item) -> list[str]:
    """Return the names of the suite's fixtures of a wider scope than a function that `item` requests."""
    found = fixtures_by_name(item).items()
    return [name for name, one in found if one.scope != "function" and not is_fixture_of_tool(one)]


def is_fixture_of_tool(definition: Any) -> bool:
    """Return whether a `pytest.FixtureDef` is pytest's, this plugin's, or of a plugin that runs async tests."""
    module = getattr(definition.func, "__module__", None) or ""  # Code without a module has None.
    return bool(module.startswith(("_pytest.", "pytest_accel.", "xdist.", "pytest_asyncio.", "anyio.")))


def fixtures_by_name(item: pytest.Item) -> dict[str, Any]:
    """Return the definition of each fixture that `item` requests, directly or through others, before it is set up."""
    found: Any = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return {name: definitions[-1] for name, definitions in found.items() if definitions}


def is_own_fixture(definition: Any) -> bool:
    """Return whether `definition` defines a fixture of this plugin."""
    return getattr(definition.func, "__module__", None) == "pytest_accel.fixtures"


def prefer_other_fixtures(session: pytest.Session, names: Iterable[str]) -> None:
    """Let fixtures of all other plugins win against this plugin's fixtures `names`.

    pytest prefers the plugin that was registered last, and the order in which it finds installed plugins is arbitrary.
    """
    manager: Any = session._fixturemanager
    for name in names:
        # pytest 9.2 holds the definitions by node, and the first of them wins; older releases have one list, whose
        # last entry wins.
        if hasattr(manager, "_arg2node2fixturedefs"):
            definitions = manager._arg2node2fixturedefs.get(name, {}).get(session, [])
            definitions.sort(key=is_own_fixture)
        else:
            manager._arg2fixturedefs.get(name, []).sort(key=is_own_fixture, reverse=True)


def forget_sections(item: pytest.Item) -> None:
    """Discard the captured output of an earlier run of `item`, before it runs again."""
    item._report_sections.clear()


def forget_failures(item: pytest.Item) -> None:
    """Discard the exceptions of a `unittest` test that has ended, which pytest keeps until it has reported them all."""
    vars(item).pop("_excinfo", None)


def expects_failure(item: pytest.Item) -> bool:
    """Return whether a mark xfail of `item` applies in this process, or has a condition that cannot be evaluated."""
    try:
        return skipping.evaluate_xfail_marks(item) is not None
    except (Exception, pytest.fail.Exception):
        return True


def is_subtest(report: pytest.TestReport) -> bool:
    """Return True if `report` is about a subtest of pytest or of pytest-subtests."""
    # Both have a subclass of `TestReport` for it. Attributes prove nothing: a suite may set them in any report.
    kind = type(report)
    names = ("SubtestReport", "SubTestReport")
    return kind is not pytest.TestReport and any(base.__name__ in names for base in kind.__mro__)


def reason_of_skip(longrepr: Any) -> str:
    """Return the reason in the longrepr of a skipped test or file, which is a file, a line and a text."""
    text = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ")


def filter_frames(item: pytest.Item, hidden: re.Pattern[str]) -> None:
    """Make pytest leave out frames of `item`'s failures, and show one line for each other frame of a library.

    Frames of modules whose names match `hidden` are left out, unless all other frames are of libraries. The deepest
    frame outside of libraries is shown in full. pytest itself shortens the frames between the first and the last, so
    frames are shortened in its default style only. With ``--full-trace``, pytest shows all.
    """
    # pytest has no public way: `__tracebackhide__` would hide frames of a module in all failures.
    config: Any = item.config
    filtered = type(item)._traceback_filter

    def shorten(excinfo: pytest.ExceptionInfo[BaseException]) -> Traceback:
        entries = list(filtered(item, excinfo))
        shown = [entry for entry in entries if not hidden.match(str(entry.frame.f_globals.get("__name__")))]
        if not all(is_library(str(entry.path)) for entry in shown):
            entries = shown
        value = excinfo.value
        # For `pytest.fail(..., pytrace=False)`, pytest shows only the text, unless a frame has a style of its own.
        without_traceback = isinstance(value, pytest.fail.Exception) and not value.pytrace
        if without_traceback or config.getoption("tbstyle", "auto") != "auto":
            return Traceback(entries)
        short = [is_library(str(entry.path)) for entry in entries]
        entries = [entry.with_repr_style("short") if cut else entry for entry, cut in zip(entries, short, strict=True)]
        if False in short:
            deepest = len(short) - 1 - short[::-1].index(False)
            entries[deepest] = entries[deepest].with_repr_style("long")
        return Traceback(entries)

    vars(item)["_traceback_filter"] = shorten


def capture_with(config: pytest.Config, streams: Any) -> None:
    """Make pytest's global capture use `streams`, which has the methods of its `FDCapture`, for both streams.

    pytest has no public way to choose where captured output is stored. Call this while it captures.
    """
    capturing: Any = getattr(config.pluginmanager.get_plugin("capturemanager"), "_global_capturing", None)
    if getattr(capturing, "out", None) is not None:
        capturing.out.done()
        capturing.err.done()
        capturing.out, capturing.err = streams, None
        streams.start()


def attach_log_handlers_directly() -> None:
    """Make pytest attach its handlers of captured logs without the methods of loggers, and so without their lock.

    It attaches two handlers to each logger that does not propagate, in each phase. torch has 42 such loggers, which
    takes a tenth of the processor time of a small test, and a third of that without the 516 locks.
    """
    original: Any = _pytest.logging.catching_logs
    if "attached_loggers" not in getattr(original, "__slots__", ()):
        return  # Another release, which may attach handlers only to the root logger.

    class CatchingLogs(original):  # type: ignore[misc]
        def __enter__(self) -> Any:
            root = logging.getLogger()
            if self.level is not None:
                self.handler.setLevel(self.level)
                self.orig_level = root.level
                root.setLevel(min(root.level, self.level))
            loggers = [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
            self.attached_loggers = [root, *[one for one in loggers if not one.propagate]]
            for one in self.attached_loggers:
                one.handlers.append(self.handler)
            return self.handler

        def __exit__(self, *_: object) -> None:
            if self.level is not None:
                logging.getLogger().setLevel(self.orig_level)
            for one in self.attached_loggers:
                if self.handler in one.handlers:  # A test may have removed all handlers.
                    one.handlers.remove(self.handler)

    _pytest.logging.catching_logs = CatchingLogs  # type: ignore[misc]


def log_handler(config: pytest.Config, name: Literal["report_handler", "log_file_handler", "log_cli_handler"]) -> Any:
    """Return pytest's handler of captured logs, of the log file, or of live logs; None if the plugin is disabled.

    The text of the first is the captured log of a report. pytest calls its method `reset` when a phase begins.
    """
    return getattr(config.pluginmanager.get_plugin("logging-plugin"), name, None)


def log_file(config: pytest.Config) -> str | None:
    """Return the path of the log file of this process (``log_file``); None if there is none."""
    name = getattr(getattr(log_handler(config, "log_file_handler"), "stream", None), "name", os.devnull)
    return None if name == os.devnull else str(name)


def append_to_log_file(config: pytest.Config) -> None:
    """Make this process append to its log file, also with ``log_file_mode = w``, once it has opened it.

    All workers of xdist, and all ranks, write to one file. Without this, each overwrites the lines of the others.
    """
    if (handler := log_handler(config, "log_file_handler")) is not None:
        with suppress(OSError, ValueError, AttributeError):  # A suite may have given the handler no file.
            descriptor = handler.stream.fileno()
            fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | os.O_APPEND)


def shows_live_logs(config: pytest.Config) -> bool:
    """Return whether this process shows live logs (``log_cli``)."""
    return isinstance(log_handler(config, "log_cli_handler"), logging.StreamHandler)


def hide_names_of_tests(config: pytest.Config) -> None:
    """Make this session leave out the lines with which ``--setup-show`` names the tests; lines on fixtures stay."""
    original = config.getoption
    # pytest calls this method to decide whether to name a test; for fixtures it reads `config.option`.
    vars(config)["getoption"] = lambda name, *args, **named: name != "setupshow" and original(name, *args, **named)


def copy_item(item: Any, name: str, nodeid: str) -> Any:
    """Return a copy of the test `item` with another name and node id. The caller gives it a stash of its own."""
    copied = copy.copy(item)
    for attribute in ("own_markers", "extra_keyword_matches", "user_properties", "_report_sections"):
        setattr(copied, attribute, copy.copy(getattr(item, attribute)))
    copied.name = name
    _set_id(copied, nodeid)
    copied.keywords = NodeKeywords(copied)
    copied.keywords.update(item.keywords)
    vars(copied).pop("location", None)  # The cache of a property.
    if isinstance(item, unittest.TestCaseFunction):  # pytest would look up the method by the item's name.
        copied._getinstance = functools.partial(copied.parent.obj, copied.originalname)
    if hasattr(copied, "_initrequest"):
        copied._initrequest()
    return copied


def rename(item: pytest.Item, name: str, nodeid: str) -> None:
    """Give `item` another name and node id; only the id if it is a method of a `TestCase`, which runs by its name."""
    if (item.name, item.nodeid) == (name, nodeid):
        return
    own = vars(item)
    instance = own.get("_instance")
    # Another test needs another instance of its class. A function that a plugin has put in place may hold the instance.
    if item.nodeid != nodeid and instance is not None and getattr(own.get("_obj"), "__self__", None) is instance:
        del own["_instance"], own["_obj"]
    _set_id(item, nodeid)
    if not isinstance(item, unittest.TestCaseFunction):
        item.name = name


def _set_id(item: Any, nodeid: str) -> None:
    if hasattr(item, "_id"):  # Since pytest 9.2.
        item._id = type(item._id).parse(nodeid)
    else:
        item._nodeid = nodeid


def left_out_conftests(hooks: Any) -> frozenset[object]:
    """Return the conftests that do not apply to a node; `hooks` is its `ihook`, which must not be the session's."""
    return frozenset(hooks.remove_mods)


def ask_before_debugging(may: Callable[[str], bool]) -> None:
    """Make pytest call `may` before it starts a debugger, with pytest's name for the way of starting.

    If `may` returns False, the program continues without a debugger. Of ``breakpoint()``, ``--trace`` and ``--pdb``,
    only the last has a hook that runs before the debugger's first output. When a debugger stops again at a breakpoint
    of its own, `may` is called again, because pytest has resumed capturing in the meantime.
    """
    original: Any = debugging.pytestPDB._init_pdb

    def init(method: str, *args: Any, **kwargs: Any) -> Any:
        if not may(method):
            return _NoDebugger()
        debugger = original(method, *args, **kwargs)
        setup = debugger.setup

        def setup_again(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            may(method)
            return result

        debugger.setup = setup_again
        return debugger

    debugging.pytestPDB._init_pdb = init  # type: ignore[method-assign]


class _NoDebugger:
    """Implements the methods that pytest calls on a debugger, without effect."""

    quitting = False

    def set_trace(self, frame: object) -> None:
        pass

    def reset(self) -> None:
        pass

    def interaction(self, frame: object, traceback: object) -> None:
        pass

    def runcall(self, function: Callable[[], object]) -> object:
        return function()


def junit_log(config: pytest.Config) -> Any:
    """Return the object that collects the report of ``--junitxml``; None without this option and in an xdist worker."""
    # The public way is the fixtures `record_xml_attribute` and `record_testsuite_property`, whose records are lost in a
    # rank.
    return config.stash.get(junitxml.xml_key, None)


def make_junit_log(config: pytest.Config) -> Any:
    """Make and return the object of :func:`junit_log` in a rank; None without ``--junitxml``.

    pytest makes no such object in a process with `config.workerinput`. It is not registered, so it writes no file.
    """
    path = getattr(config.option, "xmlpath", None)
    if not path:
        return None
    config.stash[junitxml.xml_key] = log = junitxml.LogXML(path, None, family=config.getini("junit_family"))
    return log


def forget_junit_log(config: pytest.Config) -> None:
    """Hide the object of :func:`junit_log` from pytest's fixtures and from the end of its junitxml plugin."""
    del config.stash[junitxml.xml_key]


def terminal_file(config: pytest.Config) -> tuple[Any, str]:
    """Return the file to which pytest's terminal writer writes, and the text of the unfinished line."""
    writer: Any = config.get_terminal_writer()
    return writer._file, writer._current_line


def set_terminal_file(config: pytest.Config, file: Any) -> None:
    """Make pytest's terminal writer write to `file`."""
    writer: Any = config.get_terminal_writer()
    writer._file = file


def raw_environment() -> dict[bytes, bytes]:
    """Return the environment as bytes, without the variable in which pytest names the running test and its phase.

    Without the private attribute, a copy takes 60 times as long.
    """
    found = dict(getattr(os.environ, "_data", os.environb))
    found.pop(b"PYTEST_CURRENT_TEST", None)
    return found


class Overridden:
    """Delegates to `original`, except for the attributes in `overrides`."""

    def __init__(self, original: object, **overrides: object) -> None:
        self._original = original
        vars(self).update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
