"""Settings of the process that the leak check compares after a test and restores if it can.

The settings are torch's, the working directory, the alarm timer, what the process may do (its user, its groups and its
root folder), and variables of the environment. Also the random states with which a rank begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import current_process
from os import chdir, environb, fsdecode, getcwd, getegid, geteuid, getgid, getgroups, getuid, stat, urandom
from signal import ITIMER_REAL, getitimer, setitimer
from typing import Any, NamedTuple

from pytest_accel.core import torch_api
from pytest_accel.core.rank_messages import Leak, LeakKind

_CWD = "the working directory"
_USER = "the user (real and effective id)"
_GROUP = "the group (real and effective id)"
_GROUPS = "the supplementary groups"
_ROOT = "the root folder (device and inode)"
_REMOVED = "(removed)"
_ALARM = "the alarm timer"
_ON = "on"

Settings = Mapping[str | bytes, object]
"""Values by name of the setting; names of environment variables are bytes. torch's are missing until it is imported."""


class _Setting(NamedTuple):
    """The functions that get and set one of torch's settings. Both take the module torch as their first argument."""

    get: Callable[[Any], object]
    put: Callable[[Any, Any], object]


def _functions(get: str, put: str) -> _Setting:
    """Return a setting with the functions of torch that have these names."""
    return _Setting(lambda torch: getattr(torch, get)(), lambda torch, value: getattr(torch, put)(value))


def _of_cudnn(name: str) -> _Setting:
    """Return a setting of cuDNN, an attribute."""
    return _Setting(
        lambda torch: getattr(torch.backends.cudnn, name),
        lambda torch, value: setattr(torch.backends.cudnn, name, value),
    )


_TORCH = {
    "torch's default dtype": _functions("get_default_dtype", "set_default_dtype"),
    # To reset the device, set None, torch's initial state: "cpu" would install a mode through which every call goes.
    "torch's default device": _Setting(
        torch_api.default_device,
        lambda torch, value: torch.set_default_device(None if str(value) == "cpu" else value),
    ),
    "torch's grad mode": _functions("is_grad_enabled", "set_grad_enabled"),
    # 0: off, 1: warns, 2: raises (torch.set_deterministic_debug_mode).
    "torch.use_deterministic_algorithms": _functions("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    "torch.backends.cudnn.deterministic": _of_cudnn("deterministic"),
    "torch.backends.cudnn.benchmark": _of_cudnn("benchmark"),
    "torch's number of threads": _functions("get_num_threads", "set_num_threads"),
}
"""torch's settings. They are put back: many suites choose deterministic algorithms in a test and never reset them.

To replace the ranks instead takes more than a second for each such test.
"""


def read(variables: Mapping[bytes, bytes | None]) -> dict[str | bytes, object]:
    """Return the current settings and the current values of the environment `variables`."""
    found: dict[str | bytes, object] = {}
    for variable in variables:
        try:
            # `os.environ` would take three times as long, and .get() twice as long.
            found[variable] = environb[variable]
        except KeyError:
            found[variable] = None
    found[_USER] = f"{getuid()} and {geteuid()}"
    found[_GROUP] = f"{getgid()} and {getegid()}"
    found[_GROUPS] = str(sorted(getgroups()))
    root = stat("/")
    found[_ROOT] = f"{root.st_dev} and {root.st_ino}"
    found[_ALARM] = _ON if getitimer(ITIMER_REAL)[0] else "off"
    try:
        found[_CWD] = getcwd()
    except OSError:
        found[_CWD] = _REMOVED
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        for name, setting in _TORCH.items():
            found[name] = setting.get(torch)
    return found


def reseed() -> None:
    """Give this process random states of its own, as a new interpreter has; ranks are forked with the same states.

    Python reseeds `random` in each fork. The generators of devices are made with their runtimes, in ranks only. With
    the same key, a rank could connect to managers of `multiprocessing` in other ranks without having been given theirs.
    """
    current_process().authkey = urandom(32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def change(name: str | bytes, old: object, new: object) -> Leak:
    """Return the leak of a setting whose value was `old` and is `new`."""
    setting = name if isinstance(name, str) else f"the environment variable {fsdecode(name)}"
    return Leak(LeakKind.SETTING, setting, _text(old), _text(new))


def changed(before: Settings, after: Settings) -> dict[str | bytes, tuple[object, object]]:
    """Return the old and new value of each setting that is in both mappings and differs.

    An alarm timer that is off again is no change: the timer of a fixture may have expired.
    """
    return {
        name: (old, after[name])
        for name, old in before.items()
        if name in after and after[name] != old and not (name == _ALARM and old == _ON)
    }


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return repr(fsdecode(value))
    return "unset" if value is None else str(value)


def restore(name: str | bytes, value: Any) -> bool:
    """Restore the setting `name` to `value`; return False if the world must be replaced because that is not possible.

    Environment variables are not restored: a test that changed a variable of its rank may also have changed others,
    which are not checked.
    """
    if isinstance(name, bytes):
        return False
    if name in _TORCH:
        _TORCH[name].put(sys.modules["torch"], value)
        return True
    if name == _ALARM:
        setitimer(ITIMER_REAL, 0)
        return True
    if name == _CWD:
        with suppress(OSError):
            chdir(value)
            return True
    return False
