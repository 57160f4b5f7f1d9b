"""The order in which CUDA counts GPUs by default, queried from the driver in a temporary process.

The rule behind ``CUDA_DEVICE_ORDER=FASTEST_FIRST`` is not public. Initialising CUDA in the calling process would break
it: CUDA reads the mask only once, and cannot be used in a process that is forked afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys

_TIMEOUT = 60.0
"""Seconds; without a persistence daemon the driver takes several to initialise many GPUs."""

# CUresult is 0 for success. Version 2 of the UUID call distinguishes MIG instances; drivers before 11.4 have only the
# first.
_SCRIPT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        raise SystemExit(f"{name} returned {status}")
call("cuInit", 0)
count = ctypes.c_int()
call("cuDeviceGetCount", ctypes.byref(count))
for index in range(count.value):
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", uuid, device)
    text = bytes(uuid).hex()
    print("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
"""


def ask_driver() -> tuple[str, ...] | None:
    """Return the UUIDs (without prefix) of CUDA's devices, fastest first; None if CUDA is absent or does not answer."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    try:
        # -I and -S: ignore site packages and the working directory, so that the process starts in milliseconds.
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SCRIPT],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            encoding="utf-8",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(done.stdout.split()) if done.returncode == 0 and done.stdout else None
