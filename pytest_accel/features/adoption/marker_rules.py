"""Rules that give marks to tests by a pattern of node ids: the lines of the ini setting ``accel_rules``."""

from __future__ import annotations

import ast
import fnmatch
import re
from dataclasses import dataclass, replace

import pytest

from pytest_accel.core import marks

_FORM = "PATTERN: devices(...) or PATTERN: distributed(...), with a space after the colon and literal arguments"
_MARKS = ("devices", "distributed")
_LINE = re.compile(r"(?P<pattern>\S.*?):\s+(?P<call>\S.*)")


class RuleError(Exception):
    """Raised for a line that is not a rule. The message says what is wrong with it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the setting: a pattern, and the mark for the tests that it matches."""

    line: str
    pattern: str
    mark: pytest.MarkDecorator

    def by_name(self) -> Rule:
        """Return the rule with all arguments of its mark given by name."""
        named = marks.as_keywords(self.mark.mark)
        decorator: pytest.MarkDecorator = getattr(pytest.mark, named.name)
        return replace(self, mark=decorator.with_args(**named.kwargs))

    def matches(self, nodeid: str) -> bool:
        """Return True if the pattern matches the test `nodeid` or a folder, file or class that contains it."""
        return _matches_any(self.pattern, containing_ids(nodeid))

    def may_match_in(self, file: str) -> bool:
        """Return True if the rule may match tests in the file with the node id `file`."""
        return _matches_any(self.pattern.partition("::")[0], containing_ids(file))


def parse(lines: list[str]) -> tuple[Rule, ...]:
    """Return the rules in `lines`, in their order. Raise :class:`RuleError` for a line that is not a rule."""
    return tuple(_parse(line.strip()) for line in lines if line.strip())


def containing_ids(nodeid: str) -> list[str]:
    """Return the node ids of a test and of everything that contains it, from the outermost folder inwards.

    A parametrized test has two: without its parameters, and with them.
    """
    path, _, names = nodeid.partition("::")
    parts = path.split("/")
    nodes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    if names:
        words = names.partition("[")[0].split("::")  # The id of a parameter may contain any character.
        nodes += ["::".join([path, *words[:end]]) for end in range(1, len(words) + 1)]
        if nodes[-1] != nodeid:
            nodes.append(nodeid)
    return nodes


def _matches_any(pattern: str, nodes: list[str]) -> bool:
    # As in .gitignore files, a leading `**/` also matches no folder at all.
    patterns = (pattern, pattern.removeprefix("**/"))
    return any(node == pattern or fnmatch.fnmatchcase(node, each) for node in nodes for each in patterns)


def _parse(line: str) -> Rule:
    match = _LINE.fullmatch(line)
    if match is None:
        raise RuleError(f"{line!r}: must be {_FORM}")
    decorator = _parse_mark(line, match["call"])
    try:
        marks.check(decorator.mark)
    except marks.MarkError as error:
        raise RuleError(f"{line!r}: {error}") from None
    return Rule(line, match["pattern"].rstrip().removesuffix("/"), decorator)


def _parse_mark(line: str, text: str) -> pytest.MarkDecorator:
    """Return the mark in `text`; `line` is for error messages."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise RuleError(f"{line!r}: {text!r} is not a mark, must be {_FORM}") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    if name not in _MARKS:
        raise RuleError(f"{line!r}: the mark must be one of {', '.join(_MARKS)}, got {name!r}")
    arguments = [_parse_literal(line, argument) for argument in call.args]
    keywords = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise RuleError(f"{line!r}: each argument must be a literal, got '{ast.unparse(keyword)}'")
        keywords[keyword.arg] = _parse_literal(line, keyword.value)
    decorator: pytest.MarkDecorator = getattr(pytest.mark, name)
    return decorator.with_args(*arguments, **keywords)


def _parse_literal(line: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise RuleError(f"{line!r}: each argument must be a literal, got {ast.unparse(node)!r}") from None
