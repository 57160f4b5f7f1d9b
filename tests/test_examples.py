"""Tests of the examples: each session runs in its own process, as a user starts it."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.torch_release import needs_torch

ROOT = Path(__file__).resolve().parent.parent
_PLUGINS = ("-p", "accel", "-p", "xdist", "-p", "hypothesispytest")

pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("accelerate", "hypothesis", "sklearn")),
    reason="needs accelerate, hypothesis and scikit-learn",
)


def run(*arguments: str, status: int, extra: Mapping[str, str] | None = None) -> pytest.LineMatcher:
    """Run pytest and return its output; fail unless it exits with `status`. `extra` are environment variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    # Loading all plugins that are installed takes longer than the examples.
    environment |= {"COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(extra or {})}
    command = [sys.executable, "-m", "pytest", *_PLUGINS, "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return pytest.LineMatcher(done.stdout.splitlines())


@pytest.mark.long
@needs_torch(2, 13)
def test_the_picture_of_the_readme_shows_what_the_examples_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of these texts, `python docs/images/make.py` makes the picture again."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "COV")) or name in {"CI", "BUILD_NUMBER"}]:
        monkeypatch.delenv(name)
    make = runpy.run_path(str(ROOT / "docs" / "images" / "make.py"))
    shown = rows_of(ROOT / "docs" / "images" / "examples.svg")
    printed = ["".join(character for character, _ in row) for row in make["rows"](make["run"]())]
    assert without_chance(shown) == without_chance(printed)


def rows_of(picture: Path) -> list[str]:
    """Return the text of each row of a picture of a terminal, without spaces."""
    rows: defaultdict[float, list[str]] = defaultdict(list)
    for piece in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        rows[float(piece.attrib["y"])].append(piece.text or "")
    return ["".join(rows[place]) for place in sorted(rows)]


def without_chance(rows: list[str]) -> list[str]:
    """Return `rows` without spaces, empty rows, releases, durations and what these change."""
    text = "\n".join(re.sub(r"\s", "", row) for row in rows if row.strip() and not row.startswith("platform"))
    return re.sub(r"0x[0-9a-f]+|\d+\.\d+s(\(\d+:\d+:\d+\))?|[=_-]{3,}", "#", text).splitlines()


@pytest.mark.long
def test_folders_with_failing_tests_and_with_launchers_are_collected_only_if_named() -> None:
    """The other tests name these folders. Here, no test is left without the files in the folder `examples` itself."""
    output = run("examples", "--ignore-glob=examples/test_*", status=pytest.ExitCode.NO_TESTS_COLLECTED)
    output.fnmatch_lines(["=* no tests ran in *"])


@pytest.mark.long
@needs_torch(2, 6)
def test_scripts_run_under_torchrun_and_accelerate() -> None:
    # The tests of tests/features/launch run scripts under the other launchers.
    output = run("examples/launchers", "--accel", "none", "-k", "not cpu or torchrun", status=0)
    output.fnmatch_lines(
        [
            "*::test_training_with_two_ranks_on_the_cpu[[]torchrun[]] PASSED *",
            "*::test_training_on_two_devices[[]torchrun[]] SKIPPED (needs 2 devices; *",
            "*::test_each_prompt_is_answered_once PASSED *",
            "*::test_a_wrong_argument_is_told_as_the_script_tells_it PASSED *",
        ]
    )
