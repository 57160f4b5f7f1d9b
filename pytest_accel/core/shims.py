"""The one place for what pytest and xdist offer no public way to."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def base_temporary_directory(config: pytest.Config) -> Path | None:
    """The folder in which a session keeps its temporary directories; None where the tmpdir plugin is off.

    Public only as the fixture `tmp_path_factory`, and the ranks' folders are named before any test runs. xdist takes
    it from the same attribute for its workers.
    """
    factory = getattr(config, "_tmp_path_factory", None)
    return None if factory is None else Path(factory.getbasetemp())


def rewrite_asserts_of_initial_files(session: pytest.Session) -> None:
    """Have pytest rewrite the asserts of the files that `session` is given by name, whatever their names.

    pytest does so when it starts to collect, which a rank does once for each file. Called once a collection knows what
    it is given. Files that the command line names beside it count too: one may import the other.
    """
    from _pytest import assertion

    config = session.config
    named = (config.invocation_params.dir / str(argument).partition("::")[0] for argument in config.args)
    session._initialpaths |= {Path(os.path.abspath(path)) for path in named}
    assertion.pytest_collection(session)


def teardown_for(item: pytest.Item) -> None:
    """Tear down what is set up and not `item`'s: fixtures kept for a test that did not come.

    The public hook, `pytest_runtest_teardown`, is about an item whose phases run, and its plugins fail for another.
    Raises what the fixtures raise.
    """
    item.session._setupstate.teardown_exact(item)


def teardown_to(session: pytest.Session, following: pytest.Item | None) -> None:
    """Tear down what is set up and `following` does not use (None: all), where no test runs that would do it."""
    session._setupstate.teardown_exact(following)


def forget_sections(item: pytest.Item) -> None:
    """Of a test that is run once more, the output that it was found to have written before."""
    item._report_sections.clear()


def captured_streams(config: pytest.Config) -> dict[str, Any]:
    """Return the files ``stdout`` and ``stderr`` that pytest captures into; empty without a capture.

    They have a descriptor of a file without a name (``fd``), or `getvalue` and hold the text in memory (``sys`` and
    ``tee-sys``). pytest has no public way to read them while a phase runs, nor to say where they are kept.
    """
    capturing = getattr(config.pluginmanager.get_plugin("capturemanager"), "_global_capturing", None)
    streams: dict[str, Any] = {"stdout": getattr(capturing, "out", None), "stderr": getattr(capturing, "err", None)}
    return {name: stream.tmpfile for name, stream in streams.items() if hasattr(stream, "tmpfile")}


def captured_log(config: pytest.Config) -> logging.Handler | None:
    """Return the handler whose text is the captured log of a report; None where the logging plugin is off."""
    return getattr(config.pluginmanager.get_plugin("logging-plugin"), "report_handler", None)


def leave_fixtures_to_ranks(item: pytest.Item) -> None:
    """Give `item`, here and in each rerun, a request that sets nothing up: its fixtures belong to its ranks.

    Plugins that wrap a test's phases may ask its request for fixtures: Hypothesis does, to learn their scope. The
    item's own data (names of its fixtures, parameters, marks, function) stays as it is, for plugins that report it.
    """
    if hasattr(item, "_initrequest"):
        vars(item)["_initrequest"] = functools.partial(_without_fixtures, item)
        _without_fixtures(item)


def _without_fixtures(item: Any) -> None:
    item.funcargs = {}
    item._request = _request_without_fixtures()(item, _ispytest=True)


@functools.cache
def _request_without_fixtures() -> Any:
    """Return the class of such requests."""
    from _pytest.fixtures import FuncFixtureInfo, TopRequest

    class NoFixtureManager:
        """Stands in for pytest's fixture manager, and knows no fixtures."""

        def getfixtureinfo(self, *args: object, **kwargs: object) -> FuncFixtureInfo:
            return FuncFixtureInfo((), (), [], {})

        def getfixturedefs(self, *args: object, **kwargs: object) -> None:
            return None

    class NoFixturesRequest(TopRequest):  # type: ignore[misc]
        """The request of a test whose fixtures are set up in other processes."""

        _fixturemanager: Any = NoFixtureManager()

        def _get_active_fixturedef(self, argname: str) -> Any:
            name = self.node.nodeid
            raise LookupError(f"the fixture {argname!r} of {name} is set up in the test's ranks, not in this process")

    return NoFixturesRequest


def left_out_conftests(hooks: Any) -> frozenset[object]:
    """Return the conftests that do not apply to a node whose `ihook` is `hooks`, and not the session's own hooks."""
    return frozenset(hooks.remove_mods)


def ask_before_debugging(may: Callable[[str], bool]) -> None:
    """Have `may` asked before each debugger that pytest starts, by the name of the way it is started.

    Where it says no the program goes on as if no debugger had been asked for. Of ``breakpoint()``, ``--trace`` and
    ``--pdb`` only the last has a hook that comes before the debugger's first word. A debugger that comes to a
    breakpoint of its own asks once more: pytest has gone on capturing since.
    """
    from _pytest.debugging import pytestPDB

    original: Any = pytestPDB._init_pdb

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

    pytestPDB._init_pdb = init  # type: ignore[method-assign]


class _NoDebugger:
    """What pytest does with a debugger, and nothing comes of it."""

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
    """Return the object that collects what ``--junitxml`` writes; None without this option, and in a worker of xdist.

    Public only as the fixtures `record_xml_attribute` and `record_testsuite_property`, which are lost in a rank.
    """
    from _pytest.junitxml import xml_key

    return config.stash.get(xml_key, None)


def forget_junit_log(config: pytest.Config) -> None:
    """Leave pytest's fixtures, and the end of its plugin, without the object that :func:`junit_log` returns."""
    from _pytest.junitxml import xml_key

    del config.stash[xml_key]


def ask_before_each_test(config: pytest.Config, passes_over: Callable[[pytest.Item, pytest.Item | None], bool]) -> None:
    """Have an xdist worker ask ``passes_over(item, nextitem)`` before it runs a test; if True, it runs nothing.

    xdist has no way to do so. An implementation of `pytest_runtest_protocol` that runs nothing would be surrounded by
    the wrappers of other plugins, which would hear of a test that has no phases.
    """
    own, hook = config, config.hook

    def run(item: pytest.Item, nextitem: pytest.Item | None) -> object:
        return True if passes_over(item, nextitem) else hook.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def serialize(config: object, report: pytest.CollectReport | pytest.TestReport) -> object:
        return hook.pytest_report_to_serializable(config=own, report=report)

    hooks = _Overridden(hook, pytest_runtest_protocol=run, pytest_report_to_serializable=serialize)
    # Its class is of a module that execnet has run under a name of its own.
    workers = [one for _, one in config.pluginmanager.list_name_plugin() if type(one).__name__ == "WorkerInteractor"]
    if not workers:
        raise RuntimeError("this release of pytest-xdist has no plugin of the class WorkerInteractor in its workers")
    for worker in workers:
        vars(worker)["config"] = _Overridden(config, hook=hooks)


class _Overridden:
    """An object with the attributes of `original`, but for `others`."""

    def __init__(self, original: object, **others: object) -> None:
        self._original = original
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
