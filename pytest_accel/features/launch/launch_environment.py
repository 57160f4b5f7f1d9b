"""The environment of a launched script: the test's own, without the variables that make the test's process a rank."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence

from pytest_accel.core import launcher_env
from pytest_accel.core.kinds import OWN_KINDS
from pytest_accel.core.role import loopback_interface
from pytest_accel.hardware.registry import make_vendor

_THREADS = "OMP_NUM_THREADS"


def launch_environment(
    environ: Mapping[str, str],
    *,
    own: Mapping[str, str | None],
    hidden: Mapping[str, str | None],
    nproc: int,
    cores: int,
    python_path: Sequence[str],
    changes: Mapping[str, str | None],
) -> dict[str, str]:
    """Return the environment for the launched processes, made from `environ`.

    `own` are the variables that the plugin has set for the test's process: of these, masks are kept, and
    `OMP_NUM_THREADS` is dropped unless the test has set another value. `hidden` are masks that hide devices which are
    not leased. The number of threads of each rank is `cores` divided by `nproc`, unless the user has set one. `changes`
    are the test's, and take precedence; None removes a variable.
    """
    of_a_rank = {*launcher_env.of_a_rank(environ), "PYTEST_CURRENT_TEST"}
    made = {
        name: value for name, value in environ.items() if name not in of_a_rank and not name.startswith("PYTEST_XDIST_")
    }
    if made.get(_THREADS) == own.get(_THREADS):
        made.pop(_THREADS, None)
    made.setdefault(_THREADS, str(max(1, cores // nproc)))
    if python_path:
        made["PYTHONPATH"] = os.pathsep.join(python_path)
    # Unbuffered: a killed rank has written all its output. Fault handler: a rank that dies of a signal shows its stack.
    made.setdefault("PYTHONUNBUFFERED", "1")
    made.setdefault("PYTHONFAULTHANDLER", "1")
    # Otherwise Gloo resolves the host's name, which fails on some machines.
    made.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    for name, value in (*hidden.items(), *changes.items()):
        if value is None:
            made.pop(name, None)
        else:
            made[name] = value
    return made


def hidden_accelerators(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the masks that hide all devices of all vendors but ``sim``; kinds without a mask cannot be hidden."""
    found: dict[str, str | None] = {}
    for kind in reversed(OWN_KINDS):  # ``cuda`` comes last, since ``rocm`` would remove its variable.
        if kind != "sim":
            found |= make_vendor(kind).mask((), environ)
    return found


def added_paths(search: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a ``sys.path`` before the standard library, which a new interpreter would not have."""
    library = sysconfig.get_path("stdlib")
    end = next((at for at, entry in enumerate(search) if os.path.dirname(entry) == os.path.dirname(library)), 0)
    return tuple(entry for entry in search[:end] if entry and not entry.endswith(".zip"))
