"""The pages of the documentation, and their blocks of code, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page whose opening fence is followed by exactly the text `language`."""
    return re.findall(
        rf"^```{re.escape(language)}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
