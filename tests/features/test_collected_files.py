"""Tests of collection in ranks: the files of a folder, and paths with special characters."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


_TESTS_WITH_SPECIAL_NAMES = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu", init=False)
    @pytest.mark.parametrize("text", ["a::b", "[c]", "d e", "ü"])
    def test_parameter(text, request):
        assert request.node.get_closest_marker("distributed")


    class TestIn:
        @pytest.mark.distributed(2, kind="cpu", init=False)
        @pytest.mark.parametrize("text", ["f::g"])
        def test_method(self, text, of_conftest):
            assert of_conftest == "conftest"
    """


@pytest.mark.long
def test_names_of_files_and_folders_may_have_any_character(suite: Suite) -> None:
    folders = ("br[1]", "co::lon/sub", "ümlaut", "plain")
    suite.write("conftest.py", "import pytest\n@pytest.fixture\ndef of_conftest(): return 'conftest'\n")
    for number, folder in enumerate(folders):
        suite.write(f"{folder}/test_{number}.py", _TESTS_WITH_SPECIAL_NAMES)
        suite.write(f"{folder}/broken_{number}.py", "raise AssertionError('is not to be imported')")
    suite.write(
        "br[1]/test_broken_in_ranks.py", "import os\nassert 'RANK' not in os.environ\ndef test_driver(): pass\n"
    )
    (suite.path / "linked").symlink_to("plain")
    run = suite.run("--import-mode=importlib")
    assert run.count() == {"PASSED": 5 * 5 + 1}, run.text
    for folder in (*folders, "linked"):
        assert len([name for name in run.results if name.startswith(f"{folder}/")]) == (6 if folder == "br[1]" else 5)


def test_a_rank_looks_at_each_file_once_whatever_else_is_in_its_folder(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        import os

        from tests.inner import note


        def pytest_collect_file(file_path):
            if os.environ.get("RANK") == "0":
                note("seen.log", file_path.name)


        def pytest_collect_directory(path):
            if os.environ.get("RANK") == "0":
                note("folders.log", path.name)
        """,
    )
    text = "import pytest\n\n\n@pytest.mark.distributed(2, kind='cpu', init=False)\ndef test_it(own):\n    pass\n"
    fixture = "import pytest\n\n\n@pytest.fixture\ndef own():\n    pass\n"
    for folder in ("one", "two", "package", "package/inner"):
        suite.write(f"{folder}/conftest.py", fixture)
        for number in range(3):
            name = folder.replace("/", "_")
            suite.write(f"{folder}/test_{name}_{number}.py", text)
    suite.write("package/__init__.py", "")
    suite.write("two/test_without_marks.py", "def test_without(): pass\n")
    assert suite.run().count() == {"PASSED": 13}
    seen = suite.read("seen.log")
    assert len(seen) == len(set(seen)) == 12
    assert not {"test_without_marks.py", "conftest.py", "__init__.py"} & set(seen)
    assert set(suite.read("folders.log")) == {"one", "two", "package", "inner"}
