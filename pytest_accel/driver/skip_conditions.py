"""Conditions on what only ranks have, such as RANK and WORLD_SIZE, by which tests are skipped outside of ranks.

A suite that was run by ``torchrun -m pytest`` skips its tests where these variables are not set. pytest's own process
has none of them, so such tests would be skipped for ever, and nobody would notice. Conditions of marks are left to the
ranks (`item_hooks.py`). This module finds the others in the source: of files that skip themselves, and of hooks.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from os.path import relpath
from pathlib import Path

from pytest_accel.core.source_files import text_of

_OF_RANKS = re.compile(
    r"\b((?:LOCAL_|GROUP_|NODE_|ROLE_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+"
    r"|PMI_(?:RANK|SIZE)|SLURM_(?:PROCID|NTASKS)|COMM_WORLD|is_torchelastic_launched|get_world_size|get_rank)\b"
)
"""Matches variables that launchers set for each process, and functions that depend on them."""
_STATEMENT = re.compile(r"(?!elif\b|else\b|except\b|finally\b)[\w@]")
"""Matches the first line of a statement at the top of a file."""
_DEFINITION = re.compile(r"(?:def\s+)?(\w+)\s*[=:(]")
ADVICE = (
    "Only ranks have these, and pytest's own process has evaluated the conditions. Delete them, since the mark makes "
    "the ranks, or move them into a mark skipif or a fixture, which ranks evaluate."
)


@cache
def mentions_ranks(path: str) -> bool:
    """Return whether the text of the file `path` has a name of something that only ranks have."""
    return _OF_RANKS.search(text_of(Path(path))) is not None


def condition_of(longrepr: object, root: Path) -> str | None:
    """Return the place of a skip, relative to `root`, and what only ranks have, if the skip depends on that; else None.

    `longrepr` is that of the report. A skip depends on what its statement, at the top of the file, has before its line,
    and on the variables and functions of the file that this names: ``size = int(os.environ["WORLD_SIZE"])``.
    """
    if not isinstance(longrepr, tuple) or not mentions_ranks(longrepr[0]):
        return None
    path, line, _ = longrepr
    lines = text_of(Path(path)).splitlines()
    begins = [at for at, text in enumerate(lines) if _STATEMENT.match(text)]
    own = max((at for at in begins if at < line), default=0)
    before = "\n".join(lines[own:line])
    found = _OF_RANKS.search(before)
    for begin, end in pairwise((*begins, len(lines))):
        definition = _DEFINITION.match(lines[begin])
        if found is None and begin != own and definition and re.search(rf"\b{definition[1]}\b", before):
            found = _OF_RANKS.search("\n".join(lines[begin:end]))
    return None if found is None else f"{relpath(path, root)}:{line}: {found[0]}"
