"""The command ``durations`` of ``python -m pytest_accel``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_accel.features.order.stored_durations import add, read


def merge_files(arguments: Sequence[str]) -> int:
    about = "Add the times of tests in files of pytest --accel-durations to another such file."
    parser = argparse.ArgumentParser("python -m pytest_accel durations", description=about, allow_abbrev=False)
    parser.add_argument("result", type=Path, metavar="RESULT", help="the file to add to; it need not exist")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the files to add, such as those of jobs")
    given = parser.parse_args(arguments)
    if absent := [str(path) for path in given.files if not path.exists()]:
        parser.error(f"{', '.join(absent)}: no such file")
    try:
        print(f"{given.result}: times of {len(add(given.result, map(read, given.files)))} tests")
    except pytest.UsageError as error:
        parser.error(str(error))
    return 0


COMMANDS = {"durations": merge_files}
