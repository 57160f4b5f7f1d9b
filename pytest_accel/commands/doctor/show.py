"""The doctor's findings for people and for scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_accel.commands.doctor.checks import Finding

FORMAT = 1
"""Of the JSON document: it grows by one when a key goes away or changes its meaning, not when one is added."""
_WIDTH = 110


def problems(findings: Sequence[Finding]) -> int:
    """How many there are."""
    return sum(finding.state == "problem" for finding in findings)


def text(findings: Sequence[Finding]) -> str:
    """A line for each finding, what to do under it, and the count at the end."""
    lines = []
    for finding in findings:
        head = f"{finding.state:<9}{finding.check:<10}"
        lines.append(_wrap(finding.what, head))
        if finding.advice:
            lines.append(_wrap(finding.advice, " " * len(head) + "-> "))
    notes = sum(finding.state == "note" for finding in findings)
    return "\n".join([*lines, f"{_count(problems(findings), 'problem')}, {_count(notes, 'note')}"])


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """What ``--json`` prints; docs/reference/command.md tells what each key means."""
    return {
        "format": FORMAT,
        "problems": problems(findings),
        "findings": [
            {"check": one.check, "state": one.state, "what": one.what, "advice": one.advice or None} for one in findings
        ],
    }


def _wrap(words: str, head: str) -> str:
    # What is long, such as a path or an id, stays whole, to be copied.
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
