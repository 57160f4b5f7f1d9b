"""Names of ranks in messages and before lines."""

from __future__ import annotations

from collections.abc import Sequence


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
