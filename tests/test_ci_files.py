"""Tests of the files in examples/ci: the schemas of the CI systems, the shell and pytest accept them."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "examples" / "ci"
FILES = sorted(path.relative_to(CI).as_posix() for path in CI.rglob("*") if path.is_file() and path.suffix != ".pyc")
PAGES = sorted((ROOT / "docs" / "how-to" / "ci").glob("*.md"))
WORKFLOWS = [name for name in FILES if re.fullmatch(r"github/.*\.yml", name)]

SHELL_VARIABLES = {
    "buildkite": {"BUILDKITE_PARALLEL_JOB": "1", "BUILDKITE_PARALLEL_JOB_COUNT": "4"},
    "github": {"GITHUB_PATH": "/dev/null"},
    "gitlab": {"CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "2"},
    "slurm": {
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "71",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    },
}
"""The variables that each system sets for a job."""
SHARDS = {"buildkite/pipeline.yml": "2/4", "gitlab/gitlab-ci.yml": "2/2"}
"""The value of `--accel-shard` with these variables, in the files that divide the tests among jobs."""

LINKED = re.compile(r"^\[`([^`]*)`\]\(([^)]*)\)$", re.MULTILINE)
"""Pattern of a line that links to a file. The site shows the file there."""

RECORDER = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >>"$RECORDED"
echo >>"$RECORDED"
"""


def load(name: str) -> Any:
    """Return the data in a file of YAML or TOML."""
    text = (CI / name).read_text(encoding="utf-8")
    if name.endswith(".toml"):
        return tomllib.loads(text)
    return pytest.importorskip("ruamel.yaml").YAML(typ="safe").load(text)


def jobs_of(name: str) -> list[str]:
    """Return the shell text of each job that the file `name` describes."""
    text = (CI / name).read_text(encoding="utf-8")
    match name.split("/"):
        case ["github", _] if name in WORKFLOWS:
            return [job for described in load(name)["jobs"].values() for job in _github(described)]
        case ["gitlab", "gitlab-ci.yml"]:
            described = load(name)
            extended = [described[job["extends"]] | job if "extends" in job else job for job in described.values()]
            return ["\n".join([*job.get("before_script", []), *job["script"]]) for job in extended if "script" in job]
        case ["buildkite", _]:
            commands = ["\n".join(step["command"]) for step in load(name)["steps"] if "command" in step]
            assert not any(re.search(r"(?<!\$)\$(?!\$)", text) for text in commands), "expanded when it is uploaded"
            return [text.replace("$$", "$") for text in commands]
        case ["slurm", _]:
            return [text]
        case ["kubernetes", "rayjob.yaml"]:
            return [load(name)["spec"]["entrypoint"]]
        case ["kubernetes", _]:
            return [shlex.join(words) for words in _commands_of_containers(load(name))]
        case ["modal", _]:
            return [shlex.join(_constant(text, "PYTEST").split())]
    return []


def _github(job: dict[str, Any]) -> Iterator[str]:
    """Yield the shell text of a job for each entry of its matrix."""
    steps = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    for entry in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
        expressions = {f"${{{{ matrix.{key} }}}}": value for key, value in entry.items()}
        yield re.sub(r"\$\{\{.*?\}\}", lambda match, known=expressions: known[match[0]], steps)  # type: ignore[misc]


def _commands_of_containers(value: Any) -> Iterator[list[str]]:
    if isinstance(value, dict):
        if "image" in value:
            yield value["command"]
        for inner in value.values():
            yield from _commands_of_containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _commands_of_containers(inner)


def _constant(source: str, name: str) -> str:
    """Return the text that the module `source` assigns to `name`."""
    (value,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return str(ast.literal_eval(value))


def program(name: str) -> str:
    """Return the path of a program, which may be one of this environment; skip the test if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def calls(name: str, folder: Path) -> list[list[str]]:
    """Return the words of each call of python, srun or torchrun when bash runs the jobs of the file `name`."""
    for called in ("python", "python3", "torchrun", "srun", "scontrol", "buildkite-agent"):
        (folder / called).write_text(RECORDER + ("echo node-1\n" if called == "scontrol" else ""))
        (folder / called).chmod(0o755)
    recorded = folder / "recorded"
    recorded.touch()
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "RECORDED": str(recorded)}
    environment |= SHELL_VARIABLES.get(name.split("/")[0], {})
    for text in jobs_of(name):
        done = subprocess.run(
            [program("bash"), "-eu", "-c", text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\0")[:-1] for line in recorded.read_text(encoding="utf-8").splitlines()]


def after_module(module: str, words: list[str]) -> list[str] | None:
    """Return the words after `-m module`, or None if it is not among them."""
    pairs = list(itertools.pairwise(words))
    return words[pairs.index(("-m", module)) + 2 :] if ("-m", module) in pairs else None


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith((".toml", "values.yaml"))])
def test_pytest_knows_the_options(name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("PYTEST_")]:
        monkeypatch.delenv(variable)
    sessions = [after_module("pytest", words) for words in calls(name, pytester.path)]
    started = [words for words in sessions if words is not None]
    assert started != []
    for words in started:
        pytester.parseconfig(*words)
    shards = {words[words.index("--accel-shard") + 1] for words in started if "--accel-shard" in words}
    assert shards == ({SHARDS[name]} if name in SHARDS else set())


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith((".toml", "values.yaml"))])
def test_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    shellcheck = program("shellcheck")
    files = []
    for number, text in enumerate(jobs_of(name)):
        files.append(tmp_path / f"{number}.sh")
        files[-1].write_text(text + "\n")
    done = subprocess.run([shellcheck, "--shell=bash", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        pytest.param(["vendor.github-workflows"], WORKFLOWS, id="github"),
        pytest.param(["vendor.gitlab-ci", "--data-transform", "gitlab-ci"], ["gitlab/gitlab-ci.yml"], id="gitlab"),
        pytest.param(["vendor.buildkite"], ["buildkite/pipeline.yml"], id="buildkite"),
    ],
)
def test_the_schema_of_the_system_accepts_the_file(schema: list[str], names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    files = []
    for name in names:
        # GitLab's schema accepts anything in a job whose name begins with a dot.
        text = (CI / name).read_text(encoding="utf-8").replace(".gpu", "gpu")
        files.append(tmp_path / Path(name).name)
        files[-1].write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_file_is_shown_once() -> None:
    shown = []
    for page in PAGES:
        for label, target in LINKED.findall(page.read_text(encoding="utf-8")):
            assert label == Path(target).name
            shown.append((page.parent / target).resolve().relative_to(CI).as_posix())
    assert sorted(shown) == FILES
