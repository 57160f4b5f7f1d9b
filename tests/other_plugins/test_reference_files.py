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
    def test_same():
        return np.arange(3.0)


    @ranks
    @pytest.mark.array_compare
    def test_changes():
        return np.arange(3.0) * float(os.environ.get("HEIGHT", "1"))


    @pytest.mark.array_compare
    def test_unmarked():
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
    def test_set_up_on_one(on_rank_0):
        return {value}


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.{mark}
    def test_made_on_one():
        if os.environ.get("RANK", "0") != "0":
            pytest.skip("not here")
        return {value}


    @pytest.mark.distributed(2, device="cpu")
    @pytest.mark.{mark}
    def test_dies():
        if os.environ.get("RANK", "0") != "0":
            os._exit(3)
        return {value}
    """
_OUTCOMES_ON_ONE_RANK = {"test_set_up_on_one": "ERROR", "test_made_on_one": "FAILED", "test_dies": "FAILED"}
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


@needs("pytest_mpl")
@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.nightly)])
def test_images_are_written_once_and_compared_in_each_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pair.plugin("pytest_mpl.plugin")
    pair.write("test_it.py", _IMAGES)
    both = (pair.plain, pair.marked)
    generate = ("--mpl-generate-path=baseline", "--mpl-generate-hash-library=hashes.json", "-Wdefault", *workers)
    generated = [one.run(*generate) for one in both]
    assert generated[0].outcomes() == generated[1].outcomes()
    assert _read_files(pair.plain.path / "baseline") == _read_files(pair.marked.path / "baseline")
    hashes = [json.loads((one.path / "hashes.json").read_text()) for one in both]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 3

    monkeypatch.setenv("HEIGHT", "4")
    compare = ("--mpl", "--mpl-generate-summary=json,html", "--mpl-results-path=results", "-Wdefault", *workers)
    plain, marked = (one.run(*compare) for one in both)
    assert marked.count() == plain.count() == {"PASSED": 2, "FAILED": 1}
    assert "Image files did not match" in marked.failure("test_changes")
    results = [json.loads((one.path / "results/results.json").read_text()) for one in both]
    for found in results:
        for result in found.values():
            result.pop("status_msg")  # The message contains the path of the folder.
    assert results[0] == results[1]
    # Other ranks have their own folders, and the names of workers' files contain a number of the session.
    names = [{*_read_files(one.path / "results")} for one in both]
    names = [{name for name in found if not name.startswith(("rank-1", "results-xdist"))} for found in names]
    assert names[0] == names[1]
    if not workers:
        refused = pair.marked.run("--mpl", "--mpl-generate-summary=json")
        assert refused.ret == pytest.ExitCode.USAGE_ERROR
        assert (
            "--mpl-generate-summary needs --mpl-results-path where tests run in ranks" in refused.text + refused.errors
        )


@needs("pytest_arraydiff")
@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.nightly)])
def test_arrays_are_written_once_and_compared_in_each_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    pair.plugin("pytest_arraydiff.plugin")
    pair.write("conftest.py", _UNHASHABLE_PLUGIN)
    pair.write("test_it.py", _ARRAYS)
    pair.marked.write("test_it.py", _ARRAYS + _DIFFERING_TEST)
    generate = ("--arraydiff-generate-path=reference", "-Wdefault", *workers)
    plain, marked = pair.plain.run(*generate), pair.marked.run(*generate)
    assert marked.outcomes() == {**plain.outcomes(), "test_differs": "FAILED"}
    assert "rank 1 generated test_differs.txt with other content than rank 0: nothing has been written" in marked.text
    references = _read_files(pair.marked.path / "reference")
    assert references == _read_files(pair.plain.path / "reference")
    assert len(references) == 3

    monkeypatch.setenv("HEIGHT", "4")
    pair.marked.write("test_it.py", _ARRAYS)
    plain, marked = (one.run("--arraydiff", "-Wdefault", *workers) for one in (pair.plain, pair.marked))
    assert marked.outcomes() == plain.outcomes()
    assert marked.outcomes()["test_changes"] == "FAILED"


@needs("pytest_arraydiff")
def test_arrays_of_one_rank_are_not_written(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    pair.plugin("pytest_arraydiff.plugin")
    pair.write("test_it.py", _ON_ONE_RANK.format(mark="array_compare", value="__import__('numpy').arange(3.0)"))
    run = pair.marked.run("--arraydiff-generate-path=reference", "-Wdefault")
    assert run.outcomes() == _OUTCOMES_ON_ONE_RANK
    assert "only rank 0 generated test_made_on_one.txt: nothing has been written" in run.failure("test_made_on_one")
    assert not (pair.marked.path / "reference").exists()
    assert [path.name for path in temporary.iterdir() if path.is_dir()] == []


@needs("pytest_mpl")
def test_images_of_one_rank_are_not_written(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pair.plugin("pytest_mpl.plugin")
    figure = "__import__('matplotlib.figure').figure.Figure()"
    pair.write("test_it.py", _ON_ONE_RANK.format(mark="mpl_image_compare", value=figure))
    for options in (("--mpl-generate-path=baseline",), ("--mpl-generate-hash-library=hashes.json",)):
        reports = ("--mpl-generate-summary=json", "--mpl-results-path=results", "-Wdefault")
        run = pair.marked.run("--mpl", *options, *reports)
        assert run.outcomes() == _OUTCOMES_ON_ONE_RANK
        results = json.loads((pair.marked.path / "results/results.json").read_text())
        assert {result["status"] for result in results.values()} == {"failed"}
    assert not (pair.marked.path / "baseline").exists()
    assert json.loads((pair.marked.path / "hashes.json").read_text()) == {}


@needs("pytest_mpl")
def test_image_results_are_those_of_the_rank_whose_image_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pair.plugin("pytest_mpl.plugin")
    pair.write("test_it.py", _IMAGES)
    for one in (pair.plain, pair.marked):
        one.run("--mpl-generate-path=baseline", "-Wdefault")
    pair.write("test_it.py", _IMAGES.replace("draw(3)", 'draw(3 + int(os.environ.get("RANK", "1")))'))
    pair.run_both("--mpl", "--mpl-generate-summary=json", "--mpl-results-path=results", "-Wdefault")
    plain, marked = (
        json.loads((one.path / "results/results.json").read_text())["test_it.test_same"]
        for one in (pair.plain, pair.marked)
    )
    assert marked["rms"] == plain["rms"]
    for name in ("baseline_image", "diff_image", "result_image"):
        assert marked[name] == f"rank-1/{plain[name]}"
        assert (pair.marked.path / "results" / marked[name]).is_file()


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below `folder`, by name; empty for HTML and JSON, which contain other paths."""
    files = (Path(path) / name for path, _, names in os.walk(folder) for name in names)
    return {
        str(file.relative_to(folder)): b"" if file.suffix in (".html", ".json") else file.read_bytes() for file in files
    }
