"""The reports of a rank: data that the plugin adds to pytest's reports, and the form of reports for the driver.

Tracebacks are made readable first: frames of libraries are shortened, some of torch's are hidden, and frequent mistakes
are explained.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from marshal import dumps
from traceback import format_exc
from typing import Any

import pytest
from msgspec import structs

from pytest_accel.compat import torch_api, torch_errors
from pytest_accel.compat.pytest_shims import filter_frames
from pytest_accel.core.frames import failure_place, folders_of, is_library
from pytest_accel.core.missing_mark import name_place
from pytest_accel.core.truncation import cut_failure
from pytest_accel.messages.rank_messages import ExceptionSketch
from pytest_accel.messages.serialization import RankDataError, plain, sketch
from pytest_accel.rank.context import RankContext

_WRAPPERS = re.compile(r"torch\.(distributed\.c10d_logger|utils\._contextlib|_compile)$")
"""Modules whose functions only wrap others: for logging, for ``torch.no_grad`` and the like, for the compiler."""


class RankReports:
    """Pytest plugin of a rank that adds data for the driver to the reports of phases and subtests."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.session_devices: int | None = None
        """Number of the session's devices of the test's kind; None if there is no such kind, or before any test."""
        self.exception: ExceptionSketch | None = None
        """The exception of the report that is sent next; None if it has not failed."""
        self.late_error: RuntimeError | None = None
        """The error of work on a device that the test has not waited for."""

    @property
    def hidden_devices(self) -> str | None:
        """A sentence on the devices that the driver sees and this rank does not; None if there is no difference."""
        context = self._context
        seen = 0 if context.spec.key.kind == "cpu" else len(context.visible_devices)
        if self.session_devices is None or seen == self.session_devices:
            return None
        return f"this rank sees {seen} of the session's {self.session_devices} devices"

    # Not a wrapper: pytest's own hook must be called first, since it sets the exception of a unittest.TestCase.
    @pytest.hookimpl(specname="pytest_runtest_makereport")
    def pytest_prepare_exception(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Prepare the exception of a phase before pytest makes its report."""
        if call.excinfo is None:
            return
        name_place(call.excinfo.value, item)
        error = call.excinfo.value
        spec = self._context.spec
        explanation = torch_errors.explain(error, grouped=spec.key.grouped, init=spec.key.grouped and spec.key.init)
        if explanation is not None:
            torch_errors.add_hint(error, explanation)
        if not is_library(str(item.path)):  # The tests of an installed package are the suite's own code.
            filter_frames(item, _WRAPPERS if explanation is None else torch_errors.MODULES)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._explain_skip(item, report)
        self.exception = None
        if call.excinfo is None or not report.failed:
            return report
        failure = call.excinfo.value
        kind = torch_api.accelerator_error(sys.modules.get("torch"))
        of_device = failure is self.late_error or (kind is not None and isinstance(failure, kind))
        self.exception = structs.replace(sketch(failure), of_device=of_device)
        report.accel_place = failure_place(call.excinfo, report.longrepr, folders_of(item.config))  # type: ignore[attr-defined]
        traceback = getattr(report.longrepr, "reprtraceback", None)
        if failure is self.late_error and traceback is not None:
            # All frames are the plugin's own. `--full-trace`, which pytest suggests, shows nothing of the test.
            traceback.extraline = None
        return report

    def _explain_skip(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Add to the reason of a mark ``skipif`` that ranks see other devices than the driver."""
        longrepr = report.longrepr
        if report.when != "setup" or not report.skipped or not isinstance(longrepr, tuple):
            return
        if self.hidden_devices is not None and item.get_closest_marker("skipif") is not None:
            path, line, reason = longrepr
            report.longrepr = path, line, f"{reason} ({self.hidden_devices})"


def serialize(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    """Return `report` as ``pytest_report_to_serializable`` does, with long text truncated."""
    data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
    if "$report_type" in data and isinstance(report, pytest.TestReport):
        data["$report_type"] = "TestReport"  # The driver does not know a suite's own class of reports.
    if config.get_verbosity() < 2:
        cut_failure(data.get("longrepr"))
    found: dict[str, Any] = plain(data)
    return found


def phase_data(config: pytest.Config, report: pytest.TestReport) -> dict[str, Any]:
    """Return the data of the `report` of a phase that the driver needs."""
    # The driver makes its own report of a phase that has passed without output, and needs only outcome and times.
    if report.passed and not (report.sections or report.user_properties or hasattr(report, "wasxfail")):
        return {name: getattr(report, name) for name in ("outcome", "duration", "start", "stop")}
    return serialize(config, report)


def collect_rank_data(item: pytest.Item, report: pytest.TestReport) -> tuple[bytes, ExceptionSketch | None]:
    """Return the data that plugins send with `report`, and the exception if collecting the data has made `report` fail.

    If the report has failed before, an error in the data is only added to it as a section.
    """
    try:
        return _rank_data(item, report), None
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        text = str(error)
        if not isinstance(error, RankDataError):
            text = f"pytest_accel_rank_data raised {type(error).__name__}: {error}\n{format_exc()}"
        if report.failed:
            report.sections.append(("pytest_accel_rank_data", text))
            return b"", None
        report.outcome, report.longrepr = "failed", text
        return b"", sketch(RankDataError(text))


def _rank_data(item: pytest.Item, report: pytest.TestReport) -> bytes:
    """Return the data of all implementations of `pytest_accel_rank_data`, as marshal writes it; empty if there is none.

    Raise :class:`RankDataError` if it is invalid.
    """
    collected: dict[str, Any] = {}
    for answer in item.ihook.pytest_accel_rank_data(item=item, report=report):
        for key, value in answer.items():
            if key in collected:
                raise RankDataError(f"pytest_accel_rank_data: two implementations returned the key {key!r}")
            try:
                dumps(value)  # All other types, also derived types, are errors for marshal.
            except ValueError:
                raise RankDataError(
                    f"pytest_accel_rank_data returned {key}=... with a value that is not plain; "
                    "expected None, bool, int, float, str, bytes, or lists, tuples and dicts of these"
                ) from None
            collected[key] = value
    return dumps(collected) if collected else b""
