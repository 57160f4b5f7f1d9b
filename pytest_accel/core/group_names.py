"""Names of process groups in messages."""

from __future__ import annotations

DEFAULT_GROUP = "default_pg"
"""torch's description of the default process group, used here as the group's name."""


def group_label(*names: str) -> str:
    """Return the text by which a message refers to the process groups `names`."""
    others = ", ".join(sorted(name for name in names if name != DEFAULT_GROUP))
    labels = ["the default process group"] if DEFAULT_GROUP in names else []
    if others:
        labels.append(f"process group{'s' if ', ' in others else ''} {others}")
    return " and ".join(labels)
