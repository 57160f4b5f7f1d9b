"""Run the tests of this folder on two GPUs at Modal: `modal run run_on_modal.py`."""

from __future__ import annotations

import subprocess

import modal

GPU = "L4:2"
PYTEST = (
    "python -m pytest -n 4 --accel-require cuda:2 --accel-strict "
    "--accel-durations=/results/accel-durations.json --accel-output=/results/accel-output"
)

image = (
    modal.Image.debian_slim(python_version="3.12")
    # pytest-accel is not on PyPI yet: its wheel is in the folder third_party of your project.
    .add_local_dir("third_party", "/third_party", copy=True)
    .run_commands("python -m pip install /third_party/pytest_accel-*.whl")
    .pip_install_from_pyproject("pyproject.toml", optional_dependencies=["test"])
    .workdir("/root/project")
    .add_local_dir(".", "/root/project", ignore=[".git", ".venv", "**/__pycache__"])
)
results = modal.Volume.from_name("gpu-tests", create_if_missing=True)
app = modal.App("gpu-tests", image=image)


@app.function(gpu=GPU, cpu=8, memory=32 * 1024, timeout=60 * 60, volumes={"/results": results})
def run_tests(*options: str) -> int:
    return subprocess.run([*PYTEST.split(), *options], check=False).returncode


@app.local_entrypoint()
def main(*options: str) -> None:
    """`modal run run_on_modal.py tests/test_model.py -x` passes the path and -x to pytest."""
    raise SystemExit(run_tests.remote(*options))
