"""Tests of plugins that compare return values of tests with reference files (pytest-mpl, pytest-arraydiff)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_IMAGES = """
    import os

    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import pytest

    ranks = pytest.mark.distributed(2, device="cpu")


    def draw(height):
        figure, axes = plt.subplots(figsize=(2, 2))
        axes.plot([0, height])
        return figure


    @ranks
    @pytest.mark.mpl_image_compare
    def test_same():
        return draw(3)


    @ranks
    @pytest.mark.mpl_image_compare
    def test_changes():
        return draw(float(os.environ.get("HEIGHT", "1")))


    @ranks
    @pytest.mark.mpl_image_compare
    def test_changes_on_rank_1():
        return draw(float(os.environ.get("HEIGHT", "1")) if os.environ.get("RANK", "1") == "1" else 1)


    @pytest.mark.mpl_image_compare
    def test_unmarked():
        return draw(5)
    """
_ARRAYS = """
    import os

    import numpy as np
    import pytest

    ranks = pytest.mark.distributed(2, device="cpu")


    @ranks
    @pytest.mark.array_compare
    def test_same_array():
        return np.arange(3.0)


    @ranks
    @pytest.mark.array_compare
    def test_array_changes():
        return np.arange(3.0) * float(os.environ.get("HEIGHT", "1"))


    @pytest.mark.array_compare
    def test_unmarked_array():
        return np.arange(4.0)
    """
_ON_ONE_RANK = """
    import os

    import pytest


    @pytest.fixture
    def on_rank_0():
        if os.environ.get("RANK", "0") != "0":
            pytest.skip("not here")


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.{mark}
    def test_{kind}_set_up_on_one(on_rank_0):
        return {value}


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.{mark}
    def test_{kind}_made_on_one():
        if os.environ.get("RANK", "0") != "0":
            pytest.skip("not here")
        return {value}


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.{mark}
    def test_{kind}_dies():
        if os.environ.get("RANK", "0") != "0":
            os._exit(3)
        return {value}
    """
_OUTCOMES_ON_ONE_RANK = {"set_up_on_one": "ERROR", "made_on_one": "FAILED", "dies": "FAILED"}
_UNHASHABLE_PLUGIN = """
    import dataclasses


    @dataclasses.dataclass
    class Plugin:
        number: int = 1


    def pytest_configure(config):
        config.pluginmanager.register(Plugin())
    """
_DIFFERING_TEST = """

    @ranks
    @pytest.mark.array_compare
    def test_differs():
        return np.arange(3.0) + float(os.environ.get("RANK", "0"))
    """


@needs("pytest_mpl", "pytest_arraydiff")
def test_images_and_arrays_are_written_once_and_compared_in_each_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pair.plugin("pytest_mpl.plugin", "pytest_arraydiff.plugin")
    pair.write("conftest.py", _UNHASHABLE_PLUGIN)
    pair.write("test_images.py", _IMAGES)
    pair.write("test_arrays.py", _ARRAYS)
    pair.marked.write("test_arrays.py", _ARRAYS + _DIFFERING_TEST)
    both = (pair.plain, pair.marked)
    plain, marked = (
        one.run(
            "--mpl-generate-path=baseline",
            "--mpl-generate-hash-library=hashes.json",
            "--arraydiff-generate-path=reference",
            "-Wdefault",
        )
        for one in both
    )
    assert marked.outcomes() == {**plain.outcomes(), "test_differs": "FAILED"}
    assert "rank 1 generated test_differs.txt with other content than rank 0: nothing has been written" in marked.text
    for folder, number in (("baseline", 4), ("reference", 3)):
        written = _read_files(pair.marked.path / folder)
        assert written == _read_files(pair.plain.path / folder)
        assert len(written) == number
    hashes = [json.loads((one.path / "hashes.json").read_text()) for one in both]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 4

    monkeypatch.setenv("HEIGHT", "4")
    pair.marked.write("test_arrays.py", _ARRAYS)
    compare = ("--mpl", "--mpl-generate-summary=json,html", "--mpl-results-path=results", "--arraydiff", "-Wdefault")
    plain, marked = (one.run(*compare, "-n1") for one in both)
    assert marked.count() == plain.count() == {"PASSED": 4, "FAILED": 3}
    for name in ("test_changes", "test_changes_on_rank_1"):
        assert "Image files did not match" in marked.failure(name)
    assert "Not equal to tolerance" in marked.failure("test_array_changes")
    results = [json.loads((one.path / "results/results.json").read_text()) for one in both]
    for found in results:
        for result in found.values():
            result.pop("status_msg")  # The message contains the path of the folder.
    # The results are those of the rank whose image failed.
    on_rank_1 = results[1]["test_images.test_changes_on_rank_1"]
    for name in ("baseline_image", "diff_image", "result_image"):
        folder, _, image = on_rank_1[name].partition("/")
        assert folder == "rank-1"
        assert (pair.marked.path / "results" / on_rank_1[name]).is_file()
        on_rank_1[name] = image
    assert results[0] == results[1]
    # Other ranks have their own folders, and the names of workers' files contain a number of the session.
    names = [{*_read_files(one.path / "results")} for one in both]
    names = [{name for name in found if not name.startswith(("rank-1", "results-xdist"))} for found in names]
    assert {name for name in names[0] if "rank_1" not in name} == {name for name in names[1] if "rank_1" not in name}

    refused = pair.marked.run("--mpl", "--mpl-generate-summary=json")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "--mpl-generate-summary needs --mpl-results-path where tests run in ranks" in refused.text + refused.errors


@needs("pytest_mpl", "pytest_arraydiff")
def test_images_and_arrays_of_one_rank_are_not_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    suite = pair.marked
    for name in ("pytest_mpl.plugin", "pytest_arraydiff.plugin"):
        suite.plugin(name)
    values = {
        "array": ("array_compare", "__import__('numpy').arange(3.0)"),
        "image": ("mpl_image_compare", "__import__('matplotlib.figure').figure.Figure()"),
    }
    for kind, (mark, value) in values.items():
        suite.write(f"test_{kind}.py", _ON_ONE_RANK.format(mark=mark, value=value, kind=kind))
    run = suite.run(
        *("--mpl", "--mpl-generate-path=baseline", "--mpl-generate-hash-library=hashes.json"),
        *("--mpl-generate-summary=json", "--mpl-results-path=results"),
        *("--arraydiff-generate-path=reference", "-Wdefault"),
    )
    assert run.outcomes() == {
        f"test_{kind}_{name}": word for kind in values for name, word in _OUTCOMES_ON_ONE_RANK.items()
    }
    failure = run.failure("test_array_made_on_one")
    assert "only rank 0 generated test_array_made_on_one.txt: nothing has been written" in failure
    assert not (suite.path / "reference").exists()
    assert not (suite.path / "baseline").exists()
    assert json.loads((suite.path / "hashes.json").read_text()) == {}
    results = json.loads((suite.path / "results/results.json").read_text())
    assert {result["status"] for result in results.values()} == {"failed"}
    assert [path.name for path in temporary.iterdir() if path.is_dir()] == []


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below `folder`, by name; empty for HTML and JSON, which contain other paths."""
    files = (Path(path) / name for path, _, names in os.walk(folder) for name in names)
    return {
        str(file.relative_to(folder)): b"" if file.suffix in (".html", ".json") else file.read_bytes() for file in files
    }
