"""Tests of ``accel_ci``: job summaries and annotations for GitHub Actions, Buildkite and GitLab."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.run import Run

_MIXED_TESTS = """
    import os

    import pytest


    @pytest.fixture
    def broken():
        raise RuntimeError("no fixture")


    @pytest.mark.distributed(2)
    def test_ranks():
        pass


    @pytest.mark.distributed(2)
    def test_one_rank_fails(rank):
        assert rank == 0


    @pytest.mark.distributed(2)
    def test_one_rank_ends(rank):
        if rank == 1:
            os._exit(3)


    @pytest.mark.devices
    def test_errs(broken):
        pass


    @pytest.mark.devices(9)
    def test_too_many():
        pass


    @pytest.mark.devices
    @pytest.mark.xfail(reason="known")
    def test_xfails():
        assert False


    def test_skips():
        pytest.skip("not today")


    def test_plain():
        pass
"""
_PASSING_TEST = """
    import pytest


    @pytest.mark.devices
    def test_it():
        pass
"""

_FAILURES_IN_LIBRARIES = """
    import json

    import pytest


    def parse():
        exec("json.loads('')", {"json": json})


    @pytest.fixture
    def broken():
        json.loads("")


    @pytest.mark.distributed(2)
    def test_ranks():
        parse()


    @pytest.mark.devices
    def test_errs(broken):
        pass


    def test_plain():
        parse()
"""


class CiJob:
    """A job that runs sessions of a suite. The variables of CI systems are unset until a test sets them."""

    def __init__(self, suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
        self.suite = suite
        self.summary = suite.path / "step-summary.md"
        self._monkeypatch = monkeypatch
        for name in ("GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "BUILDKITE", "BUILDKITE_JOB_ID", "GITLAB_CI"):
            monkeypatch.delenv(name, raising=False)

    def set(self, **variables: str) -> None:
        """Set environment variables of the job."""
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def on_github(self) -> None:
        """Make it a job of GitHub Actions, whose summary is the file `self.summary`."""
        self.set(GITHUB_STEP_SUMMARY=str(self.summary), GITHUB_WORKSPACE=str(self.suite.path))

    def run(self, *args: str) -> Run:
        """Run a session without PYTEST_CURRENT_TEST, which would mark it as one that a test has started."""
        self._monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
        return self.suite.run(*args)


@pytest.fixture
def job(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> CiJob:
    """Return a job with an empty suite."""
    return CiJob(suite, monkeypatch)


def _annotations(run: Run) -> list[str]:
    """Return the lines of the output that GitHub reads as annotations."""
    return [line for line in run.text.splitlines() if line.startswith("::")]


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["no-xdist", "xdist"])
def test_github_gets_a_summary_and_annotations(job: CiJob, options: tuple[str, ...]) -> None:
    job.suite.write("sub/test_it.py", _MIXED_TESTS)
    job.on_github()
    job.summary.write_text("An earlier step.")
    run = job.run("--junitxml=junit.xml", *options)
    earlier, _, text = job.summary.read_text(encoding="utf-8").partition("\n\n")
    assert earlier == "An earlier step."
    junit = ElementTree.parse(job.suite.path / "junit.xml").getroot()[0]
    assert {name: junit.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "8",
        "failures": "2",
        "errors": "1",
        "skipped": "3",
    }
    assert text.startswith("## pytest-accel: 2 failed, 1 error, 2 passed, 2 skipped, 1 xfailed\n")
    for expected in (
        "### Failures (3)\n",
        "<code>rank 1</code> | <code>sub/test&#95;it.py:19</code> | <code>rank 1: assert 1 == 0</code> |\n",
        "### Skipped for missing hardware (1)\n",
        "| <code>needs 9 sim devices; there are 4: 4 x sim</code> | 1 |\n",
        "### Skipped for other reasons (1)\n",
        "| <code>not today</code> | 1 |\n",
        "<code>sim</code> | 4 | <code>4 x sim</code> |",
    ):
        assert expected in text
    by_test = {line.split("%3A%3A")[1].split("::")[0]: line for line in _annotations(run)}
    assert by_test.keys() == {"test_one_rank_fails", "test_one_rank_ends", "test_errs"}
    assert by_test["test_one_rank_fails"] == (
        "::error file=sub/test_it.py,line=19,title=sub/test_it.py%3A%3Atest_one_rank_fails::rank 1: assert 1 == 0"
    )
    assert by_test["test_one_rank_ends"].endswith("::rank 1 exited with status 3")
    assert by_test["test_errs"].endswith("::RuntimeError: no fixture")
    assert run.text.index("::error") > run.text.index("short test summary info")


def test_no_annotations_are_written_if_another_plugin_writes_them(job: CiJob) -> None:
    name = "pytest_github_actions_annotate_failures"
    job.suite.write(f"{name}.py", "")
    job.suite.plugin(name)
    job.suite.write("test_it.py", _MIXED_TESTS)
    job.on_github()
    assert _annotations(job.run()) == []
    assert job.summary.read_text(encoding="utf-8").startswith("## pytest-accel: 2 failed")


def test_a_summary_that_cannot_be_shown_is_reported_and_fails_no_session(job: CiJob) -> None:
    agent = job.suite.write("bin/buildkite-agent", "#!/bin/sh\nexit 3\n")
    agent.chmod(0o755)
    job.suite.write("test_it.py", _PASSING_TEST)
    job.set(GITHUB_STEP_SUMMARY=str(job.suite.path))
    job.set(BUILDKITE="true", PATH=f"{agent.parent}{os.pathsep}{os.environ['PATH']}")
    run = job.run()
    assert run.ret == 0
    assert f"\naccel: the job summary {job.suite.path} cannot be written: Is a directory\n" in run.text
    assert "\naccel: buildkite-agent annotate: exit status 3\n" in run.text


def test_a_full_disk_is_reported_and_fails_no_session(job: CiJob) -> None:
    job.suite.write(
        "conftest.py",
        """
        import os
        import tempfile


        def pytest_runtest_setup():
            for file in map(int, os.listdir("/proc/self/fd")):
                try:
                    path = os.readlink(f"/proc/self/fd/{file}")
                except FileNotFoundError:  # The folder's own.
                    continue
                # The file of the record has no name; sys.stdout and sys.stderr are files of the same kind.
                if file > 2 and path.startswith(tempfile.gettempdir()) and path.endswith("(deleted)"):
                    full = os.open("/dev/full", os.O_RDWR)
                    os.dup2(full, file)
                    os.close(full)
        """,
    )
    job.suite.write("test_it.py", _PASSING_TEST)
    job.on_github()
    run = job.run("--capture=sys")
    assert run.ret == 0
    problem = "the temporary record of the session could not be written: No space left on device"
    assert run.text.splitlines().count(f"accel: {problem}") == 1
    assert not job.summary.exists()


@pytest.mark.parametrize(
    "options",
    [
        (
            "-o",
            "accel_ci=off",
        ),
        ("--collect-only",),
        ("--accel-plan",),
        ("test_plain.py",),
    ],
)
def test_some_sessions_write_no_summary(job: CiJob, options: tuple[str, ...]) -> None:
    job.suite.write("test_it.py", _PASSING_TEST)
    job.suite.write("test_plain.py", "def test_plain():\n    pass\n")
    job.on_github()
    assert job.run(*options).ret == 0
    assert not job.summary.exists()


def test_a_session_that_a_test_starts_writes_no_summary(job: CiJob) -> None:
    job.suite.write("inner/test_inner.py", _PASSING_TEST)
    job.suite.write(
        "test_it.py",
        """
        import subprocess
        import sys

        import pytest


        @pytest.mark.devices
        def test_it():
            command = [sys.executable, "-m", "pytest", "-p", "accel", "--accel=sim:1", "inner/test_inner.py"]
            assert subprocess.run(command).returncode == 0
        """,
    )
    job.on_github()
    assert job.run("test_it.py").ret == 0
    assert job.summary.read_text(encoding="utf-8").count("## pytest-accel") == 1


def test_a_summary_is_written_if_all_tests_are_skipped_for_missing_hardware(job: CiJob) -> None:
    job.suite.write("test_it.py", _PASSING_TEST)
    job.on_github()
    assert job.run("--accel=none").ret == 0
    assert job.summary.read_text(encoding="utf-8").startswith("## pytest-accel: 1 skipped\n")


@pytest.mark.parametrize(("tests", "style"), [(_MIXED_TESTS, "error"), (_PASSING_TEST, "info")], ids=["fail", "pass"])
def test_buildkite_gets_an_annotation(job: CiJob, tests: str, style: str) -> None:
    agent = job.suite.write(
        "bin/buildkite-agent",
        """\
        #!/bin/sh
        echo "$@" > arguments
        cat > annotation.md
        """,
    )
    agent.chmod(0o755)
    job.suite.write("test_it.py", tests)
    job.set(BUILDKITE="true", BUILDKITE_JOB_ID="0190", BUILDKITE_LABEL="tests <4>")
    job.set(PATH=f"{agent.parent}{os.pathsep}{os.environ['PATH']}")
    run = job.run()
    assert job.suite.read("arguments") == [f"annotate --style {style} --context accel-0190 --append"]
    assert job.suite.read("annotation.md")[1].startswith("## pytest-accel, <code>tests &#60;4&#62;</code>: ")
    assert "accel: buildkite" not in run.text


def test_gitlab_gets_a_collapsed_section(job: CiJob) -> None:
    job.suite.write("test_it.py", _MIXED_TESTS)
    job.set(GITLAB_CI="true")
    run = job.run()
    section = re.search(
        r"^\x1b\[0Ksection_start:\d+:(accel_\w+)\[collapsed=true\]\n?\x1b\[0K[^\n]+\n(.*?)^\x1b\[0Ksection_end:\d+:\1\n?\x1b\[0K$",
        run.text.replace("\r", "\n"),
        re.MULTILINE | re.DOTALL,
    )
    assert section is not None
    assert section[2].startswith("2 failed, 1 error, 2 passed, 2 skipped, 1 xfailed\n")
    assert re.search(
        r"^  test_it.py::test_one_rank_fails +rank 1 +test_it.py:19 +rank 1: assert 1 == 0$", section[2], re.M
    )


@pytest.mark.long(except_for="--tb=line")
@pytest.mark.parametrize("option", ["--tb=auto", "--tb=line", "--tb=native", "-n1"])
def test_a_failure_has_the_same_place_on_the_terminal_in_the_summary_and_in_the_annotation(
    job: CiJob, option: str
) -> None:
    job.suite.write("test_it.py", _FAILURES_IN_LIBRARIES)
    job.on_github()
    run = job.run(option)

    places = {"test_ranks": 8, "test_errs": 13, "test_plain": 8}
    found = re.findall(r"^::error file=test_it\.py,line=(\d+),title=test_it\.py%3A%3A(\w+)::", run.text, re.MULTILINE)
    assert {test: int(line) for line, test in found} == places
    text = job.summary.read_text().replace("&#95;", "_")
    for test, line in places.items():
        assert re.search(rf"^\| <code>test_it\.py::{test}</code> .*<code>test_it\.py:{line}</code>", text, re.MULTILINE)
    assert "ranks 0-1: failed at test_it.py:8" in run.text


_DOCTESTS_AND_SUBTESTS = '''
    import unittest


    def fail():
        raise ValueError("no value")


    def double(number):
        """
        >>> double(2)
        4
        >>> double(3)
        7
        """
        return 2 * number


    def broken():
        """
        >>> fail()
        """


    class TestCase(unittest.TestCase):
        def test_parts(self):
            with self.subTest():
                fail()
'''


def test_causes_and_places_of_failed_doctests_and_subtests_are_shown(job: CiJob) -> None:
    job.suite.write("test_it.py", _DOCTESTS_AND_SUBTESTS)
    job.suite.write(
        "conftest.py",
        """
        import pytest


        def pytest_itemcollected(item):
            if item.name == "test_it.broken":
                item.add_marker(pytest.mark.devices)
        """,
    )
    job.on_github()
    run = job.run("--doctest-modules", "--accel=sim:1")

    start, test = "::error file=test_it.py,line=", "title=test_it.py%3A%3A"
    assert _annotations(run) == [
        f"{start}21,{test}test_it.broken::UnexpectedException: ValueError: no value",
        f"{start}13,{test}test_it.double::DocTestFailure: expected '7', got '6'",
        f"{start}6,{test}TestCase%3A%3Atest_parts::ValueError: no value",
    ]
