"""Changes of stored snapshots: ranks only collect them, and the driver makes those on which all ranks agree."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.stash_keys import MARKED

_KEPT = "(as it is stored)"


class Changes:
    """The changes that a test would make to snapshots on a rank, by the snapshots' names."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.compared: set[str] = set()
        """Names of the snapshots that the test has read: other ranks may only change those that differ."""

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        """Return the changes of a phase, even if there are none: the driver waits for all ranks."""
        sent = {"made": dict(self.made), "kept": sorted(self.compared - self.made.keys())}
        self.made.clear()
        self.compared.clear()
        return sent


def agreed(item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the changes on which all ranks of `item` agree, with the names; fail `report` for others."""
    for name in sorted({name for one in sent.values() for name in one["made"]}):
        values = {
            rank: one["made"].get(name, _KEPT) for rank, one in sent.items() if name in (*one["made"], *one["kept"])
        }
        first, *others = values
        different = next((rank for rank in others if values[rank] != values[first]), None)
        if different is not None:
            lines = (_lines(values[first]), _lines(values[different]), f"rank {first}", f"rank {different}")
            text = "\n".join(difflib.unified_diff(*lines, lineterm="", n=2))
            fail(report, f"the snapshot {name} differs between ranks; it is left as it was\n{text}")
        elif len(sent) < item.stash[MARKED].key.ranks:
            fail(report, f"the snapshot {name} is left as it was: only {ranks_text(list(sent))} reported")
        else:
            yield name, values[first]


def fail(report: pytest.TestReport, text: str) -> None:
    """Fail `report` with `text`. If it has failed already, add a section instead."""
    if report.failed:
        report.sections.append(("snapshots", text))
    else:
        report.outcome, report.longrepr = "failed", text


def _lines(value: Any) -> list[str]:
    """Return the lines of a snapshot that a rank would store; None: it would delete the snapshot."""
    data = value[-1] if isinstance(value, list) else value
    text = data.decode(errors="backslashreplace") if isinstance(data, bytes) else str(data)
    return [line if line.isprintable() else repr(line) for line in text.splitlines()]
