"""Files that are made of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from pytest_accel.core import whole_file
from pytest_accel.features.record.record_file import RecordError
from pytest_accel.features.record.timeline import Session


@dataclass(frozen=True, slots=True)
class Output:
    """A file that is made of the record of one or several sessions."""

    about: str
    """A word for the file, such as "trace"."""
    path: str
    make: Callable[[Sequence[Session]], str]
    """A function that returns the content of the file."""

    def check(self) -> None:
        """Create the folder of the file. Raise :class:`RecordError` if the file cannot be made."""
        try:
            whole_file.check_folder(self.path)
        except OSError as error:
            raise self._error(error) from None

    def write(self, sessions: Sequence[Session]) -> None:
        """Write the file. Raise :class:`RecordError` if that fails."""
        text = self.make(sessions)
        try:
            whole_file.write(self.path, text)
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> RecordError:
        return RecordError(f"{self.path} cannot be written: {error.strerror}")


def trace(path: str) -> Output:
    """Return the trace for ui.perfetto.dev and chrome://tracing."""

    def make(sessions: Sequence[Session]) -> str:
        from pytest_accel.features.record.chrome_trace import trace_text

        return trace_text(sessions)

    return Output("trace", path, make)


def report(path: str) -> Output:
    """Return the report page. Raise :class:`RecordError` if Bokeh is not installed."""
    if find_spec("bokeh") is None:
        raise RecordError("Bokeh is not installed: pip install 'pytest-accel[report]'")

    def make(sessions: Sequence[Session]) -> str:
        from pytest_accel.features.record.report_page import page

        return page(sessions)

    return Output("report", path, make)


def summary(path: str) -> Output:
    """Return the summary in GitHub's Markdown."""

    def make(sessions: Sequence[Session]) -> str:
        from pytest_accel.features.record.ci_summary import summary

        return summary(sessions)

    return Output("summary", path, make)
