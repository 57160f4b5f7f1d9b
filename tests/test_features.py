"""Tests that each feature can be deleted: its folder, its row in the table, and the features that stand on it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_accel.features import FEATURES
from tests.background_suite import BackgroundSuite, suite
from tests.core_verdicts import TESTS, VERDICTS
from tests.kernel import KERNEL
from tests.run import CAUSES, OUTER_VARIABLES

__all__ = ["suite"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pytest_accel"
EXAMPLES_OF = {
    "properties": ("test_properties.py",),
    "launch": ("launchers",),
    "sizes": ("test_data_parallel.py", "test_sampler.py"),
}
"""The examples that use a feature."""
FAST = {"order", "plugins"}
"""Features that the kernel calls in every session with marked tests. `tests/test_repository.py` and ``--axe`` test that
each of the others can be deleted alone."""

_ROWS = ("two_devices", "sum", "exits_on_one_rank", "fails_on_one_rank", "too_large", "unmarked")
"""The core rows that need no feature, as words of ``-k``."""


def standing_on(name: str) -> set[str]:
    """Return the feature `name`, and all that cannot do without it."""
    found = {name}
    while more := {one.name for one in FEATURES if found & set(one.stands_on)} - found:
        found |= more
    return found


def without(names: set[str], folder: Path) -> Path:
    """Copy the package to `folder` without the features `names`; return `folder`."""
    copy = folder / PACKAGE.name
    # Compiling takes as long as a session. The ignored files exist only while another process writes them.
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    table = copy / "features" / "__init__.py"
    lines = table.read_text(encoding="utf-8").splitlines()
    (assigned,) = (
        node.value
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FEATURES"
    )
    assert isinstance(assigned, ast.Tuple)
    for row in reversed(assigned.elts):
        assert isinstance(row, ast.Call)
        if ast.literal_eval(row.args[0]) in names:
            del lines[row.lineno - 1 : row.end_lineno]
    table.write_text("\n".join(lines), encoding="utf-8")
    for name in names:
        feature = copy / "features" / name
        shutil.rmtree(feature) if feature.is_dir() else feature.with_suffix(".py").unlink()
    return folder


@pytest.mark.long(except_for="fast-workers")
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["plain", "workers"])
@pytest.mark.parametrize("removed", ["fast", "all"])
def test_the_kernel_runs_without_features(
    suite: BackgroundSuite, tmp_path_factory: pytest.TempPathFactory, removed: str, options: tuple[str, ...]
) -> None:
    suite.write("test_kernel.py", TESTS)
    suite.write("conftest.py", "import pytest_accel\n\nprint(pytest_accel.__file__, file=open('used', 'w'))\n")
    names = {one.name for one in FEATURES} if removed == "all" else set().union(*map(standing_on, FAST))
    folder = without(names, tmp_path_factory.mktemp("without"))
    selected = ("-k", " or ".join(_ROWS))
    run = suite.start(CAUSES, *selected, *options, environment={"PYTHONPATH": str(folder)}).finish()
    assert suite.read("used") == str(folder / "pytest_accel" / "__init__.py")
    run.expect({name: words for name, words in VERDICTS.items() if any(row in name for row in _ROWS)})


def run_the_copy(names: set[str], where: str, *arguments: str) -> None:
    """Run pytest with `arguments` in the folder `where` of a copy of the project without the features `names`."""
    used = re.compile(rf"(pytest_accel|tests)[.]features[.]({'|'.join(names)})\b")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # The path of a socket in `tmp_path` would be too long.
        os.chmod(folder, 0o755)  # Some tests act as other users.
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", PACKAGE.name))
        without(names, copy)
        for path in (*copy.glob("tests/*.py"), *copy.glob("tests/*/*.py")):
            if used.search(path.read_text(encoding="utf-8")):
                path.unlink()
        for one in (one for name in names for one in EXAMPLES_OF.get(name, ())):
            path = copy / "examples" / one
            path.unlink() if path.is_file() else shutil.rmtree(path)
        environment = {name: value for name, value in os.environ.items() if not OUTER_VARIABLES.match(name)}
        environment |= {"PYTHONPATH": str(copy), "TMPDIR": folder}
        command = [sys.executable, "-m", "pytest", "-n", "2", "-q", *arguments]
        run = subprocess.run(command, cwd=copy / where, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout


@pytest.mark.axe
@pytest.mark.parametrize("name", [one.name for one in FEATURES])
def test_the_examples_pass_without_a_feature(name: str) -> None:
    run_the_copy(standing_on(name), "examples", "--accel", "sim:4", "--ignore=failing", ".")


@pytest.mark.axe
def test_the_tests_of_the_kernel_pass_without_any_feature() -> None:
    packages = [f"tests/{one}" for one in KERNEL if Path(ROOT, "tests", one).is_dir()]
    run_the_copy({one.name for one in FEATURES}, "", *packages)


@pytest.mark.long
def test_a_test_that_needs_a_deleted_feature_says_so(
    suite: BackgroundSuite, tmp_path_factory: pytest.TempPathFactory
) -> None:
    suite.write("test_launch.py", "def test_launch(launch):\n    pass\n")
    folder = without(standing_on("launch"), tmp_path_factory.mktemp("without"))
    run = suite.start(environment={"PYTHONPATH": str(folder)}).finish()
    run.expect({"test_launch": "ERROR"})
    assert "this installation of pytest-accel lacks the feature for 'launch'" in run.failure("test_launch")
