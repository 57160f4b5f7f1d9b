"""Tests of the verdict of every outcome of a rank, at every site in a test, on one, some and all ranks of a world.

The expected result of an outcome that plain pytest knows is that of a plain pytest session, which runs the same files
first. A skip on some ranks only, and a rank that dies, are always failures of the phase in which they happen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from pytest_accel.core.truncation import ranks_text
from tests.background_suite import PYTEST, BackgroundSuite
from tests.core_verdicts import TESTS, VERDICTS
from tests.run import CAUSES, Run, without_subtests


@dataclass(frozen=True)
class OutcomeCase:
    """An outcome of a test on a rank: the code that causes it, and the expected report."""

    code: str
    cause: str
    """The cause of a failure, without the ranks."""
    dies: bool = False
    skips: bool = False
    everywhere: bool = True
    """True if the outcome is tested at every site, False if only in the call phase."""


OUTCOMES = {
    "passes": OutcomeCase("pass", ""),
    "fails": OutcomeCase("assert 1 == 2, 'by hand'", "failed: AssertionError"),
    "skips": OutcomeCase("pytest.skip('by hand')", "disagreed: skip", skips=True),
    "xfails": OutcomeCase("pytest.xfail('by hand')", "disagreed: skip", skips=True, everywhere=False),
    "memory": OutcomeCase("raise MemoryError('by hand')", "failed: MemoryError", everywhere=False),
    "recursion": OutcomeCase("again = lambda: again(); again()", "failed: RecursionError", everywhere=False),
    "unpicklable": OutcomeCase("raise Unpicklable(lambda: 1)", "failed: Unpicklable", everywhere=False),
    "unprintable": OutcomeCase("raise Unprintable", "failed: Unprintable", everywhere=False),
    "group": OutcomeCase(
        "raise ExceptionGroup('by hand', [ValueError(1), KeyError(2)])", "failed: ExceptionGroup", everywhere=False
    ),
    "sys_exit_0": OutcomeCase("sys.exit(0)", "failed: SystemExit"),
    "exit_0": OutcomeCase("os._exit(0)", "died: status 0", dies=True),
    "exit_3": OutcomeCase("os._exit(3)", "died: status 3", dies=True, everywhere=False),
    "sigkill": OutcomeCase("os.kill(os.getpid(), signal.SIGKILL)", "died: SIGKILL", dies=True, everywhere=False),
    "sigsegv": OutcomeCase("faulthandler._sigsegv()", "died: SIGSEGV", dies=True, everywhere=False),
    "sigabrt": OutcomeCase("os.abort()", "died: SIGABRT", dies=True, everywhere=False),
    "sigterm": OutcomeCase("os.kill(os.getpid(), signal.SIGTERM)", "died: SIGTERM", dies=True, everywhere=False),
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
    def __str__(self):
        return "the same text in each rank"


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def mine():
    return int(os.environ.get("RANK", "-1")) in WHO or "RANK" not in os.environ and PLAIN


pytestmark = pytest.mark.distributed(2, init=False)
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
FILE_SITES = {
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
"""Sites that need a separate file for each outcome."""


def suite_files(acting_ranks: set[int], *, plain: bool) -> dict[str, str]:
    """Return the text of each test file by its name. Only `acting_ranks` have the outcomes."""
    head = HEAD.replace("WHO", repr(acting_ranks)).replace("PLAIN", str(plain))
    shared_file, single_files = [head], {}
    for name, outcome in OUTCOMES.items():
        if plain and outcome.dies:
            continue
        for site, template in (SITES | FILE_SITES).items():
            if outcome.everywhere or site == "call":
                text = template.replace("WAY", name).replace("CODE", outcome.code)
                if site in FILE_SITES:
                    single_files[f"test_{site}_{name}.py"] = head + text
                else:
                    shared_file.append(text)
    shared_file.append("\ndef test_last(): pass\n")
    return {"test_many.py": "\n".join(shared_file), **single_files}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Provide the results of a plain pytest session for the tests in which no process dies."""
    folder = tmp_path_factory.mktemp("plain")
    for name, text in suite_files({0}, plain=True).items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:accel", "-p", "no:cacheprovider", "-W", "error"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTEST_ADDOPTS")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "160"}
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = distributed: x\n")
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Run(result.returncode, result.stdout).outcomes()


def expected(test: str, acting_ranks: set[int], plain: dict[str, str]) -> str:
    """Return the expected result words of `test` when `acting_ranks` of two ranks have its outcome."""
    site, outcome = next(
        (site, OUTCOMES[name])
        for site in sorted(SITES | FILE_SITES, key=len, reverse=True)
        for name in OUTCOMES
        if test == f"test_{site}_{name}"
    )
    if outcome.dies or (outcome.skips and len(acting_ranks) < 2):
        return {"setup": "ERROR", "module": "ERROR", "session": "ERROR"}.get(
            site, "PASSED ERROR" if site in ("teardown", "module_end") else "FAILED"
        )
    return plain[test]


@pytest.mark.long(except_for="1 of 2")
@pytest.mark.parametrize("acting_ranks", [pytest.param({1}, id="1 of 2"), pytest.param({0, 1}, id="all of 2")])
def test_each_outcome_on_some_ranks_has_the_expected_verdict(
    suite: BackgroundSuite, plain: dict[str, str], acting_ranks: set[int]
) -> None:
    suite.without_torch()
    for name, text in suite_files(acting_ranks, plain=False).items():
        suite.write(name, text)
    run = suite.run("--accel", "none", CAUSES)
    outcomes = run.outcomes()
    tests = [name for name in outcomes if name != "test_last"]
    assert len(tests) == sum(len(SITES | FILE_SITES) if one.everywhere else 1 for one in OUTCOMES.values())
    verdicts = {name: expected(name, acting_ranks, plain) for name in tests}
    for name, words in verdicts.items():
        if {"FAILED", "ERROR"} & set(words.split()):
            outcome = next(outcome for ending, outcome in OUTCOMES.items() if name.endswith(f"_{ending}"))
            who = ranks_text([*acting_ranks])
            if name.startswith("test_thread_") and not outcome.dies:  # The thread's error is a warning of pytest.
                verdicts[name] += f" failed: PytestUnhandledThreadExceptionWarning; {who}"
            else:
                verdicts[name] += f" {outcome.cause}{'' if outcome.skips else f'; {who}'}"
    run.expect({"test_last": "PASSED", **verdicts})


_MPIRUN = ("mpirun.openmpi", "--host", "localhost:2", "-n", "2")
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PY_COLORS": "0"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "program"),
    [
        pytest.param(("-n2",), PYTEST, id="workers"),
        pytest.param(("--accel-launcher=on",), (*_MPIRUN, *PYTEST), id="mpirun"),
    ],
)
def test_the_core_rows_have_one_verdict_over_each_transport(
    suite: BackgroundSuite, options: tuple[str, ...], program: tuple[str, ...]
) -> None:
    """`tests/features/ray` has the same rows on a Ray cluster, and `test_several_machines.py` under torchrun."""
    if shutil.which(program[0]) is None:
        pytest.skip(f"there is no {program[0]} here")
    suite.write("test_it.py", TESTS)
    run = suite.start(CAUSES, *options, program=program, environment=_AS_ROOT).finish()
    run.expect(without_subtests(VERDICTS) if "-n2" in options else VERDICTS)
