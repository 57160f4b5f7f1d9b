"""A suite's files: where another process finds them, and their texts and nodes, to compare with another process.

pytest takes the value of an option that no loaded plugin has registered yet for a path, if it exists. So a process that
parses ``--accel-output /tmp/logs`` when the folder has been made would find another rootdir and ini file than the first
process, in which there was no such folder. Therefore each process gets the place of the suite by options.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

_LONGEST_TEXT = 1 << 20
"""Number of characters of a test file that are searched for marks. A file of gigabytes would take seconds."""
GIVEN_OPTIONS = "PYTEST_ACCEL_ADDOPTS"
"""The variable by which an xdist worker gets the user's ``PYTEST_ADDOPTS``."""
_ADDED = "PYTEST_ADDOPTS"
_DIGEST: pytest.StashKey[bytes] = pytest.StashKey()
"""The digest of the text of a test file before it was imported."""


class Children:
    """The children of a collector as they were collected, before any plugin renames, reorders or selects them."""

    def __init__(self, nodes: Sequence[pytest.Item | pytest.Collector]) -> None:
        self.names = [node.name for node in nodes]
        self.families = [getattr(node, "originalname", None) or node.name for node in nodes]
        self.places: Any = None
        """The `NodePlace` of each child, made when the first is asked for: most files have no test for ranks."""


PLACE: pytest.StashKey[tuple[Children, int]] = pytest.StashKey()
"""The children among which a collector has returned the node, and its index there. Copies of the node have it, too."""


class PlaceRecorder:
    """Pytest plugin that records the places of all nodes. Registered in every process that collects."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Record the places before other wrappers, such as ``--lf``, leave out some of the children."""
        report = yield
        if not isinstance(collector, pytest.Session | pytest.Directory):
            nodes = report.result or ()
            children = Children(nodes)
            for index, node in enumerate(nodes):
                node.stash[PLACE] = children, index
        return report


def text_of(path: Path) -> str:
    """Return the start of the text of a test file, or "" if it cannot be read: the collection reports the error.

    A path that is no regular file is not opened: to open a named pipe may block, and a device may have no end.
    """
    try:
        if not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_TEXT)
    except OSError:
        return ""


def digest_of(text: str) -> bytes:
    """Return the digest of the `text` of a test file; empty for an empty text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest() if text else b""


def record_file(file: pytest.File) -> str:
    """Record the digest of a test file, before it is imported, and return its text."""
    text = text_of(file.path)
    file.stash[_DIGEST] = digest_of(text)
    return text


def recorded_digest(item: pytest.Item) -> bytes:
    """Return the digest of the file of `item` before this process has imported it; empty if it is not known."""
    file = next((node for node in item.listchain() if isinstance(node, pytest.File)), None)
    return b"" if file is None else file.stash.get(_DIGEST, b"")


def place_options(config: pytest.Config) -> list[str]:
    """Return the command line options with which another process finds the suite where `config` has found it."""
    cutoff = getattr(config.known_args_namespace, "confcutdir", None) or config.rootpath
    ini_file = [] if config.inipath is None else [f"-c{config.inipath}"]
    return [f"--rootdir={config.rootpath}", *ini_file, f"--confcutdir={config.invocation_params.dir / cutoff}"]


def for_worker(config: pytest.Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for an xdist worker, which gets the controller's command line; `environ` is its own."""
    given = environ.get(_ADDED, "")
    return {_ADDED: f"{given} {shlex.join(place_options(config))}".lstrip(), GIVEN_OPTIONS: given}


def restore_in_worker() -> None:
    """Put back the variable that :func:`for_worker` has changed: processes that tests start would inherit it."""
    given = os.environ.pop(GIVEN_OPTIONS)
    if given:
        os.environ[_ADDED] = given
    else:
        del os.environ[_ADDED]
