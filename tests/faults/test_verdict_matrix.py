"""Every way in which a rank can end a test, everywhere in a test, on one, some and all ranks of worlds of all sizes.

What is expected of an outcome that plain pytest has, too, is what plain pytest makes of it: it runs the same files
first. What only some ranks do is never better than a failure of that phase; a rank that goes away is always one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.faults.conftest import Run

if TYPE_CHECKING:
    from tests.faults.conftest import Suite


@dataclass(frozen=True)
class Way:
    """A way in which a rank ends a test, and the expected report."""

    code: str
    text: str
    """A regular expression."""
    dies: bool = False
    passes: bool = False
    skips: bool = False
    everywhere: bool = True
    """True if it is tested at every site; False: only in the call phase."""


WAYS = {
    "passes": Way("pass", "", passes=True),
    "fails": Way("assert 1 == 2, 'by hand'", "AssertionError: by hand"),
    "skips": Way("pytest.skip('by hand')", "by hand", skips=True),
    "xfails": Way("pytest.xfail('by hand')", "by hand", skips=True, everywhere=False),
    "memory": Way("raise MemoryError('by hand')", "MemoryError: by hand", everywhere=False),
    "recursion": Way("again = lambda: again(); again()", "RecursionError", everywhere=False),
    "unpicklable": Way("raise Unpicklable(lambda: 1)", "Unpicklable", everywhere=False),
    "unprintable": Way("raise Unprintable", "Unprintable", everywhere=False),
    "group": Way("raise ExceptionGroup('by hand', [ValueError(1), KeyError(2)])", "by hand", everywhere=False),
    "sys_exit_0": Way("sys.exit(0)", r"SystemExit: 0"),
    "exit_0": Way("os._exit(0)", r"exited with status 0", dies=True),
    "exit_3": Way("os._exit(3)", r"exited with status 3", dies=True, everywhere=False),
    "sigkill": Way("os.kill(os.getpid(), signal.SIGKILL)", r"killed by SIGKILL", dies=True),
    "sigsegv": Way("faulthandler._sigsegv()", r"killed by SIGSEGV", dies=True, everywhere=False),
    "sigabrt": Way("os.abort()", r"killed by SIGABRT", dies=True, everywhere=False),
    "sigterm": Way("os.kill(os.getpid(), signal.SIGTERM)", r"killed by SIGTERM", dies=True, everywhere=False),
}
HEAD = """
import faulthandler
import os
import signal
import sys
import threading

import pytest

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup


class Unpicklable(Exception):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def mine():
    return int(os.environ.get("RANK", "-1")) in WHO or "RANK" not in os.environ and PLAIN


pytestmark = pytest.mark.distributed(SIZE)
"""
SITES = {
    "setup": """
@pytest.fixture
def one_WAY():
    if mine():
        CODE
def test_setup_WAY(one_WAY): pass
""",
    "call": """
def test_call_WAY():
    if mine():
        CODE
""",
    "teardown": """
@pytest.fixture
def last_WAY():
    yield
    if mine():
        CODE
def test_teardown_WAY(last_WAY): pass
""",
    "thread": """
def test_thread_WAY():
    def work():
        if mine():
            CODE
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
""",
    "session": """
@pytest.fixture(scope="session")
def session_WAY():
    if mine():
        CODE
def test_session_WAY(session_WAY): pass
""",
}
ALONE = {
    "module": """
@pytest.fixture(scope="module")
def module_WAY():
    if mine():
        CODE
def test_module_WAY(module_WAY): pass
""",
    "module_end": """
@pytest.fixture(scope="module")
def module_end_WAY():
    yield
    if mine():
        CODE
def test_module_end_WAY(module_end_WAY): pass
""",
}
"""Sites that need a file of their own for each way."""


def files(size: int, who: frozenset[int], *, plain: bool) -> dict[str, str]:
    """The tests, by file."""
    head = HEAD.replace("WHO", repr(set(who))).replace("SIZE", str(size)).replace("PLAIN", str(plain))
    several, alone = [head], {}
    for name, way in WAYS.items():
        if plain and way.dies:
            continue
        for site, template in (SITES | ALONE).items():
            if way.everywhere or site == "call":
                text = template.replace("WAY", name).replace("CODE", way.code)
                if site in ALONE:
                    alone[f"test_{site}_{name}.py"] = head + text
                else:
                    several.append(text)
    several.append("\ndef test_last(): pass\n")
    return {"test_many.py": "\n".join(several), **alone}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of plain pytest for the tests in which no process dies."""
    folder = tmp_path_factory.mktemp("plain")
    for name, text in files(1, frozenset({0}), plain=True).items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:accel", "-p", "no:cacheprovider", "-W", "error"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTEST_ADDOPTS")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "160"}
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = distributed: x\n")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Run(done.returncode, done.stdout).words


def expected(test: str, size: int, who: frozenset[int], plain: dict[str, str]) -> str:
    """The words of `test` where the ranks `who` of `size` go its way."""
    site, way = next(
        (site, WAYS[name])
        for site in sorted(SITES | ALONE, key=len, reverse=True)
        for name in WAYS
        if test == f"test_{site}_{name}"
    )
    if way.dies or (way.skips and len(who) < size):
        return {"setup": "ERROR", "module": "ERROR", "session": "ERROR"}.get(
            site, "PASSED ERROR" if site in ("teardown", "module_end") else "FAILED"
        )
    return plain[test]


@pytest.mark.long(except_for="all of 1")
@pytest.mark.parametrize(
    ("size", "who"),
    [
        pytest.param(1, {0}, id="all of 1"),
        pytest.param(2, {1}, id="1 of 2", marks=pytest.mark.nightly),
        pytest.param(2, {0, 1}, id="all of 2", marks=pytest.mark.nightly),
        pytest.param(4, {2}, id="1 of 4"),
        pytest.param(4, {1, 3}, id="2 of 4", marks=pytest.mark.nightly),
        pytest.param(4, {0, 1, 2, 3}, id="all of 4", marks=pytest.mark.nightly),
    ],
)
def test_each_way_to_end_on_some_ranks_has_its_verdict(
    suite: Suite, plain: dict[str, str], size: int, who: set[int]
) -> None:
    for name, text in files(size, frozenset(who), plain=False).items():
        suite.write(name, text)
    run = suite.run("--accel", "none")
    tests = [name for name in run.words if name != "test_last"]
    assert len(tests) == sum(len(SITES | ALONE) if way.everywhere else 1 for way in WAYS.values())
    run.expect({"test_last": "PASSED"} | {name: expected(name, size, frozenset(who), plain) for name in tests})
    for name in tests:
        if {"FAILED", "ERROR"} & set(run.words[name].split()):
            way = next(way for word, way in WAYS.items() if name.endswith(f"_{word}"))
            said = run.failure(name)
            assert re.search(way.text, said), f"{name} does not say {way.text!r} but\n{said}"
            if size > 1:
                ranks = re.findall(r"^ranks? ([0-9, -]+)", said, re.MULTILINE)
                assert ranks, f"{name} names no rank\n{said}"
    suite.expect_nothing_left()
