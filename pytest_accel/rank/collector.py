"""The collector of a rank, a plugin of its pytest session.

The session collects nothing when it starts. A file is collected when the driver first requests one of its tests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from os import environ
from os.path import relpath
from pathlib import Path
from traceback import extract_tb
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import expects_failure, rewrite_asserts_of_initial_files, teardown_to
from pytest_accel.compat.torch_variables import READ_AT_IMPORT
from pytest_accel.core.frames import is_library
from pytest_accel.core.node_refs import NodeRef, TestFamily, are_copies, reference, without_parameters
from pytest_accel.core.source_files import digest_of, text_of
from pytest_accel.core.truncation import cut_end
from pytest_accel.messages.rank_messages import RunTest, TornDown
from pytest_accel.messages.serialization import exception_text, sketch
from pytest_accel.rank.context import RankContext

_MOST_NAMES = 5
"""Number of names of tests that a message lists at most."""
_LONGEST_NAME = 100
"""Number of characters that a message shows of each name."""


class NotCollected(Exception):
    """This rank does not have the test that the driver requests. The message is the text for the report."""

    def __init__(self, text: str, headline: str = "") -> None:
        """`headline` is the cause in one line, if it is known."""
        super().__init__(text)
        self.headline = headline


class FileSkipped(Exception):
    """The file of a test was skipped as a whole (``pytest.skip(allow_module_level=True)``, ``importorskip``)."""

    def __init__(self, longrepr: Any) -> None:
        super().__init__(longrepr)
        self.longrepr = longrepr
        """Path, line and reason, as in pytest's reports."""


class RankCollector:
    """Pytest plugin that collects and finds tests, and tears down the fixtures that two tests do not share.

    There is one instance in each rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._read_by_torch = {name: environ.get(name) for name in READ_AT_IMPORT}
        self.late_variables: list[tuple[str, str]] = []
        """Paths of files, each with a variable that torch reads at import and the file has set after that.

        Such a variable has an effect under plain pytest, and none in a rank that was forked from a process with torch.
        """
        self.errors: list[str] = []
        """Errors of the last collection, and internal errors of pytest."""
        self._import_error = ""
        """The error of the last collection in one line, if the import of the file has failed."""
        self._skipped: dict[str, Any] = {}
        """Reason by node id of a collector that was skipped in the last collection."""
        self._collected: list[pytest.Item] = []
        """The tests of the last collection."""
        self._directory_nodes: dict[Path, pytest.Collector] = {}
        self._collected_directories: set[Path] = set()
        """The directories that were part of any collection."""
        self._skipped_files: dict[str, Any] = {}
        """Path, line and reason, as in pytest's reports, by path of a file that was skipped as a whole."""
        self._files: dict[str, dict[NodeRef, pytest.Item | None]] = {}
        """The tests of each collected file; None if a reference does not identify a test."""
        self.unexpected: dict[str, frozenset[NodeRef]] = {}
        """The tests that have ``xfail`` marks, but none that applies here, by the path of their file."""
        self._file: Path
        """The file that is being collected."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, Any, Any]:
        """Use one node for a directory in all collections, and collect only the path to the file in it."""
        node = yield
        if node is None:
            return None
        if path not in self._directory_nodes:  # Since pytest 9.1, the node owns the fixtures of the conftest.
            self._directory_nodes[path] = node
            # pytest would look at all files in the directory again for each file that is collected. Directories of
            # other classes decide for themselves what is in them.
            if type(node) in (pytest.Dir, pytest.Package):
                node.collect = partial(self._on_the_way, node)
        return self._directory_nodes[path]

    def _on_the_way(self, directory: pytest.Directory) -> Iterator[pytest.Item | pytest.Collector]:
        """Collect in `directory` the file that is being collected, or the directory on the path to it."""
        path = next((one for one in (self._file, *self._file.parents) if one.parent == directory.path), None)
        if path is None:
            return
        if path == self._file:
            yield from directory.ihook.pytest_collect_file(file_path=path, parent=directory)
        elif (node := directory.ihook.pytest_collect_directory(path=path, parent=directory)) is not None:
            yield node

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.Session):
            rewrite_asserts_of_initial_files(collector)
        elif isinstance(collector, pytest.Directory):
            self._collected_directories.add(collector.path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._collected = list(items)  # Before -k and others deselect tests: the driver has selected them already.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longreprtext}")
        elif report.skipped:
            self._skipped[report.nodeid] = report.longrepr

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any]) -> None:
        """Record the error with which the import of a test file has failed. pytest calls this for other errors, too."""
        if isinstance(node, pytest.Module) and call.excinfo is not None:
            error = call.excinfo.value
            if isinstance(error, node.CollectError) and error.__cause__ is not None:
                error = error.__cause__  # pytest raises CollectError with a longer text for an ImportError.
            self._import_error = f"{node.nodeid} cannot be imported in the ranks: {_headline(error)}"

    def find(self, session: pytest.Session, node: NodeRef, digest: bytes = b"") -> pytest.Item:
        """Return the test `node`; collect its file if that has not been done.

        `digest` is the digest of the file when the driver collected it. Raise :class:`NotCollected` if this rank has no
        such test, if the file has changed since, or if its collection fails, and :class:`FileSkipped` if the file is
        skipped as a whole.
        """
        if node.path in self._skipped_files:
            raise FileSkipped(self._skipped_files[node.path])
        root = session.config.rootpath
        if node.path not in self._files:
            if digest and digest_of(text_of(Path(node.path))) not in (b"", digest):
                text = "has changed since the session collected its tests; run the session again"
                raise NotCollected(f"{relpath(node.path, root)} {text}")
            self._collect(session, node.path)
        tests = self._files[node.path]
        found = tests.get(node)
        if found is None:
            raise _not_found(node, tests, relpath(node.path, root))
        return found

    def families(self, path: str) -> frozenset[TestFamily]:
        """Return the families of tests in the file `path` in which this rank can find each test."""
        tests = self._files.get(path, {})
        unclear = {node.family for node, item in tests.items() if item is None}
        return frozenset(node.family for node in tests) - unclear

    def _collect(self, session: pytest.Session, path: str) -> None:
        """Collect the file `path`; raise :class:`NotCollected` or :class:`FileSkipped` as `find` does."""
        self.errors.clear()
        self._import_error = ""
        self._skipped.clear()
        self._collected = []
        self._file = Path(path)
        self._announce_conftests(session.config)
        before = dict(environ)
        try:
            with suppress(pytest.UsageError):
                session.perform_collect([_argument(path, session.config.invocation_params.dir)])
                # Some plugins add items when the collection has finished (anyio).
                known = set(map(id, self._collected))
                self._collected += [item for item in session.items if id(item) not in known]
        except SystemExit as error:
            last = extract_tb(error.__traceback__)[-1]
            self.errors.append(f"{last.filename}:{last.lineno}: SystemExit: {error}")
        if self._context.began_with_torch:
            read = self._read_by_torch
            changed = [name for name in sorted(read) if environ.get(name) not in (before.get(name), read[name])]
            self.late_variables += [(path, name) for name in changed]
        marked = [item for item in self._collected if item.get_closest_marker("xfail") is not None]
        self.unexpected[path] = frozenset(reference(item) for item in marked if not expects_failure(item))
        for item in self._collected:
            _leave_xfail_to_the_driver(item)
        if self.errors:
            raise NotCollected("\n".join(self.errors), self._import_error)
        if self._skipped and not self._collected:
            longrepr = self._skipped_files[path] = next(iter(self._skipped.values()))
            raise FileSkipped(longrepr)
        tests: dict[NodeRef, pytest.Item | None] = {}
        for item in self._collected:
            node = reference(item)
            first = tests.setdefault(node, item)
            if first is not None and first is not item and not are_copies(first, item):
                tests[node] = None  # The driver's test may be either of the two.
        self._files[path] = tests

    def _announce_conftests(self, config: pytest.Config) -> None:
        """Register the fixtures of conftests of the file whose directory has never been collected.

        At the end of a collection, pytest 9.1 forgets the fixtures of conftests whose directory was not part of it.
        """
        fixtures: Any = config.pluginmanager.get_plugin("funcmanage")
        for directory in self._file.parents:
            name = str(directory / "conftest.py")
            plugin = config.pluginmanager.get_plugin(name)
            # pytest keeps these fixtures. Registered a second time, each of them would be duplicated.
            is_known = directory == config.rootpath or directory in self._collected_directories
            if plugin is not None and not is_known:
                fixtures.pytest_plugin_registered(plugin=plugin, plugin_name=name)

    def following(self, session: pytest.Session, item: pytest.Item, request: RunTest) -> pytest.Item | None:
        """Return the item to pass to pytest as the next item after `item`; None if `item` is the last test.

        pytest keeps the fixtures that the two items share.
        """
        if request.last:
            return None
        if request.next is None:
            return _UnknownItem.from_parent(session, name="later")
        path = Path(request.next.path)
        known = self._files.get(request.next.path, {}).get(request.next)
        if known is not None:
            # It may be the same item, for a copy or another variant of the test. pytest would keep its own fixtures.
            parent: Any = known.parent
            return _UnknownItem.from_parent(parent, name="later")
        # If this rank does not have the next test, `find` raises when the driver requests it.
        kinds, above = (pytest.Directory, pytest.File), (path, *path.parents)
        shared = [node for node in item.listchain() if isinstance(node, kinds) and node.path in above]
        return _UnknownItem.from_parent(shared[-1] if shared else session, name="later")

    def tear_down_to(self, session: pytest.Session, item: pytest.Item | None) -> TornDown:
        """Tear down the fixtures that `item` does not share, or all if it is None; return the error, if any.

        Fixtures were kept for the test that the driver expected next, and another may follow. An error that ends the
        session is raised.
        """
        try:
            teardown_to(session, item)
        except pytest.exit.Exception:
            raise
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            return TornDown(sketch(error), _traceback(error))
        return TornDown()


def _headline(error: BaseException) -> str:
    """Return the type and the first line of `error`."""
    first, _, _ = exception_text(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def _traceback(error: BaseException) -> str:
    """Return the headline of `error`, and its traceback without the frames of libraries."""
    found = pytest.ExceptionInfo.from_exception(error)
    return f"{_headline(error)}\n{found.getrepr(style='short', tbfilter=_own_frames)}"


def _own_frames(found: pytest.ExceptionInfo[BaseException]) -> Any:
    return found.traceback.filter(lambda entry: not is_library(str(entry.path)))


class _UnknownItem(pytest.Item):
    """Placeholder for a next test that is not collected yet; it keeps the fixtures of its parent node set up."""

    def runtest(self) -> None:
        """Do nothing: the placeholder is never run."""


def _argument(path: str, start: Path) -> str:
    """Return the argument with which pytest collects the file `path`.

    pytest takes ``[`` and ``::`` in an argument for parts of a test's name. For a path that contains them, the argument
    is a folder above them. `start`, the folder to which arguments are relative, may have them in its name.
    """
    argument = Path(relpath(path, start))
    return str(next(one for one in (argument, *argument.parents) if not ("[" in str(one) or "::" in str(one))))


def _not_found(node: NodeRef, tests: Iterable[NodeRef], file: str) -> NotCollected:
    """Return an error that says how the `tests` of `file` in this rank differ from the driver's test `node`."""
    if node in tests:
        text = f"several tests that a plugin has added have the name {_shown(node.names)}; give them different names"
        return NotCollected(f"{file}: {text}")
    function = without_parameters(node.names)
    found = [test.names for test in tests]
    same = [names for names in found if without_parameters(names) == function]
    text = f"this rank has collected {len(same)} of {_shown(function)}, and the driver {node.places[-1].members}"
    if len(same) == node.places[-1].members:
        text += ", with other names or in another order"
    why = ". The parameters of a test must be the same in every process" if same else ""
    listed = ", ".join(map(_shown, (same or found)[:_MOST_NAMES])) or "no test"
    return NotCollected(f"{file}: {text}; it has {listed}{why}")


def _shown(names: tuple[str, ...]) -> str:
    return cut_end("::".join(names), _LONGEST_NAME)


def _leave_xfail_to_the_driver(item: pytest.Item) -> None:
    """Remove the xfail marks of `item`: the driver applies them to the merged result of all ranks."""
    for node in item.listchain():
        node.own_markers[:] = [mark for mark in node.own_markers if mark.name != "xfail"]
