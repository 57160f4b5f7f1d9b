"""Formats the doctor's findings as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_accel.features.doctor.checks import Finding

FORMAT = 1
"""Version of the JSON document. Increased when a key is removed or changes its meaning, not when one is added."""
_WIDTH = 110


def problems(findings: Sequence[Finding]) -> int:
    """Return the number of problems."""
    return sum(finding.state == "problem" for finding in findings)


def text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding with its advice below, and the counts at the end."""
    lines = []
    for finding in findings:
        head = f"{finding.state:<9}{finding.check:<10}"
        lines.append(_wrap(finding.what, head))
        if finding.advice:
            lines.append(_wrap(finding.advice, " " * len(head) + "-> "))
    notes = sum(finding.state == "note" for finding in findings)
    return "\n".join([*lines, f"{_count(problems(findings), 'problem')}, {_count(notes, 'note')}"])


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the document that ``--json`` prints. docs/reference/command.md describes its keys."""
    return {
        "format": FORMAT,
        "problems": problems(findings),
        "findings": [
            {"check": one.check, "state": one.state, "what": one.what, "advice": one.advice or None} for one in findings
        ],
    }


def _wrap(words: str, head: str) -> str:
    # Do not break long words such as paths and ids, so that they can be copied.
    return textwrap.fill(
        words,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
