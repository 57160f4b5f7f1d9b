"""Processes of another user of the machine: two users share its temporary folder, its locks and its ports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

OTHER_USER = 65534
"""User id and group id of the other user, who is called nobody on Linux."""
NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux, to be another user"
)


@contextmanager
def run_as_other_user(script: str, *args: str, head: str = "import os, socket, sys") -> Iterator[subprocess.Popen[str]]:
    """Run `script` in a process of the other user; yield the process and kill it at the end.

    The process runs the imports `head` as root: other users may have no access to the interpreter's files.
    """
    ids = f"*[{OTHER_USER}] * 3"
    become = f"{head}\nos.setgroups([])\nos.setresgid({ids})\nos.setresuid({ids})\n"
    with subprocess.Popen(
        [sys.executable, "-c", become + script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
