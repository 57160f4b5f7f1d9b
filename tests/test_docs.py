"""Tests of the documentation: its Python blocks with tests pass, and the output that it shows is what pytest prints."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fake_driver
from tests.documentation import ROOT, blocks

# tests/core/test_marks.py only collects the blocks of marks.md: no machine has all the hardware that they need.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "marks.md"),
]
MIGRATION = sorted(page for page in (ROOT / "docs" / "how-to" / "migrate").glob("*.md") if page.name != "index.md")
TUTORIAL = ROOT / "docs" / "tutorial" / "first-test.md"
L4 = ("name NVIDIA L4", f"memory {45 * 2**29} {22 * 2**30}", "capability 8 9")


def test_the_tests_in_the_documentation_pass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    written = {"python": 0, "python fails": 0}
    for page in PAGES:
        for language in written:
            for number, block in enumerate(blocks(page, language)):
                if "def test_" in block:
                    folders = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
                    name = f"test_{folders}_{number}{'_fails' if 'fails' in language else ''}.py"
                    (pytester.path / name).write_text(block, encoding="utf-8")
                    written[language] += 1
    assert written["python"] >= 10
    assert written["python fails"] == 2
    hooks = [block for page in PAGES for block in blocks(page, "python conftest")]
    assert len(hooks) == 1
    (pytester.path / "conftest.py").write_text("\n".join(hooks), encoding="utf-8")
    (machine,) = blocks(ROOT / "docs" / "how-to" / "gpu-suites.md", "toml")
    (pytester.path / "machine.toml").write_text(f"{machine}\n[[device]]\n\n[[device]]\n", encoding="utf-8")

    settings = (
        "accel_resources=license: 2, port-9000: 1, memory: 64GiB, cores: 4",
        # Several ranks import these modules, which takes more than a second in each.
        "accel_preload=torch._dynamo torch.distributed.tensor",
    )
    options = [option for setting in settings for option in ("-o", setting)]
    # `tests/features/launch` has each launcher; two other tests of the documentation run scripts with torchrun.
    under_each = "test_docs_how_to_launch_a_script_1.py::test_under_each"
    options += [f"--deselect={under_each}[{launcher}]" for launcher in ("torchrun", "accelerate")]
    options += ["-rA", "-p", "accel", "-p", "xdist", "--accel", "sim:machine.toml"]
    result = pytester.runpytest_subprocess(*options)

    ends = [match.groups() for line in result.outlines if (match := re.match(r"([A-Z]+) (test_\w+)\.py::", line))]
    assert {file for _, file in ends} == {path.stem for path in pytester.path.glob("test_*.py")}
    assert {outcome for outcome, file in ends if not file.endswith("_fails")} == {"PASSED"}
    assert [outcome for outcome, file in ends if file.endswith("_fails")].count("FAILED") == 1
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_one_collective_too_many*",
            "the ranks issued different numbers of collectives *: rank 0: *, rank 1: *",
        ]
    )


@pytest.fixture
def make_gpus(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that gives the machine a number of simulated L4s, and no others."""
    if fake_driver.compiler() is None:
        pytest.skip("needs Linux and a C compiler for the fake driver")
    pytester.makeini("[pytest]\naddopts = -p accel -p xdist\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    fake_driver.build(pytester.path / "driver" / fake_driver.NVML, "libnvidia-ml.c")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(pytester.path / "driver"))
    monkeypatch.setenv("FAKE_NVML", str(pytester.path / "machine.txt"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(count: int) -> None:
        gpus = range(1, count + 1)
        facts = [fact for number in gpus for fact in (f"gpu GPU-{number}", *L4, f"pci 0 {number} 0")]
        (pytester.path / "machine.txt").write_text("\n".join(facts) + "\n", encoding="utf-8")

    return make


def check_output(pytester: pytest.Pytester, expected: str, *options: str) -> None:
    """Run pytest, and check that it prints each part of `expected`; ``...`` stands between parts."""
    result = pytester.run(sys.executable, "-m", "pytest", *options)
    printed = same_width(result.outlines)
    for part in expected.split("\n...\n"):
        assert same_width(part.splitlines()) in printed, f"pytest {options} does not print this part:\n{part}"


@pytest.mark.long
def test_the_readme_shows_what_pytest_prints(pytester: pytest.Pytester, make_gpus: Callable[[int], None]) -> None:
    make_gpus(0)
    (test,) = blocks(ROOT / "README.md", "python")
    line = "    total = torch.ones(1, device=device)\n"
    failing = test.replace(line, line.replace("\n", "; world_size -= rank == 2\n"))
    assert failing != test
    for code, expected in zip((test, failing), blocks(ROOT / "README.md", "text"), strict=True):
        (pytester.path / "test_training.py").write_text(code, encoding="utf-8")
        check_output(pytester, expected)


@pytest.mark.long
def test_the_tutorial_shows_what_pytest_prints(pytester: pytest.Pytester, make_gpus: Callable[[int], None]) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    files = re.findall(r"Write\s`(\w+\.py)`:\n\n```python(?: fails)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, block in files:
        (pytester.path / name).write_text(block, encoding="utf-8")
    assert len(files) == text.count("\ndef test_")
    # On a busy machine, a test may wait long for the ranks of the test before it to exit. The page has no line on that.
    pytester.makeconftest("from pytest_accel.pool import pool\n\npool.WAITING_SHOWN_AFTER = 600.0\n")

    commands = re.findall(r"^```console\n\$ pytest ([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(commands) == 6
    for options, expected in commands:
        count = re.search(r"^accel: cuda, (\d)", expected, re.MULTILINE)
        make_gpus(int(count[1]) if count else 0)
        check_output(pytester, expected, *options.split())


def same_width(lines: list[str]) -> str:
    """Return `lines` in a form that does not depend on the terminal's width or on durations, without blank lines."""
    timeless = (re.sub(r"\d+\.\d+s\b( \(\d+:\d+:\d+\))?", "0s", line) for line in lines)
    plain = (re.sub(r"[-=_]{3,}|(_ ){3,}_?", "---", line) for line in timeless)
    return "\n".join(" ".join(line.split()) for line in plain if line.strip())


@pytest.mark.parametrize("page", MIGRATION, ids=lambda page: page.stem)
def test_a_migration_page_shows_both_sides_of_each_harness(page: Path) -> None:
    """The blocks "after" run with the others of the documentation, or in `launchers/test_mpi_worlds.py`."""
    before = blocks(page, "python before")
    for block in before:
        ast.parse(block)
    assert sum("def test_" in block for block in blocks(page, "python") + blocks(page, "python mpi")) >= len(before)
    headings = re.findall(r"^##+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    expected = ["Before", "After", "What changes in the verdict", "What to delete", "What stays different"]
    assert [heading for heading in headings if heading in expected] == expected * len(before)


def test_each_plugin_in_the_table_has_a_test() -> None:
    text = (ROOT / "docs" / "reference" / "plugins.md").read_text(encoding="utf-8")
    text = text.partition("\n## Refused uses")[0]
    rows = re.findall(r"^\| (\S[^|]*) \| (\S[^|]*) \| `([^|`]+)::(test_\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n|") - 4, "a row has another form"
    assert len(rows) >= 30
    for name, _, file, test in rows:
        path = ROOT / file
        functions = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ()
        found = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        assert test in found, f"{name}: {file} has no {test}"


def test_links_have_targets() -> None:
    broken = []
    others = [ROOT / "docs" / "reference" / "marks.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    for page in [*PAGES, *others]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and anchor not in anchors(file):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_the_map_of_the_documentation_names_every_page() -> None:
    """The README links to the map, `docs/index.md`. A folder may have an index of its own."""
    docs = ROOT / "docs"
    indexes = list(docs.rglob("index.md"))
    linked = {
        (index.parent / target).resolve()
        for index in indexes
        for target in re.findall(r"\]\(([^)#:]*\.md)", index.read_text(encoding="utf-8"))
    }
    pages = set(docs.rglob("*.md"))
    assert pages - {docs / "index.md"} - linked == set()
    assert len(pages) <= 38, "join pages that say the same"


def test_the_readme_stays_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 100


def test_files_and_tests_that_the_documentation_names_exist() -> None:
    page = ROOT / "docs" / "project" / "architecture.md"
    named = set(re.findall(r"`(test_\w+)", page.read_text(encoding="utf-8")))
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    there = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}
    assert named - there - {file.stem for file in files} == set()


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them.

    Letters, digits, hyphens and underscores stay, spaces become hyphens, and other characters are removed.
    """
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
