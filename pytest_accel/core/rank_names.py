"""Names of ranks and of their process groups, in messages, in records and before lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_GROUP = "default_pg"
"""torch's description of the default process group, used here as the group's name."""


def line_prefix(rank: int, ranks: int) -> str:
    """Return the text before each line that `rank` has written; empty in a world of one rank."""
    return f"[rank {rank}] " if ranks > 1 else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the text for `ranks`: ``rank 1``, ``ranks 0-3`` or ``ranks 0, 2, 5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def recorded_group(entry: Mapping[str, Any]) -> str:
    """Return the name of the group in which torch's flight recorder has recorded the collective `entry`.

    The description of all groups but the default group is ``undefined``, unless the test has given a description.
    """
    name, description = entry["process_group"]
    return DEFAULT_GROUP if description == DEFAULT_GROUP else str(name)


def group_label(name: str) -> str:
    """Return the text by which a message refers to the process group `name`."""
    return "the default process group" if name == DEFAULT_GROUP else f"process group {name}"
