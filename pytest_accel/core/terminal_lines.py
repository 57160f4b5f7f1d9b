"""Functions that write lines or warnings to the session's terminal."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest


def warn(text: str) -> None:
    """Issue a warning, which pytest's summary shows; no error even if warnings are errors in the suite."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(text, pytest.PytestWarning, stacklevel=2)


def write_line(config: pytest.Config, line: str) -> None:
    """Write `line` to the terminal on a line of its own, even if output is captured or a line is unfinished."""
    plugins = config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    if reporter is None:
        return
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        # Makes the reporter repeat the name of the test or file, if it shows these.
        reporter.ensure_newline()
        if config.get_terminal_writer().width_of_current_line:  # xdist's progress dots
            reporter.write_line("")
        reporter.write_line(line)
        if hasattr(reporter, "flush"):  # Another plugin may have replaced the reporter.
            reporter.flush()


def write_text(config: pytest.Config, text: str) -> None:
    """Write `text` to the terminal at once, even if output is captured. It begins on a line of its own."""
    capture, writer = config.pluginmanager.getplugin("capturemanager"), config.get_terminal_writer()
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        if writer.width_of_current_line and not text.startswith("\n"):
            writer.line()
        writer.write(text, flush=True)
