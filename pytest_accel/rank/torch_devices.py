"""A rank's devices in torch: verification, selection, limits and waiting.

The functions import torch, so they are called in ranks only. Without torch, the limits and the memory of devices are
left to the suite, and the devices that the process sees cannot be verified.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_accel.compat import torch_api
from pytest_accel.core.device import MaskError
from pytest_accel.core.truncation import first_line

if TYPE_CHECKING:
    import torch

    from pytest_accel.rank.context import RankContext

MISSING_TORCH = f"torch, which is not installed in {sys.prefix}"
"""The end of a sentence on what cannot be done without torch."""


class FailedWork(NamedTuple):
    """Work on a device that has failed."""

    device: str
    """torch's name of the device."""
    error: RuntimeError
    seen: bool
    """True if torch has raised this error in the test, so that the test knows of it."""

    def __str__(self) -> str:
        return f"{self.device}: {first_line(self.error)}"


def verify(context: RankContext) -> None:
    """Raise :class:`MaskError` if torch sees other devices than the rank has been given."""
    seen = context.visible_devices
    try:
        context.vendor.verify(seen, os.environ)
    except (AssertionError, ImportError, OSError, RuntimeError) as error:  # The errors that torch raises.
        if is_missing(error):
            return  # Without torch, the devices cannot be verified.
        names = ", ".join(device.id for device in seen)
        raise MaskError(
            f"the process has been given {names}, which torch cannot use: {type(error).__name__}: {error}"
        ) from error


def select(context: RankContext) -> torch.device:
    """Make the first device of this rank torch's current device, and return it."""
    import torch

    device = torch.device(context.torch_device)
    # Not every module has set_device: mps has only one device.
    if set_device := getattr(module_of(context.torch_device), "set_device", None):
        set_device(device)
    return device


def limit_threads() -> None:
    """Set torch's number of threads to ``OMP_NUM_THREADS``, which libgomp read before this process was forked.

    Call this before the suite's own code. A rank that has not imported torch yet reads the variable itself.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal() and int(threads):
        installed_torch().set_num_threads(int(threads))


def reseed() -> None:
    """Give this process random states of its own, as a new interpreter has; ranks are forked with the same states.

    Python reseeds `random` in each fork. The generators of devices are made with their runtimes, in ranks only.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def limit_memory(context: RankContext) -> None:
    """Limit this rank's memory on each of its devices to its share, for the types of devices for which torch can."""
    torch = installed_torch()
    if torch is None:
        return
    for name, device in context.torch_names:
        limit = getattr(module_of(name), "set_per_process_memory_fraction", None)
        if limit is not None:
            fraction = context.fraction(device)
            # mps has only one device, so its function does not take a device.
            limit(fraction) if name == "mps" else limit(fraction, torch.device(name))


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    """Return the `torch.device` for each name."""
    import torch

    return [torch.device(name) for name in names]


def failed_work(context: RankContext, raised: set[str]) -> FailedWork | None:
    """Wait for all work on this rank's devices; return work that has failed, or None.

    `raised` has the first lines of the errors that torch has raised in the test (`record_errors`).

    The next call that waits for a device raises an error of earlier work, such as an index out of bounds in a kernel.
    Without this wait, that call may be in another test.

    An error that torch has raised in the test is the test's own business: the test expects it, or has failed because of
    it. After such an error every use of the device in this process raises it again, so that the device hides no other
    error.
    """
    found: FailedWork | None = None
    seen = raised.copy()  # The wait itself raises the errors again.
    for name, _ in context.accelerators:
        module = module_of(name)
        # Do not initialise a runtime that the test has not used.
        if not (is_initialized(module) and hasattr(module, "synchronize")):
            continue
        try:
            # mps has only one device, so its function takes no argument.
            module.synchronize() if name == "mps" else module.synchronize(name)
        except RuntimeError as error:
            # If several devices have errors, report an error that the test has not seen.
            if found is None or found.seen:
                found = FailedWork(name, error, first_line(error) in seen)
    return found


def is_initialized(module: Any) -> bool:
    """Return whether this process has used the runtime of torch's `module` for a type of devices, or may have."""
    return bool(getattr(module, "is_initialized", lambda: True)())


def module_of(device: str) -> Any:
    """Return torch's module for a device, such as `torch.cuda`; None if it has none (xla), and without torch."""
    torch = installed_torch()
    return None if torch is None else getattr(torch, torch.device(device).type, None)


@cache
def installed_torch() -> Any:
    """Return the module torch, imported if necessary; None if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if not is_missing(error):
            raise
        return None


def is_missing(error: BaseException) -> bool:
    """Return whether `error` says that torch is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def record_errors(raised: set[str]) -> None:
    """Add to `raised` the first line of each error of a device that torch raises from now on; no-op if torch has none.

    torch makes an object of one class (`torch_api.accelerator_error`) for each error that the runtime of a device
    reports, in whichever function the error shows. So a recording `__init__` of this class sees all errors, also if the
    test has caught them, and costs nothing while there is no error. Tracing all exceptions would slow every test down,
    and an exception that `pytest.raises` has caught cannot be found later: it is gone.

    Errors that torch raises as a plain RuntimeError, such as cuBLAS's and all in older releases, are not recorded.
    """
    kind: Any = torch_api.accelerator_error(sys.modules.get("torch"))
    if kind is None or hasattr(kind.__init__, "__wrapped__"):
        return
    original: Callable[..., None] = kind.__init__

    @wraps(original)
    def init(instance: BaseException, *args: object, **named: object) -> None:
        original(instance, *args, **named)
        raised.update(map(first_line, args[:1]))

    kind.__init__ = init
