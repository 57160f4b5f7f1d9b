"""Lines on the session's terminal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import pytest


def write_line(config: pytest.Config, line: str) -> None:
    """Write `line` on the terminal on a line of its own, whether output is captured or a test's line has begun."""
    plugins = config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    if reporter is None:
        return
    with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
        # It makes the reporter begin again with the test's name or file, where it shows these.
        reporter.ensure_newline()
        if config.get_terminal_writer().width_of_current_line:  # The dots of xdist.
            reporter.write_line("")
        reporter.write_line(line)
        if hasattr(reporter, "flush"):  # Another plugin's reporter may be in its place.
            reporter.flush()


def write_section(config: pytest.Config, title: str | None, lines: Iterable[tuple[str, bool]]) -> None:
    """Write `lines`, those with True in bold, under a `title`: to standard output if there is no terminal reporter."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if title is not None:
        print(title) if reporter is None else reporter.section(title, sep="-")
    for line, bold in lines:
        print(line) if reporter is None else reporter.write_line(line, bold=bold)
