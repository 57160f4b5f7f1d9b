"""The tables of environment variables agree with what the installed torch reads while it is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_accel.compat.torch_variables import READ_AT_IMPORT, is_read_later

_GETENV = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static char *note(const char *function, const char *name)
{
    char *(*original)(const char *) = dlsym(RTLD_NEXT, function);
    int file = open(LOG, O_CREAT | O_APPEND | O_WRONLY, 0600);
    if (write(file, name, strlen(name)) < 0 || write(file, "\\n", 1) < 0) _exit(3);
    close(file);
    return original(name);
}

char *getenv(const char *name) { return note("getenv", name); }
char *secure_getenv(const char *name) { return note("secure_getenv", name); }
"""
_IMPORT = """
import os
from collections.abc import MutableMapping

seen = set()
mapping = type(os.environ)
get, contains = mapping.__getitem__, MutableMapping.__contains__
mapping.__getitem__ = lambda self, name: seen.add(name) or get(self, name)
mapping.__contains__ = lambda self, name: seen.add(name) or contains(self, name)

import torch
import torch.distributed

print("\\n".join(sorted(map(str, seen))))
"""
_OF_OTHER_BUILDS = {
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("MKL_NUM_THREADS", "MKL_DYNAMIC", "MKLDNN_VERBOSE"),
}
"""Variables that not every build of torch reads."""
_HANDLED = {"OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"}
"""Variables that torch reads when it is imported, and that ranks apply once more."""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler, on Linux")
def test_torch_reads_at_import_what_the_tables_say(tmp_path: Path) -> None:
    log, source, library = tmp_path / "log", tmp_path / "getenv.c", tmp_path / "getenv.so"
    source.write_text(_GETENV)
    command = ["cc", "-shared", "-fPIC", f'-DLOG="{log}"', "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    read = {*done.stdout.split(), *log.read_text().split()}
    assert READ_AT_IMPORT - read <= _OF_OTHER_BUILDS
    # tqdm, which torch imports, looks at all variables that are set.
    assert {name for name in read - os.environ.keys() if is_read_later(name)} == _HANDLED


def test_a_variable_of_a_suite_is_not_known_to_be_read_later() -> None:
    assert not is_read_later("MINE")
    assert not is_read_later("PYTORCH_JIT")
    assert not is_read_later("NCCL")
    assert is_read_later("NCCL_DEBUG")
