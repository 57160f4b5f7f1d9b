"""Conditions on what tests need, as ``--accel-select`` has them: ``devices >= 2 and kind == 'cuda'``.

Python evaluates the text. Of its grammar only comparisons, ``and``, ``or``, ``not`` and parentheses are allowed, and
only the words of :class:`~pytest_accel.core.needs.Needs`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from pytest_accel.core.kinds import check_kind
from pytest_accel.core.needs import Needs
from pytest_accel.core.units import parse_memory
from pytest_accel.settings.option_types import ExplainedError

Condition = Callable[[Needs], bool]
_WORDS = ("devices", "world_size", "ranks_per_node", "nodes", "kind", "memory", "backend", "share", "marked", "fits")
_TRUTHS = ("marked", "fits")
_EXAMPLES = {"kind": "kind == 'cuda'", "backend": "backend == 'nccl'", "memory": "memory >= '40GiB'"}
_GRAMMAR = (
    ast.Expression,
    ast.BoolOp,
    ast.boolop,
    ast.UnaryOp,
    ast.Not,
    ast.Compare,
    ast.cmpop,
    ast.Name,
    ast.Constant,
)
_LISTS = (ast.Tuple, ast.List)


class SelectError(ExplainedError):
    """Raised for a text that is no condition. The message shows the text, marks the wrong place and says why."""

    def __init__(self, text: str, start: int, end: int, why: str) -> None:
        """The wrong place is `text[start:end]`."""
        mark = " " * start + "^" * max(1, end - start)
        super().__init__(f"{why}\n    {text}\n    {mark}")


def parse(text: str) -> Condition:
    """Return the condition that `text` describes. Raise :class:`SelectError` if it describes none."""
    line = " ".join(text.split())
    try:
        tree = ast.parse(line, mode="eval")
        code = compile(tree, "--accel-select", "eval")
    except SyntaxError as error:
        start = max(0, min(error.offset or 1, len(line) + 1) - 1)
        end = error.end_offset or 0
        why = "write == to compare" if line[start : start + 1] == "=" else error.msg
        raise SelectError(line, start, min(end, len(line) + 1) - 1, why) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise SelectError(line, 0, len(line), f"Python cannot parse it: {error}") from None
    for node, why in _errors(tree):
        # The parser counts bytes of UTF-8; operators have no place of their own.
        columns = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None)
        start, end = (len(line.encode()[:column].decode()) for column in columns)
        raise SelectError(line, start, end, why)
    return lambda needs: bool(eval(code, {"__builtins__": {}}, _namespace(needs)))


class _Word:
    """A word of a test's needs, which can be compared with a value of its type."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def other(self, other: object) -> Any:
        """Return the value of the other side of a comparison; raise ValueError or TypeError if it has another type."""
        is_text = self.name in ("kind", "backend")
        if isinstance(other, _Word):
            if self.name != other.name and (is_text or other.name in ("kind", "backend")):
                raise TypeError(f"{self.name} and {other.name} cannot be compared")
            return other.value
        if self.name == "memory" and isinstance(other, str):
            return parse_memory(other)
        if not isinstance(other, str if is_text else (int, float)):
            raise TypeError(
                f"{self.name} is compared otherwise, as in: {_EXAMPLES.get(self.name, f'{self.name} >= 2')}"
            )
        if self.name == "kind" and other != "none":
            check_kind(str(other))
        return str(other).lower() if self.name == "backend" else other

    def __eq__(self, other: object) -> bool:
        """Return whether the values are equal; a test's backends equal the name of each of them."""
        value = self.other(other)
        is_one_of = isinstance(self.value, tuple) and not isinstance(value, tuple)
        return bool(value in self.value if is_one_of else self.value == value)

    def _ordered(self, other: object, compare: Callable[[Any, Any], bool]) -> bool:
        if self.name in ("kind", "backend"):
            raise TypeError(f"{self.name} is compared with ==, !=, in and not in")
        return compare(self.value, self.other(other))

    def __lt__(self, other: object) -> bool:
        return self._ordered(other, operator.lt)

    def __le__(self, other: object) -> bool:
        return self._ordered(other, operator.le)

    def __gt__(self, other: object) -> bool:
        return self._ordered(other, operator.gt)

    def __ge__(self, other: object) -> bool:
        return self._ordered(other, operator.ge)


def _namespace(needs: Needs) -> dict[str, Any]:
    return {word: getattr(needs, word) if word in _TRUTHS else _Word(word, getattr(needs, word)) for word in _WORDS}


def _errors(tree: ast.Expression) -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes that a condition cannot have, each with the reason; compare the sides of each comparison once."""
    conditions: list[ast.expr] = [tree.body]
    names = _namespace(Needs())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in _WORDS:
            allowed = f"allowed are {', '.join(_WORDS)}; text is put in quotes"
            yield node, f"{node.id} is no word of a test's needs; {allowed}"
        elif not isinstance(node, (*_GRAMMAR, *_LISTS, ast.expr_context)) or isinstance(node, (ast.Is, ast.IsNot)):
            yield node, "not allowed here; a condition compares what a test needs: devices >= 2 and kind == 'cuda'"
        conditions += getattr(node, "values", ()) if isinstance(node, ast.BoolOp) else ()
        conditions += [node.operand] if isinstance(node, ast.UnaryOp) else []
    for node in conditions:
        if not isinstance(node, (ast.BoolOp, ast.UnaryOp, ast.Compare)) and getattr(node, "id", None) not in _TRUTHS:
            word = getattr(node, "id", "a value")
            yield node, f"{word} alone is no condition, as in: {_EXAMPLES.get(word, f'{word} >= 2')}"
    for compare in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = [compare.left, *compare.comparators]
        for left, op, right in zip(sides, compare.ops, sides[1:], strict=False):
            is_list = isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, _LISTS)
            for one in right.elts if is_list and isinstance(right, _LISTS) else [right]:
                single = ast.Compare(left, [ast.Eq() if is_list else op], [one])
                try:
                    eval(
                        compile(ast.fix_missing_locations(ast.Expression(single)), "", "eval"),
                        {"__builtins__": {}},
                        names,
                    )
                except (TypeError, ValueError) as error:
                    yield compare, str(error)
