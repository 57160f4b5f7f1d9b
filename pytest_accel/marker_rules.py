"""Requirements by pattern, for tests whose files say nothing: the lines of the ini setting ``accel_rules``."""

from __future__ import annotations

import ast
import fnmatch
import re
from dataclasses import dataclass

import pytest

from pytest_accel import mark_arguments

_FORM = "PATTERN: devices(...) or PATTERN: distributed(...), with a blank after the colon and literal arguments"
_MARKS = ("devices", "distributed")
_LINE = re.compile(r"(?P<pattern>\S.*?):\s+(?P<call>\S.*)")


class RuleError(Exception):
    """A line that is no rule; the message says what is wrong with it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line: which tests, and the mark that they get."""

    line: str
    pattern: str
    mark: pytest.MarkDecorator

    def matches(self, nodeid: str) -> bool:
        """Whether the pattern names the test `nodeid`, or something that it is in."""
        return _names_one_of(self.pattern, nodes_of(nodeid))

    def may_match_in(self, file: str) -> bool:
        """Whether it may be about tests of the file whose id is `file`."""
        return _names_one_of(self.pattern.partition("::")[0], nodes_of(file))


def parse(lines: list[str]) -> tuple[Rule, ...]:
    """The rules that `lines` hold, in their order. Raises :class:`RuleError`."""
    return tuple(_parse(line.strip()) for line in lines if line.strip())


def nodes_of(nodeid: str) -> list[str]:
    """The ids of all that a test is in, from the outermost folder to the test with its parameters."""
    path, _, names = nodeid.partition("::")
    parts = path.split("/")
    nodes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    if names:
        words = names.partition("[")[0].split("::")  # A parameter's id may have any character in it.
        nodes += ["::".join([path, *words[:end]]) for end in range(1, len(words) + 1)]
        if nodes[-1] != nodeid:
            nodes.append(nodeid)
    return nodes


def _names_one_of(pattern: str, nodes: list[str]) -> bool:
    # As in .gitignore files, `**/` stands for no folder too.
    patterns = (pattern, pattern.removeprefix("**/"))
    return any(node == pattern or fnmatch.fnmatchcase(node, each) for node in nodes for each in patterns)


def _parse(line: str) -> Rule:
    found = _LINE.fullmatch(line)
    if found is None:
        raise RuleError(f"{line!r}: must be {_FORM}")
    decorator = _mark(line, found["call"])
    try:
        mark_arguments.check(decorator.mark)
    except mark_arguments.MarkError as error:
        raise RuleError(f"{line!r}: {error}") from None
    return Rule(line, found["pattern"].rstrip().removesuffix("/"), decorator)


def _mark(line: str, text: str) -> pytest.MarkDecorator:
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise RuleError(f"{line!r}: {text!r} is no call of a mark, must be {_FORM}") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    if name not in _MARKS:
        raise RuleError(f"{line!r}: the mark must be one of {', '.join(_MARKS)}, got {name!r}")
    arguments = [_literal(line, argument) for argument in call.args]
    keywords = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise RuleError(f"{line!r}: each argument must be a literal, got '{ast.unparse(keyword)}'")
        keywords[keyword.arg] = _literal(line, keyword.value)
    decorator: pytest.MarkDecorator = getattr(pytest.mark, name)
    return decorator.with_args(*arguments, **keywords)


def _literal(line: str, node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise RuleError(f"{line!r}: each argument must be a literal, got {ast.unparse(node)!r}") from None
