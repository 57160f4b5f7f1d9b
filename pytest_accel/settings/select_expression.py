"""Conditions on what tests need, as ``--accel-select`` has them: ``devices >= 2 and kind == 'cuda'``.

Python's own parser reads the text, and nothing in it is executed: of Python's grammar only comparisons, ``and``,
``or``, ``not`` and parentheses are allowed, and only the words of :class:`~pytest_accel.core.needs.Needs`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pytest_accel.core.kinds import check_kind
from pytest_accel.core.needs import Needs
from pytest_accel.core.units import parse_memory
from pytest_accel.settings.option_types import ExplainedError

Condition = Callable[[Needs], bool]
_Type = Literal["truth", "number", "size", "kind", "backend"]

_WORDS: dict[str, _Type] = {
    "devices": "number",
    "world_size": "number",
    "ranks_per_node": "number",
    "nodes": "number",
    "kind": "kind",
    "memory": "size",
    "backend": "backend",
    "share": "number",
    "marked": "truth",
    "fits": "truth",
}
_EXAMPLES: dict[_Type, str] = {
    "truth": "{0}, or: not {0}",
    "number": "{0} >= 2",
    "size": "{0} >= '40GiB'",
    "kind": "{0} == 'cuda'",
    "backend": "{0} == 'nccl'",
}
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


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
    except SyntaxError as error:
        start = max(0, min(error.offset or 1, len(line) + 1) - 1)
        end = error.end_offset or 0
        why = "write == to compare" if line[start : start + 1] == "=" else error.msg
        raise SelectError(line, start, min(end, len(line) + 1) - 1, why) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise SelectError(line, 0, len(line), f"Python cannot parse it: {error}") from None
    return _Parser(line).condition(tree.body)


class _Operand(NamedTuple):
    """One side of a comparison."""

    node: ast.expr
    word: str | None
    """The word of the test's needs; None for a value."""
    value: Any
    """The value that the text gives; None for a word."""


class _Parser:
    """Turns the nodes of one parsed text into conditions."""

    def __init__(self, text: str) -> None:
        self._text = text

    def condition(self, node: ast.expr) -> Condition:
        """Return the condition of `node`; raise :class:`SelectError` if it is none."""
        match node:
            case ast.BoolOp(op=combine, values=values):
                parts = [self.condition(value) for value in values]
                every = isinstance(combine, ast.And)
                return lambda needs: all(p(needs) for p in parts) if every else any(p(needs) for p in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                negated = self.condition(operand)
                return lambda needs: not negated(needs)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                sides = [left, *rights]
                links = [
                    self._comparison(one, op, other) for one, op, other in zip(sides[:-1], ops, rights, strict=True)
                ]
                return lambda needs: all(link(needs) for link in links)
            case ast.Name(id=word):
                if self._type(node, word) != "truth":
                    raise self._error(node, f"{word} alone is no condition, {_example(word)}")
                return lambda needs: bool(getattr(needs, word))
        raise self._error(
            node, "not allowed here; a condition compares what a test needs: devices >= 2 and kind == 'cuda'"
        )

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._membership(left, right, negated=isinstance(op, ast.NotIn))
        one, other = self._operand(left), self._operand(right)
        word = one.word or other.word
        if word is None:
            raise self._error(left, f"compares no word of a test's needs; allowed are {', '.join(_WORDS)}")
        kind = _WORDS[word]
        if one.word and other.word and _WORDS[one.word] != _WORDS[other.word]:
            raise self._error(right, f"{one.word} and {other.word} cannot be compared")
        if kind == "truth":
            raise self._error(left, f"{word} is true or false by itself, {_example(word)}")
        get_one, get_other = self._getter(one, word), self._getter(other, word)
        if isinstance(op, (ast.Eq, ast.NotEq)):
            equal = isinstance(op, ast.Eq)
            return lambda needs: _equals(get_one(needs), get_other(needs)) == equal
        compare = _ORDERS.get(type(op))
        if compare is None or kind in ("kind", "backend"):
            allowed = "==, !=, in and not in" + ("" if kind in ("kind", "backend") else ", <, <=, > and >=")
            raise self._error(left, f"{word} is compared with {allowed}")
        return lambda needs: compare(get_one(needs), get_other(needs))

    def _membership(self, left: ast.expr, right: ast.expr, *, negated: bool) -> Condition:
        """Return the condition of ``WORD in (VALUE, ...)``."""
        one = self._operand(left)
        if one.word is None or _WORDS[one.word] == "truth" or not isinstance(right, (ast.Tuple, ast.List)):
            raise self._error(right, "in is written with a word and values in parentheses: devices in (1, 2)")
        get = self._getter(one, one.word)
        values = [self._getter(self._operand(element), one.word) for element in right.elts]
        return lambda needs: any(_equals(get(needs), value(needs)) for value in values) != negated

    def _operand(self, node: ast.expr) -> _Operand:
        match node:
            case ast.Name(id=word):
                self._type(node, word)
                return _Operand(node, word, None)
            case ast.Constant(value=value) if isinstance(value, (int, float, str)) and not isinstance(value, bool):
                return _Operand(node, None, value)
        raise self._error(node, "not allowed here; a word is compared with a number or a text in quotes")

    def _getter(self, operand: _Operand, word: str) -> Callable[[Needs], Any]:
        """Return a function for the value of `operand`, which is compared with `word`."""
        if operand.word is not None:
            name = operand.word
            return lambda needs: getattr(needs, name)
        value = self._converted(operand, word)
        return lambda needs: value

    def _converted(self, operand: _Operand, word: str) -> Any:
        """Return the value of `operand` in the form that `word` has; raise :class:`SelectError` if it has another."""
        value, kind = operand.value, _WORDS[word]
        wrong = self._error(operand.node, f"{word} is compared otherwise, {_example(word)}")
        if kind == "size" and isinstance(value, str):
            try:
                return parse_memory(value)
            except ValueError as error:
                raise self._error(operand.node, str(error)) from None
        if isinstance(value, str) != (kind in ("kind", "backend")):
            raise wrong
        if kind == "kind" and value != "none":
            try:
                check_kind(value)
            except ValueError as error:
                raise self._error(operand.node, f"{error}, none") from None
        return value.lower() if kind == "backend" else value

    def _type(self, node: ast.expr, word: str) -> _Type:
        if word not in _WORDS:
            raise self._error(
                node, f"{word} is no word of a test's needs; allowed are {', '.join(_WORDS)}; text is put in quotes"
            )
        return _WORDS[word]

    def _error(self, node: ast.expr, why: str) -> SelectError:
        # The parser counts bytes of UTF-8.
        data = self._text.encode()
        start, end = (len(data[:column].decode()) for column in (node.col_offset, node.end_col_offset or 0))
        return SelectError(self._text, start, end, why)


def _equals(one: Any, other: Any) -> bool:
    """Return whether two values are equal; a test's backends equal the name of each of them."""
    for names, name in ((one, other), (other, one)):
        if isinstance(names, tuple) and not isinstance(name, tuple):
            return name in names
    return bool(one == other)


def _example(word: str) -> str:
    return f"as in: {_EXAMPLES[_WORDS[word]].format(word)}"
