"""Conditions on what only ranks have, such as RANK and WORLD_SIZE, by which tests are skipped outside of ranks.

A suite that was run by ``torchrun -m pytest`` skips its tests where these variables are not set. pytest's own process
has none of them, so such tests would be skipped for ever, and nobody would notice. Conditions of marks are left to the
ranks (`item_hooks.py`). This module finds other conditions, in the source of files that skip themselves and of hooks.
"""

from __future__ import annotations

import re
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_accel.core.source_files import text_of

if TYPE_CHECKING:
    import ast

_OF_RANKS = re.compile(
    r"\b((?:LOCAL_|GROUP_|NODE_|ROLE_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+"
    r"|PMI_(?:RANK|SIZE)|SLURM_(?:PROCID|NTASKS)|COMM_WORLD|is_torchelastic_launched|get_world_size|get_rank)\b"
)
"""Matches variables that launchers set for each process, and functions that depend on them."""
ADVICE = (
    "Only ranks have these, and pytest's own process has evaluated the conditions. Delete them, since the mark makes "
    "the ranks, or move them into a mark skipif or a fixture, which ranks evaluate."
)


@cache
def mentions_ranks(path: str) -> bool:
    """Return whether the text of the file `path` has a name of something that only ranks have."""
    return _OF_RANKS.search(text_of(Path(path))) is not None


def condition_of(longrepr: object, root: Path) -> str | None:
    """Return the place of a skip, relative to `root`, and the rank-only name on which it depends, or None.

    `longrepr` is the report's. Names are looked up in the whole file: ``size = int(os.environ["WORLD_SIZE"])``.
    """
    if not isinstance(longrepr, tuple) or not mentions_ranks(longrepr[0]):
        return None
    import ast

    path, line, _ = longrepr
    try:
        tree = ast.parse(text_of(Path(path)))
    except (SyntaxError, ValueError):
        return None
    meanings: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            meanings |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            meanings[node.name] = node
    found = (_of_ranks(condition, meanings) for node in ast.walk(tree) for condition in _conditions(node, line))
    name = next(filter(None, found), None)
    return None if name is None else f"{relpath(path, root)}:{line}: {name}"


def _conditions(node: ast.AST, line: int) -> list[ast.AST]:
    """Return the conditions in `node` on which a skip in `line` depends."""
    import ast

    if not getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0):
        return []
    if isinstance(node, (ast.If, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.Try):
        return list(node.body)  # The skip is in ``except KeyError``, for example.
    if isinstance(node, ast.FunctionDef):
        # The skip follows an early return.
        before = [one for one in node.body if isinstance(one, ast.If) and one.lineno < line]
        return [one.test for one in before if isinstance(one.body[-1], ast.Return)]
    return []


def _of_ranks(node: ast.AST, meanings: dict[str, ast.AST]) -> str | None:
    """Return a name that only ranks have, from the source of `node` or from the `meanings` of its names, or None."""
    import ast

    if (match := _OF_RANKS.search(ast.unparse(node))) is not None:
        return match[0]
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & meanings.keys()
    others = {name: meaning for name, meaning in meanings.items() if name not in names}
    return next(filter(None, (_of_ranks(meanings[name], others) for name in sorted(names))), None)
