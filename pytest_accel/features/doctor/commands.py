"""The commands ``info`` and ``doctor`` of ``python -m pytest_accel``, and the doctor's findings as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from pytest_accel.features.doctor import info
from pytest_accel.features.doctor.checks import Finding, check
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

FORMAT = 1
"""Version of the JSON document. Increased when a key is removed or changes its meaning, not when one is added."""
_WIDTH = 110


def problems(findings: Sequence[Finding]) -> int:
    """Return the number of problems."""
    return sum(finding.state == "problem" for finding in findings)


def findings_text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding with its advice below, and the counts at the end."""
    lines = []
    for finding in findings:
        head = f"{finding.state:<9}{finding.check:<10}"
        lines.append(_wrap(finding.what, head))
        if finding.advice:
            lines.append(_wrap(finding.advice, " " * len(head) + "-> "))
    notes = sum(finding.state == "note" for finding in findings)
    return "\n".join([*lines, f"{_count(problems(findings), 'problem')}, {_count(notes, 'note')}"])


def findings_json(findings: Sequence[Finding]) -> dict[str, object]:
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


def show_info(settings: Settings, *, as_json: bool) -> int:
    facts = info.look(machine_for(settings))
    print(json.dumps(info.as_json(facts), indent=2) if as_json else info.table(facts))
    return 0


def show_findings(settings: Settings, *, as_json: bool) -> int:
    findings = check(settings)
    print(json.dumps(findings_json(findings), indent=2) if as_json else findings_text(findings))
    return 1 if problems(findings) else 0


COMMANDS = {"info": show_info, "doctor": show_findings}
