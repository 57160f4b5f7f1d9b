"""The commands ``info`` and ``doctor`` of ``python -m pytest_accel``, and the doctor's findings as text and as JSON."""

from __future__ import annotations

import json
import textwrap

from pytest_accel.core.units import count_text
from pytest_accel.features.doctor import info
from pytest_accel.features.doctor.checks import check
from pytest_accel.settings.options import Settings, machine_for


def show_info(settings: Settings, *, as_json: bool) -> int:
    machine = machine_for(settings)
    document = info.look(machine)
    print(json.dumps(document, indent=2) if as_json else info.table(machine, document))
    return 0


def show_findings(settings: Settings, *, as_json: bool) -> int:
    """Print a line for each finding with its advice below, and the counts at the end.

    docs/reference/command.md describes the keys of the JSON document.
    """
    findings = check(settings)
    problems, notes = (sum(one.state == state for one in findings) for state in ("problem", "note"))
    if as_json:
        entries = [{**one._asdict(), "advice": one.advice or None} for one in findings]
        print(json.dumps({"format": info.FORMAT, "problems": problems, "findings": entries}, indent=2))
        return 1 if problems else 0
    for one in findings:
        for head, text in ((f"{one.state:<9}{one.check:<10}", one.what), (" " * 19 + "-> ", one.advice)):
            if text:  # Long words such as paths and ids are not broken, so that they can be copied.
                wrapped = textwrap.wrap(text, 110 - len(head), break_long_words=False, break_on_hyphens=False)
                print(head + ("\n" + " " * len(head)).join(wrapped))
    print(f"{count_text(problems, 'problem')}, {count_text(notes, 'note')}")
    return 1 if problems else 0


COMMANDS = {"info": show_info, "doctor": show_findings}
