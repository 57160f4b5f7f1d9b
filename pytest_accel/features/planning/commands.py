"""The command ``census`` of ``python -m pytest_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pytest_accel.features.planning import census_file, census_merge


def merge_files(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel census",
        description="Check that each test ran in at least one job of a pipeline. The exit status is 1 if one did not.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-census has written")
    parser.add_argument(
        "--allow",
        metavar="FILE",
        help="the tests that may run in no job: a node id or a pattern with * and ? on each line; # begins a comment",
    )
    given = parser.parse_args(arguments)
    try:
        jobs = {file: census_file.read(file) for file in given.files}
        allow = [] if given.allow is None else census_merge.parse_allow(_read(given.allow))
    except census_file.CensusError as error:
        parser.error(str(error))
    merged = census_merge.merge(jobs, allow)
    text = census_merge.text(merged, given.allow)
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if merged.is_proof else 1


def _read(path: str) -> str:
    """Return the text of the file of ``--allow``."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise census_file.CensusError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise census_file.CensusError(f"{path}: must be UTF-8: {error}") from None


COMMANDS = {"census": merge_files}
