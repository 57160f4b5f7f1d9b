"""Settings of the process that the leak check compares before and after the call of a test, and puts back if it can."""

from __future__ import annotations

import logging
import sys
from _signal import getsignal  # type: ignore[import-not-found]  # The public function makes members of enums.
from collections.abc import Callable, Iterator, Mapping
from linecache import getlines
from operator import attrgetter, methodcaller
from os import chdir, environb, fsdecode, getcwd, getegid, geteuid, getgid, getgroups, getuid, umask
from signal import ITIMER_REAL, Handlers, Signals, getitimer, setitimer, signal
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from pytest_accel.compat import torch_api
from pytest_accel.compat.pytest_shims import raw_environment
from pytest_accel.core.frames import is_library
from pytest_accel.messages.rank_messages import Leak, LeakKind

_SIGNALS = {
    name: Signals[name]
    for name in (
        *("SIGHUP", "SIGINT", "SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM"),
        "SIGCHLD",  # While it is ignored, `subprocess` does not learn how a program has ended: status 0, always.
    )
}
"""The signals that suites handle. A look at all 64 takes six times as long, in each test."""
_ALARM = "the alarm timer"
_PATH = "sys.path"
_ON = "on"

_TorchSetting = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]
"""The functions that read a setting of the module torch and put it back."""


class _Kind(NamedTuple):
    """The settings of one kind. `put` takes a name and a value, and raises an error if that is not possible."""

    title: str
    """Text in which the name is inserted."""
    read: Callable[[], Mapping[Any, Any]]
    put: Callable[[Any, Any], object]


def _cannot(_value: object) -> None:
    raise OSError


def _folder() -> str:
    try:
        return getcwd()
    except OSError:
        return "(removed)"


def _umask() -> str:
    mask = umask(0o077)  # There is no other way to read it. A file that a thread makes meanwhile is private.
    umask(mask)
    return f"0o{mask:03o}"


def _put_path(path: tuple[str, ...]) -> None:
    """Put back `sys.path`, and keep what libraries have added: they import their own packages later."""
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path and is_library(f"{entry}/"))]


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the working directory": (_folder, chdir),
    "the umask": (_umask, lambda text: umask(int(text, 8))),
    _PATH: (lambda: tuple(sys.path), _put_path),
    "sys.argv": (lambda: tuple(sys.argv), lambda value: sys.argv.__setitem__(slice(None), value)),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "the level of the root logger": (lambda: logging.root.level, lambda value: logging.root.setLevel(value)),
    _ALARM: (lambda: _ON if getitimer(ITIMER_REAL)[0] else "off", lambda _: setitimer(ITIMER_REAL, 0)),
    "the user (real and effective id)": (lambda: f"{getuid()} and {geteuid()}", _cannot),
    "the group (real and effective id)": (lambda: f"{getgid()} and {getegid()}", _cannot),
    "the supplementary groups": (lambda: str(sorted(getgroups())), _cannot),
}
"""The functions that read a setting and put it back, by name. The second raises an error if that is not possible."""


def _function(get: str, put: str) -> _TorchSetting:
    """Return a setting with the functions of torch that have these names."""
    return methodcaller(get), lambda torch, value: getattr(torch, put)(value)


def _attribute(owner: str, name: str) -> _TorchSetting:
    """Return a setting that is the attribute `name` of a module of torch."""
    find = attrgetter(owner)
    return attrgetter(f"{owner}.{name}"), lambda torch, value: setattr(find(torch), name, value)


_TORCH_SETTINGS: dict[str, _TorchSetting] = {
    "torch's default dtype": _function("get_default_dtype", "set_default_dtype"),
    # To reset the device, set None, torch's initial state: "cpu" would install a mode through which every call goes.
    "torch's default device": (
        torch_api.default_device,
        lambda torch, value: torch.set_default_device(None if str(value) == "cpu" else value),
    ),
    "torch's grad mode": _function("is_grad_enabled", "set_grad_enabled"),
    # 0: off, 1: warns, 2: raises (torch.set_deterministic_debug_mode).
    "torch.use_deterministic_algorithms": _function("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    "torch.backends.cudnn.deterministic": _attribute("backends.cudnn", "deterministic"),
    "torch.backends.cudnn.benchmark": _attribute("backends.cudnn", "benchmark"),
    "torch.backends.cudnn.allow_tf32": _attribute("backends.cudnn", "allow_tf32"),
    "torch's number of threads": _function("get_num_threads", "set_num_threads"),
    # Since torch 2.9. They come before the precision, which cannot be read while they contradict it.
    "torch.backends.fp32_precision": _attribute("backends", "fp32_precision"),
    "torch.backends.cuda.matmul.fp32_precision": _attribute("backends.cuda.matmul", "fp32_precision"),
    "torch's float32 matmul precision": _function("get_float32_matmul_precision", "set_float32_matmul_precision"),
}
"""torch's settings by name. Many suites choose deterministic algorithms in a test and never reset them.

These are read twice in each test, so without a Python frame for each: `operator` calls torch's functions.
"""


def _read(settings: Mapping[str, tuple[Callable[..., Any], object]], *owner: object) -> dict[str, object]:
    """Return the values of the `settings` that can be read: older releases of torch lack some."""
    found: dict[str, object] = {}
    for name, (get, _) in settings.items():
        try:
            found[name] = get(*owner)
        except (AttributeError, RuntimeError):
            continue
    return found


def _read_torch_settings() -> dict[str, object]:
    torch = sys.modules.get("torch")
    return {} if torch is None else _read(_TORCH_SETTINGS, torch)


def _set_variable(name: bytes, value: bytes | None) -> None:
    if value is None:
        environb.pop(name, None)
    else:
        environb[name] = value


def _handlers() -> Mapping[str, Any]:
    return {name: getsignal(number) for name, number in _SIGNALS.items()}


def _handler(value: Any) -> Any:
    """Return the name of a handler that `_signal.getsignal` returns as a number, and any other as it is."""
    return Handlers(value).name if isinstance(value, int) else value


def _distributed() -> Mapping[str, Any]:
    """Return the names of torch.distributed; nothing before it is imported."""
    module = sys.modules.get("torch.distributed")
    return {} if module is None else vars(module).copy()


_KINDS = (
    _Kind("{}", lambda: _read(_SETTINGS), lambda name, old: _SETTINGS[name][1](old)),
    _Kind("{}", _read_torch_settings, lambda name, old: _TORCH_SETTINGS[name][1](sys.modules["torch"], old)),
    _Kind("the environment variable {}", raw_environment, _set_variable),
    _Kind("the handler of {}", _handlers, lambda name, old: signal(_SIGNALS[name], old)),
    _Kind("torch.distributed.{}", _distributed, lambda name, old: setattr(sys.modules["torch.distributed"], name, old)),
)

State = tuple[Mapping[Any, Any], ...]
"""The values of all settings at one moment, by kind and name."""


def read() -> State:
    """Return the current settings."""
    return tuple(kind.read() for kind in _KINDS)


def restore(before: State, after: State) -> Iterator[Leak]:
    """Put back the settings that differ in `before` and `after`, and yield a leak for each.

    A leak lasts if its setting cannot be put back.
    """
    for kind, old, new, current in zip(_KINDS, before, after, read(), strict=True):
        if old == new:
            continue
        for name in sorted({*old, *new}, key=str):
            was, became = old.get(name), new.get(name)
            # If a setting has changed again since `after`, a fixture has restored it.
            if was == became or current.get(name) != became or _is_no_leak(kind, name, was, became):
                continue
            try:
                kind.put(name, was)
                lasting = False
            except (OSError, RuntimeError, TypeError, ValueError):
                lasting = True
            title = kind.title.format(fsdecode(name))
            if kind.read is _handlers:
                was, became = _handler(was), _handler(became)
            yield Leak(LeakKind.SETTING, title, _text(was), _text(became), lasting=lasting)


def _is_no_leak(kind: _Kind, name: Any, was: Any, became: Any) -> bool:
    if kind.read is raw_environment:
        # Libraries set variables when they are first used, and rely on them later: the service of wandb, caches of
        # Inductor.
        return not _is_named_in_suite(fsdecode(name))
    if kind.read is _handlers:
        return _is_of_library(became)
    if kind.read is _distributed:
        # A submodule or a counter may change. A function that the suite has patched is a leak.
        return not isinstance(was, FunctionType) or _is_of_library(became)
    if was is None and kind.read is _read_torch_settings:  # torch has been imported by the test.
        return True
    if name == _PATH:
        return _without_libraries(was) == _without_libraries(became)
    return bool(name == _ALARM and was == _ON)  # The alarm timer of a fixture may have expired.


def _is_named_in_suite(variable: str) -> bool:
    """Return whether the suite's code contains the name of an environment variable."""
    modules: list[object] = list(sys.modules.values())  # Some packages put objects of other types there.
    files = {vars(module).get("__file__") for module in modules if isinstance(module, ModuleType)}
    own = (file for file in files if isinstance(file, str) and not is_library(file))
    return any(variable in line for file in own for line in getlines(file))


def _is_of_library(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and is_library(code.co_filename)


def _without_libraries(path: tuple[str, ...]) -> list[str]:
    return [entry for entry in path if not is_library(f"{entry}/")]


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return repr(fsdecode(value))
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return "unset" if value is None else str(value)
