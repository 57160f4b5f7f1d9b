"""The tests of a rank: a file is collected when one of its tests is first asked for.

A plugin of the rank's pytest session, whose own collection finds nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from os.path import relpath
from pathlib import Path
from traceback import StackSummary, TracebackException, extract_tb
from typing import Any

import pytest

from pytest_accel.core.frames import is_library
from pytest_accel.core.messages import NodeRef, RunTest
from pytest_accel.core.shims import rewrite_asserts_of_initial_files, teardown_for


class NotCollected(Exception):
    """The file of a test could not be collected in this rank; the message says what went wrong, ready to be shown."""


class FileSkipped(Exception):
    """The file of a test was skipped as a whole where it was imported."""

    def __init__(self, longrepr: Any) -> None:
        super().__init__(longrepr)
        self.longrepr = longrepr
        """Path, line and reason, as in a report of pytest's."""


class Catalogue:
    """Finds tests, and keeps account of what stays set up from one to the next."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        """What went wrong in collecting."""
        self.activity = 0
        """How often code of the suite has run outside of a test: in collecting, or in a teardown out of turn."""
        self._skipped: dict[str, Any] = {}
        self._collected: list[pytest.Item] = []
        self._directories: dict[Path, pytest.Collector] = {}
        self._opened: set[Path] = set()
        """Directories that have been collected."""
        self._files: dict[str, dict[tuple[str, ...], pytest.Item]] = {}
        self._left: tuple[pytest.Item, list[Any]] | None = None
        self._only: Path | None = None
        """The file to collect, where pytest is given a folder that holds it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, Any, Any]:
        """One node for a directory in all collections: since pytest 9.1 its conftest's fixtures hang on the node."""
        made = yield
        return made if made is None else self._directories.setdefault(path, made)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.Session):
            rewrite_asserts_of_initial_files(collector)
        elif isinstance(collector, pytest.Directory):
            self._opened.add(collector.path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out all but the wanted file, where pytest is given a folder that holds it."""
        if self._only is None:
            return None
        return collection_path != self._only and collection_path not in self._only.parents

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._collected = list(items)  # Before -k, --lf and others deselect: the driver has made that choice.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longreprtext}")
        elif report.skipped:
            self._skipped[report.nodeid] = report.longrepr

    def find(self, session: pytest.Session, node: NodeRef) -> pytest.Item:
        """The test `node`.

        LookupError where this rank has none of that name; :class:`NotCollected` and :class:`FileSkipped` for its file.
        """
        if node.path not in self._files:
            self.activity += 1
            self.errors.clear()
            self._skipped.clear()
            self._collected = []
            self._announce_conftests(session.config)
            argument, self._only = _argument(node.path, session.config.invocation_params.dir)
            try:
                with suppress(pytest.UsageError):
                    session.perform_collect([argument])
                    # Some plugins make items when the collection has finished (anyio).
                    known = set(self._collected)
                    self._collected += [item for item in session.items if item not in known]
            except SystemExit as error:
                last = extract_tb(error.__traceback__)[-1]
                self.errors.append(f"{last.filename}:{last.lineno}: SystemExit: {error}")
            finally:
                self._only = None
            for item in self._collected:
                _leave_xfail_to_the_driver(item)
            if self.errors:
                raise NotCollected("\n".join(self.errors))
            if self._skipped and not self._collected:
                raise FileSkipped(next(iter(self._skipped.values())))
            self._files[node.path] = {names_of(item): item for item in self._collected}
        found = self._files[node.path].get(node.names)
        if found is None:
            here = ", ".join("::".join(names) for names in self._files[node.path]) or "none"
            raise LookupError(f"{node.path} has no test {'::'.join(node.names)} in this rank; its tests here: {here}")
        return found

    def _announce_conftests(self, config: pytest.Config) -> None:
        """pytest 9.1 forgets, at the end of a collection, the fixtures of conftests whose directory was not part of it.

        Those of the others, and of the root directory's, it knows: told twice, it makes each fixture once more.
        """
        fixtures: Any = config.pluginmanager.get_plugin("funcmanage")
        for name, plugin in config.pluginmanager.list_name_plugin():
            path = Path(name)
            if path.name == "conftest.py" and path.parent not in (*self._opened, config.rootpath):
                fixtures.pytest_plugin_registered(plugin=plugin, plugin_name=name)

    def following(self, session: pytest.Session, item: pytest.Item, request: RunTest) -> pytest.Item | None:
        """What pytest is told comes next, which decides the fixtures that outlive the test."""
        if request.last:
            return None
        if request.next is None:
            return _Later.from_parent(session, name="later")
        if request.next.path == request.node.path:
            # A test that this rank does not have is an error of its own, when the driver asks for it.
            file = next(node for node in reversed(item.listchain()) if isinstance(node, pytest.File))
            return self._files[request.next.path].get(request.next.names) or _Later.from_parent(file, name="later")
        path = Path(request.next.path)
        shared = [node for node in item.listchain() if isinstance(node, pytest.Directory) and node.path in path.parents]
        return _Later.from_parent(shared[-1] if shared else session, name="later")

    def ran(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """`item` has run, and what `following` shares with it is still set up."""
        self._left = None if following is None else (following, _common(item, following))

    def drop_stale(self, item: pytest.Item) -> str | None:
        """Tear down what was kept for a test that did not come."""
        left, self._left = self._left, None
        if left is None or all(node in item.listchain() for node in left[1]):
            return None
        self.activity += 1
        try:
            teardown_for(item)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            told = TracebackException.from_exception(error)
            _leave_out_libraries(told)
            return f"in tearing down what was kept for {left[0].nodeid}:\n{''.join(told.format())}"
        return None


class _Later(pytest.Item):
    """Stands for a test of some other file: what belongs to the session, or to a package of both, outlives this one."""

    def runtest(self) -> None:
        """Nothing: it is never run."""


def _argument(path: str, start: Path) -> tuple[str, Path | None]:
    """Return what pytest is given to collect the file `path`, and the file itself where that is a folder that holds it.

    pytest takes ``[`` and ``::`` in an argument for parts of a test's name. `start`, the folder to which arguments are
    relative, may have them in its name.
    """
    argument = Path(relpath(path, start))
    plain = next(part for part in (argument, *argument.parents) if not ("[" in str(part) or "::" in str(part)))
    return str(plain), None if plain == argument else Path(path)


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the nodes below the file of `item`, down to the item itself.

    Not the parts of its id: plugins rewrite ids, and may give several tests the same one.
    """
    chain = item.listchain()
    file = next((index for index, node in enumerate(chain) if isinstance(node, pytest.File)), 0)
    return tuple(node.name for node in chain[file + 1 :])


def _leave_out_libraries(told: TracebackException) -> None:
    """Remove the frames of pytest, of this package and of other libraries, in every part of what is `told`."""
    own = [frame for frame in told.stack if not is_library(frame.filename)]
    told.stack = StackSummary.from_list(own or told.stack)
    for part in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if part is not None:
            _leave_out_libraries(part)


def _common(item: pytest.Item, following: pytest.Item) -> list[Any]:
    """The collectors that stay set up between two tests."""
    later = following.listchain()
    return [node for node in item.listchain() if node in later]


def _leave_xfail_to_the_driver(item: pytest.Item) -> None:
    for node in item.listchain():
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name != "xfail"]
