"""The environment of a launched script: a test's own, without what makes the test's process a rank."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence

from pytest_accel.core import launcher_env
from pytest_accel.hardware.registry import make_vendor

_THREADS = "OMP_NUM_THREADS"
_HARDWARE = ("rocm", "xpu", "hpu", "npu", "mlu", "musa", "tpu", "neuron", "cuda")
"""Kinds whose masks hide all; ``cuda`` last, whose variable ``rocm`` would remove."""


def surroundings(
    environ: Mapping[str, str],
    *,
    own: Collection[str],
    hidden: Mapping[str, str | None],
    nproc: int,
    cores: int,
    python_path: Sequence[str],
    changes: Mapping[str, str | None],
) -> dict[str, str]:
    """What the launched processes are to have of `environ`.

    `own` are the variables that were set to make the test's process what it is; of them the masks stay. `hidden` hides
    what is not leased. All of the `cores` are shared out among `nproc` ranks, unless a person has said how many threads
    there are to be. `changes` are the test's and win; None removes a variable.
    """
    of_a_rank = {*launcher_env.of_a_rank(environ), "PYTEST_CURRENT_TEST"}
    made = {
        name: value for name, value in environ.items() if name not in of_a_rank and not name.startswith("PYTEST_XDIST_")
    }
    if _THREADS in own:
        del made[_THREADS]
    made.setdefault(_THREADS, str(max(1, cores // nproc)))
    if python_path:
        made["PYTHONPATH"] = os.pathsep.join(python_path)
    # A rank that is killed has written what it printed; one that dies of a signal, or is asked by one, shows its stack.
    made.setdefault("PYTHONUNBUFFERED", "1")
    made.setdefault("PYTHONFAULTHANDLER", "1")
    # Gloo looks up the host's name otherwise, which not every machine can resolve.
    made.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    for name, value in (*hidden.items(), *changes.items()):
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def hidden_accelerators(environ: Mapping[str, str]) -> dict[str, str | None]:
    """The masks of all vendors that show none of their devices; ``mps`` and ``privateuse1`` have no mask."""
    found: dict[str, str | None] = {}
    for kind in _HARDWARE:
        found |= make_vendor(kind).mask((), environ)
    return found


def added_paths(search: Sequence[str]) -> tuple[str, ...]:
    """The part of a ``sys.path`` that a new interpreter would not have by itself: what stands before the library."""
    library = sysconfig.get_path("stdlib")
    end = next((at for at, entry in enumerate(search) if os.path.dirname(entry) == os.path.dirname(library)), 0)
    return tuple(entry for entry in search[:end] if entry and not entry.endswith(".zip"))
