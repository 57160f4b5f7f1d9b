"""The commands ``info`` and ``doctor`` of ``python -m pytest_accel``."""

from __future__ import annotations

import json

from pytest_accel.features import doctor
from pytest_accel.features.doctor import info
from pytest_accel.settings import options
from pytest_accel.settings.machine import machine_for


def show_info(settings: options.Settings, *, as_json: bool) -> int:
    facts = info.look(machine_for(settings))
    print(json.dumps(info.as_json(facts), indent=2) if as_json else info.table(facts))
    return 0


def show_findings(settings: options.Settings, *, as_json: bool) -> int:
    findings = doctor.examine(settings)
    print(json.dumps(doctor.as_json(findings), indent=2) if as_json else doctor.text(findings))
    return 1 if doctor.problems(findings) else 0


COMMANDS = {"info": show_info, "doctor": show_findings}
