"""Errors of devices that torch has raised in the running test. Runs in ranks only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from sys import modules
from typing import Any

from pytest_accel.compat import torch_api


class RaisedErrors:
    """The errors of devices that torch has raised in the running test; one for each rank.

    torch makes an object of one class (`torch_api.accelerator_error`) for each error that the runtime of a device
    reports, in whichever function the error shows. So a recording `__init__` of this class sees all errors, also if the
    test has caught them, and costs nothing while there is no error. Tracing all exceptions would slow every test down,
    and an exception that `pytest.raises` has caught cannot be found later: it is gone.

    Errors that torch raises as a plain RuntimeError, such as cuBLAS's and all in older releases, are not recorded.
    """

    def __init__(self) -> None:
        self._lines: set[str] = set()
        """The first line of each error."""
        self._records = False
        self._installed = False

    def begin(self) -> None:
        """Forget the errors of the last test, and record the errors that torch raises from now on."""
        self._lines.clear()
        self._records = True
        if not self._installed and (error := torch_api.accelerator_error(modules.get("torch"))) is not None:
            self._installed = True
            self._record_objects_of(error)

    def _record_objects_of(self, error: Any) -> None:
        original: Callable[..., None] = error.__init__

        @wraps(original)
        def init(instance: BaseException, *args: object, **named: object) -> None:
            original(instance, *args, **named)
            if self._records and args:
                self._lines.add(first_line(args[0]))

        error.__init__ = init

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no errors in the ``with`` block, which waits for a device on behalf of the plugin."""
        self._records = False
        try:
            yield
        finally:
            self._records = True

    def has(self, error: BaseException) -> bool:
        """Return whether torch has raised an error with the first line of `error` in the running test."""
        return first_line(error) in self._lines


def first_line(error: object) -> str:
    """Return the first line of the text of `error`. The other lines explain how to debug it."""
    return str(error).strip().partition("\n")[0]
