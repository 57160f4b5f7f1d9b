"""Names of process groups in messages and in records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_GROUP = "default_pg"
"""torch's description of the default process group, used here as the group's name."""


def recorded_group(entry: Mapping[str, Any]) -> str:
    """Return the name of the group in which torch's flight recorder has recorded the collective `entry`.

    The description of all other groups than the default one is ``undefined``, unless the test has given one.
    """
    name, description = entry["process_group"]
    return DEFAULT_GROUP if description == DEFAULT_GROUP else str(name)


def group_label(*names: str) -> str:
    """Return the text by which a message refers to the process groups `names`."""
    others = ", ".join(sorted(name for name in names if name != DEFAULT_GROUP))
    labels = ["the default process group"] if DEFAULT_GROUP in names else []
    if others:
        labels.append(f"process group{'s' if ', ' in others else ''} {others}")
    return " and ".join(labels)
