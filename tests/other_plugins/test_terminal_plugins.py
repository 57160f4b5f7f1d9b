"""Tests of plugins that replace pytest's terminal reporter, or change what it shows."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.deadline import scaled
from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair
    from tests.run import Run

_TESTS = '''
    import pytest

    in_ranks = pytest.mark.distributed(2, device="cpu")


    def test_before():
        pass


    @in_ranks
    def test_passes():
        """Runs in ranks."""


    @in_ranks
    def test_fails():
        """Runs in ranks."""
        assert {"a": 1, "b": [1, 2, 3]} == {"a": 1, "b": [1, 2, 4]}


    @in_ranks
    def test_skips():
        pytest.skip("not today")


    @in_ranks
    @pytest.mark.xfail(reason="known")
    def test_known():
        assert 0


    @in_ranks
    @pytest.mark.parametrize("n", [1, 2])
    def test_many(n):
        pass


    @pytest.fixture
    def broken():
        raise ValueError("broken")


    @in_ranks
    def test_has_no_fixture(broken):
        pass


    def test_after():
        assert [1, 2, 3] == [1, 2, 4]
    '''

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OUTCOMES = r"\d+ (?:passed|failed|skipped|xfailed|error)s?"


def _find_in_output(run: Run, pattern: str) -> list[str]:
    """Return the parts of the output of `run`, without colours, that match `pattern`; fail if there are none."""
    found = re.findall(pattern, _COLOURS.sub("", run.text), re.MULTILINE)
    assert found, f"no match of {pattern} in\n{run.text}"
    return found


def _plugin_params(module: str, name: str, options: str, pattern: str) -> object:
    """Return a parameter set for a plugin that is registered as `name`; `pattern` matches what it shows."""
    return pytest.param(name, options.split(), pattern, marks=needs(module), id=name)


_PLUGINS = [
    _plugin_params("pytest_pretty", "pretty", "", rf"^ +{_OUTCOMES}$|^│ +test_mix.py +│ +\w+ +│ +\d+ +│ +\d+ "),
    _plugin_params("pytest_sugar", "sugar", "--force-sugar", rf"^ +{_OUTCOMES}$|^ +- test_mix.py:.*|^ test_mix.py \S+"),
    _plugin_params(
        "pytest_instafail", "instafail", "--instafail", r"^_+ .*test_\w+ _+$|^test_mix.py \S+|(?<=== )\d.*(?= in )"
    ),
    _plugin_params("pytest_progress", "progress", "--show-progress", r"\d+ of 9 completed, .*ReRun"),
    _plugin_params("pytest_spec", "pytest_spec", "--spec", r"^ +[✓✗»] .*|^test_mix.py:$"),
    _plugin_params("pytest_testdox", "testdox", "--force-testdox", r"^ +[✓✗»] .*|^mix$"),
    _plugin_params("pytest_emoji", "emoji", "--emoji", r"^test_mix.py .*|^(?:FAILED|ERROR) \W+test_mix.py::\w+"),
    _plugin_params("pytest_tldr", "tldr", "", r"^[.sFEx]+$|^Ran 9 tests|^FAILED .*|^(?:ERROR|FAIL): .*"),
    _plugin_params("pytest_pspec", "pspec", "--pspec -Wdefault", r"^ +[✓✗»] .*|^test_mix.py$"),
]


@pytest.mark.parametrize(("name", "options", "pattern"), _PLUGINS)
def test_each_test_is_shown_once(pair: Pair, name: str, options: list[str], pattern: str) -> None:
    """Under xdist, only lines that do not depend on the order in which tests end are compared."""
    pair.plugin(name)
    pair.write("test_mix.py", _TESTS)

    plain, marked = (one.run(*options, quiet=True) for one in (pair.plain, pair.marked))

    assert _find_in_output(marked, pattern) == _find_in_output(plain, pattern)
    assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED

    distributed = pair.marked.run("-n1", *options, quiet=True)

    expected, shown = (
        sorted(line for line in _find_in_output(run, pattern) if _is_independent_of_order(line))
        for run in (plain, distributed)
    )
    assert shown == expected
    assert distributed.ret == pytest.ExitCode.TESTS_FAILED


def _is_independent_of_order(line: str) -> bool:
    """Return whether a shown line does not depend on the tests that have ended before."""
    return not re.search(r"^ ?test_mix.py|^mix$|completed|^[.sFEx]+$", line)


@needs("pytest_rich")
def test_rich_shows_equal_totals_and_output_of_commands(pair: Pair) -> None:
    """pytest-rich replaces the reporter only at a terminal, and registers its own under another name."""
    pair.plugin("rich")
    pair.write("test_mix.py", _TESTS)
    pair.write(
        "conftest.py",
        """
        import sys

        import pytest


        @pytest.hookimpl(tryfirst=True)
        def pytest_configure():
            sys.stdout.isatty = lambda: True
        """,
    )
    plain, marked = (one.run("--rich", quiet=True) for one in (pair.plain, pair.marked))
    totals = r"^│ +(\d+ +[TPFEXS]\w+.*?) +│$"
    assert _find_in_output(marked, totals) == _find_in_output(plain, totals)
    assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
    for option, text in (("--accel-info", "sim-0"), ("--accel-plan", "makespan")):
        run = pair.marked.run("--rich", option, quiet=True)
        assert run.ret == 0
        assert text in run.text


_COMPARES = """
    import pytest

    DATA = {"name": "a long name that goes on and on", "numbers": list(range(20)), "third": "something that is long"}


    @pytest.mark.distributed(2, device="cpu")
    def test_in_ranks():
        assert DATA == {**DATA, "name": "a short name"}


    def test_here():
        assert DATA == {**DATA, "name": "a short name"}
    """


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("no:icdiff", id="none"),
        pytest.param("icdiff", marks=needs("pytest_icdiff")),
        pytest.param("clarity", marks=needs("pytest_clarity")),
    ],
)
def test_assertions_are_explained_in_ranks_as_in_the_driver(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Explanations have the width and the colours of the terminal."""
    pexpect = pytest.importorskip("pexpect")
    for variable in ("COLUMNS", "PY_COLORS"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TERM", "xterm")
    suite.write("pytest.ini", "[pytest]\n")
    suite.write("test_it.py", _COMPARES)
    arguments = ["-m", "pytest", "-paccel", "-pxdist", f"-p{name}", "-vv"]
    terminal = pexpect.spawn(sys.executable, arguments, cwd=suite.path, dimensions=(40, 170), timeout=scaled(150))
    try:
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    sections = re.split(r"_ test_\w+ _", terminal.before.decode())
    explanations = [re.findall(r"^\x1b\[1m\x1b\[31m(E  .*?)\r?$", part, re.MULTILINE) for part in sections]
    assert [len(lines) > 10 for lines in explanations] == [False, True, True]
    assert explanations[1] == explanations[2]


@needs("pytest_print")
def test_prints_of_ranks_are_shown_at_the_terminal(pair: Pair) -> None:
    pair.plugin("print")
    pair.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, device="cpu")
        def test_in_ranks(printer, pretty_printer):
            printer("a line\\nand another")
            pretty_printer("with an icon", icon="*")
            assert 0


        def test_here(printer):
            printer("of the driver")
        """,
    )
    plain, marked = pair.plain.run(), pair.marked.run()
    for rank in (0, 1):
        found = re.findall(rf"^\[rank {rank}\] (.*)$", marked.text, re.MULTILINE)
        assert found == ["\ta line", "and another", "   * with an icon"]
    assert "\n\ta line\nand another\n" in plain.text
    assert "   * with an icon\n" in plain.text
    assert all("\n\tof the driver\n" in run.text for run in (plain, marked))
    assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
