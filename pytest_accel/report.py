"""Output about the session on the terminal: header, devices, missing hardware, reruns, errors outside of tests.

Also the hooks that check ``--accel-require`` and end the session's processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

from pytest_accel.core.stash_keys import MARKED, NOT_TORN_DOWN, OWNERS, REPLACED, SKIPPED_FILES
from pytest_accel.session import AccelSession
from pytest_accel.settings.options import LAUNCHER, Settings, flag, is_distributed

_ERRORS = "accel: errors outside of any test"


class ReportHooks:
    """Hooks for the session's output, start and end. Registered in the controller only."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session

    def pytest_report_header(self) -> list[str]:
        session = self._session
        return [
            *([] if session.launched is None else [f"accel: {session.launched.about}"]),
            *(self._surroundings() if is_distributed(session.config) else []),
            *self._foreign_marks(),
        ]

    def _foreign_marks(self) -> list[str]:
        names = self._session.config.stash[OWNERS].of_project
        if self._session.settings.marks is not None or not names:
            return []
        from pytest_accel.unmarked_tests import header_line

        return [header_line(names)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Keep the skipped files that an xdist worker reports. All workers collect the same tests."""
        output = getattr(node, "workeroutput", {})
        self._session.skipped_files = output.get(SKIPPED_FILES, self._session.skipped_files)

    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        """Show the surroundings if there are marked tests. Under xdist the header shows them."""
        shown = not is_distributed(self._session.config) and any(MARKED in item.stash for item in items)
        return self._surroundings() if shown and self._session.config.get_verbosity() >= 0 else []

    def _surroundings(self) -> list[str]:
        """Return lines about the devices, and about the launcher of this process."""
        from pytest_accel.hardware.inventory import describe

        return [describe(self._session.machine.session), *self._launcher()]

    def _launcher(self) -> list[str]:
        """Return a line if this process is one of several that a launcher has started, and a session by itself."""
        from pytest_accel.core.launcher_env import find_here

        process = find_here()  # None in a session of all these processes, which has removed the launcher's variables.
        if process is None or self._session.settings.cluster is not None:
            return []
        how = f"{flag(LAUNCHER)} on makes one session of them"
        return [f"accel: {process.launcher} has started {process.size} processes, each with its own session; {how}"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if self._session.settings[:3] != Settings()[:3]:  # These settings choose devices, or their order.
            _ = self._session.machine  # Raises pytest.UsageError for settings that do not fit this machine.
        for kind, count in self._session.settings.require:
            from pytest_accel.hardware.inventory import skipped
            from pytest_accel.hardware.registry import VendorError

            try:
                inventory = self._session.machine.of(kind)
            except VendorError as error:
                raise pytest.UsageError(f"--accel-require {kind}:{count}: {error}") from None
            found = inventory.devices
            if len(found) < count:
                details = "; ".join([", ".join(device.name for device in found) or "none", *skipped(inventory)])
                pytest.exit(
                    f"--accel-require {kind}:{count}: {len(found)} {kind} device(s) here ({details})", returncode=1
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if excinfo.errisinstance(KeyboardInterrupt):  # Not for pytest.exit, which calls this hook, too.
            pool = self._session.started_pool
            if pool is not None:
                for waiting in pool.call(pool.cancel_waiting):
                    self._session.show(f"accel: {waiting}")
                pool.call(pool.record_interrupted)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Terminate the ranks before pytest-cov combines their coverage data, in a wrapper around this wrapper."""
        result = yield
        self._session.close(gracefully=True)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        self._session.close(gracefully=not interrupted)
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            pool = self._session.started_pool
            skipped = self._session.settings.strict and self._session.skipped_files
            if skipped or (pool is not None and pool.worlds.errors):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        reports = [report for reports in terminalreporter.stats.values() for report in reports]
        for title, lines in (*self._sections_of_tests(reports, config), *self._sections_of_pool(config)):
            if lines:
                is_error = title == _ERRORS
                terminalreporter.section(title, sep="=" if is_error else "-", **({"red": True} if is_error else {}))
                for line in lines:
                    terminalreporter.write_line(line)

    def _sections_of_tests(self, reports: Sequence[Any], config: pytest.Config) -> Iterator[tuple[str, list[str]]]:
        """Yield the title and the lines of each section that is made of reports."""
        word = "failed" if self._session.settings.strict else "skipped"
        missing = Counter(report.accel_missing for report in reports if hasattr(report, "accel_missing"))
        lines = [f"{count:>5}  {reason}" for reason, count in missing.most_common()]
        yield f"accel: {missing.total()} {word} for missing hardware", lines
        files = self._session.skipped_files
        if files or any(hasattr(report, "accel_condition") for report in reports):
            from pytest_accel.core.units import count_text
            from pytest_accel.driver.skip_conditions import ADVICE

            tests = Counter(report.accel_condition for report in reports if hasattr(report, "accel_condition"))
            counts = [f"{text}: {count_text(count, 'test')}" for text, count in tests.most_common()]
            yield f"accel: {word} by a condition on what only ranks have", [*files, *counts, ADVICE]
        lost = "accel: fixtures that were not torn down, since their ranks had died or hung"
        yield lost, _properties(reports, NOT_TORN_DOWN)
        if config.get_verbosity() > 0:
            yield "accel: tests after which new ranks were started", _properties(reports, REPLACED)
        yield "rerun", [report.accel_rerun for report in reports if hasattr(report, "accel_rerun")]

    def _sections_of_pool(self, config: pytest.Config) -> Iterator[tuple[str, list[str]]]:
        """Yield the title and the lines of each section about the worlds and leases of the session."""
        if (pool := self._session.started_pool) is None:
            return
        from pytest_accel.core.frames import folders_of
        from pytest_accel.verdict import sentences

        for interrupted in pool.worlds.interrupted.values():
            name = f" of {interrupted.test}" if interrupted.test else ""
            lines = sentences.interrupted_lines(interrupted, folders_of(config))
            yield f"accel: the interrupted ranks{name}", list(lines)
        yield _ERRORS, list(map(sentences.problem_lines, pool.worlds.errors))


def _properties(reports: Sequence[Any], wanted: str) -> list[str]:
    """Return a line for each test whose `reports` have the property `wanted`, with its value."""
    return sorted(
        {
            f"{report.nodeid}: {value}"
            for report in reports
            for name, value in getattr(report, "user_properties", ())
            if name == wanted
        }
    )
