"""Readable tracebacks of failures in libraries: shortens their frames, hides some of torch's, and explains mistakes."""

from __future__ import annotations

import sys

import pytest

from pytest_accel.core import torch_errors
from pytest_accel.core.frames import is_library
from pytest_accel.core.missing_mark import name_place
from pytest_accel.core.shims import shorten_frames
from pytest_accel.core.torch_errors import Explanation
from pytest_accel.rank.context import RankContext

_WRAPPERS = ("torch.distributed.c10d_logger", "torch.utils._contextlib", "torch._compile")
"""Modules whose functions only wrap others: for logging, for ``torch.no_grad`` and the like, for the compiler."""
_IMPLEMENTATION = ("torch.distributed.distributed_c10d", "torch.distributed.rendezvous", "torch.multiprocessing.spawn")
"""Modules with long functions. Their frames do not help with an error that has an explanation."""
_HIDE = "__tracebackhide__"
"""pytest's name for a variable of a function or module whose frames it hides. `--full-trace` shows all."""


class TorchFailures:
    """Pytest plugin of a rank that prepares the exception of a phase before pytest makes its report."""

    def __init__(self, context: RankContext) -> None:
        self._store_keys = context.store_keys
        self._grouped = context.spec.grouped
        self._init = context.spec.grouped and context.spec.key.init

    # Not a wrapper: pytest's own hook must be called first, since it sets the exception of a unittest.TestCase.
    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None:
            return
        name_place(call.excinfo.value, item)
        if not is_library(str(item.path)):  # The tests of an installed package are the suite's own code.
            shorten_frames(item, is_library)
        if "torch" in sys.modules:
            error = call.excinfo.value
            explanation = self.explain(error)
            if explanation is not None:
                torch_errors.add_hint(error, explanation)
            _hide_frames(explained=explanation is not None)

    def explain(self, error: BaseException) -> Explanation | None:
        """Return an explanation of `error` for a test in this rank; None if there is none."""
        return torch_errors.explain(
            error, grouped=self._grouped, init=self._init, refused_by_store=self._store_keys.refused
        )


def _hide_frames(*, explained: bool) -> None:
    """Make pytest hide the frames of `_WRAPPERS`, and those of `_IMPLEMENTATION` if the error is `explained`."""
    for name in (*_WRAPPERS, *_IMPLEMENTATION):
        if (module := sys.modules.get(name)) is not None:
            vars(module)[_HIDE] = _has_own_frame if explained or name in _WRAPPERS else False


def _has_own_frame(excinfo: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """Return whether a frame of the suite's own code is visible, so that a traceback without torch's is not empty."""
    return excinfo is not None and any(
        not is_library(str(entry.path)) and _HIDE not in entry.frame.f_locals for entry in excinfo.traceback
    )
