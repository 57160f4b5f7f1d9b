"""Conditions on what tests need, as ``--accel-select`` has them: ``devices >= 2 and kind == 'cuda'``.

Python evaluates the text. Of its grammar only comparisons, ``and``, ``or``, ``not`` and parentheses are allowed, and
only the words of :class:`~pytest_accel.core.world_key.Needs`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import pairwise

from pytest_accel.core.kinds import check_kind
from pytest_accel.core.units import parse_memory
from pytest_accel.core.world_key import Needs

Condition = Callable[[Needs], bool]
_EXAMPLES = {"kind": "kind == 'cuda'", "backend": "backend == 'nccl'", "memory": "memory >= '40GiB'"}


class ExplainedError(ValueError):
    """Raised for a setting that is not allowed, with a message that shows the value and says what is allowed.

    For a condition, the message says why it is none, and marks the wrong place in its text.
    """


class _Backends(tuple[str, ...]):
    """The backends of a test: equal to the name of each of them."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return other in tuple(self)

    def __ne__(self, other: object) -> bool:
        return other not in tuple(self)


def parse(text: str) -> Condition:
    """Return the condition that `text` describes. Raise :class:`ExplainedError` if it describes none."""
    line = " ".join(text.split())
    try:
        tree = ast.parse(line, mode="eval")
        _check(tree.body)
        code = compile(tree, "--accel-select", "eval")
    except SyntaxError as error:
        start = max(0, min(error.offset or 1, len(line) + 1) - 1)
        why = "write == to compare" if line[start : start + 1] == "=" else error.msg
        raise ExplainedError(f"{why}\n    {line}\n    {' ' * start}^") from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise ExplainedError(f"Python cannot parse it: {error}\n    {line}\n    ^") from None
    return lambda needs: bool(
        eval(code, {"__builtins__": {}}, {**needs._asdict(), "backend": _Backends(needs.backend)})
    )


def _check(node: ast.expr) -> None:
    """Raise SyntaxError unless `node` is a condition, and convert the values with which it compares words."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand)
    elif isinstance(node, ast.Compare):
        for op, (left, right) in zip(node.ops, pairwise((node.left, *node.comparators)), strict=True):
            is_in = isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, (ast.Tuple, ast.List))
            for one in right.elts if is_in and isinstance(right, (ast.Tuple, ast.List)) else [right]:
                _check_pair(left, op, one, is_equality=is_in or isinstance(op, (ast.Eq, ast.NotEq)))
    elif not isinstance(node, ast.Name) or _word(node) not in ("marked", "fits"):
        word = getattr(node, "id", "")
        alone = f"{word} alone is no condition, as in: {_EXAMPLES.get(word, f'{word} >= 2')}"
        _fail(node, alone if word else "a condition compares what a test needs: devices >= 2 and kind == 'cuda'")


def _check_pair(left: ast.expr, op: ast.cmpop, right: ast.expr, *, is_equality: bool) -> None:
    words = [_word(side) for side in (left, right) if isinstance(side, ast.Name)]
    texts = [word in ("kind", "backend") for word in words]
    if not all(isinstance(side, (ast.Name, ast.Constant)) for side in (left, right)):
        _fail(left, "a condition compares what a test needs: devices >= 2 and kind == 'cuda'")
    if any(texts) and (not is_equality or (len(words) > 1 and words[0] != words[1])):
        _fail(left, f"{' and '.join(words)} is compared with ==, !=, in and not in, and with text")
    if isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(op, (ast.In, ast.NotIn)) and not is_equality):
        _fail(left, "write == to compare, or in with a list such as ('cuda', 'rocm')")
    for word, side in ((word, side) for word in words for side in (left, right) if isinstance(side, ast.Constant)):
        try:
            if word == "memory" and isinstance(side.value, str):
                side.value = parse_memory(side.value)
            if word == "kind" and isinstance(side.value, str) and side.value != "none":
                check_kind(side.value)
            elif word == "backend" and isinstance(side.value, str):
                side.value = side.value.lower()
        except ValueError as error:
            _fail(side, str(error))
        if not isinstance(side.value, str if texts[0] else (int, float)):
            _fail(left, f"{word} is compared otherwise, as in: {_EXAMPLES.get(word, f'{word} >= 2')}")


def _word(node: ast.Name) -> str:
    if node.id not in Needs._fields:
        allowed = ", ".join(Needs._fields)
        _fail(node, f"{node.id} is no word of a test's needs; allowed are {allowed}; text is put in quotes")
    return node.id


def _fail(node: ast.expr, why: str) -> None:
    # The parser counts bytes of UTF-8.
    offset = node.col_offset
    raise SyntaxError(why, ("", 1, offset + 1, ""))
