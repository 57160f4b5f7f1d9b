"""The reason of a skip in pytest's reports."""

from __future__ import annotations

from typing import Any


def reason_of_skip(longrepr: Any) -> str:
    """Return the reason in the longrepr of a skipped test or file, which is a file, a line and a text."""
    text = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ")
