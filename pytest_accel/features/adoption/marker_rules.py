"""Rules that give marks to tests by a pattern of node ids: the lines of the ini setting ``accel_rules``."""

from __future__ import annotations

import ast
import fnmatch
from itertools import accumulate
from typing import Any, NamedTuple

import pytest

from pytest_accel.core import marks
from pytest_accel.settings.options import ADOPT


class Rule(NamedTuple):
    """One line of the setting: a pattern, and the mark for the tests that it matches."""

    line: str
    pattern: str
    mark: pytest.MarkDecorator

    def matches(self, nodeid: str, *, as_file: bool = False) -> bool:
        """Return True if the pattern matches the test `nodeid` or a folder, file or class that contains it.

        With `as_file`, return True if it may match tests in the file with this node id.
        """
        pattern = self.pattern.partition("::")[0] if as_file else self.pattern
        path, _, names = nodeid.partition("::")
        words = names.partition("[")[0].split("::") if names else ()  # The id of a parameter may have any character.
        nodes = [*accumulate(path.split("/"), "{}/{}".format), *accumulate([path, *words], "{}::{}".format), nodeid]
        # As in .gitignore files, a leading `**/` also matches no folder at all.
        patterns = (pattern, pattern.removeprefix("**/"))
        return any(node == pattern or fnmatch.fnmatchcase(node, one) for node in nodes for one in patterns)


def parse(line: str) -> Rule:
    """Return the rule in `line`, with arguments by name, as ``-m`` compares them. Raise ValueError if it has none."""
    pattern, _, text = (part.strip() for part in line.partition(": "))
    try:
        call = ast.parse(text, mode="eval").body
        call = call if isinstance(call, ast.Call) else ast.Call(call, [], [])
        name = ast.unparse(call.func)
        if name == ADOPT and ast.unparse(call) == f"{ADOPT}(False)":
            return Rule(line, pattern.removesuffix("/"), getattr(pytest.mark, ADOPT)(False))
        if name not in ("devices", "distributed"):
            raise ValueError(name)
        named: dict[Any, Any] = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        decorator: pytest.MarkDecorator = getattr(pytest.mark, name)
        mark = decorator.with_args(*map(ast.literal_eval, call.args), **named).mark
        marks.check(mark)
    except marks.MarkError as error:
        raise ValueError(f"{line!r}: {error}") from None
    except (SyntaxError, ValueError, TypeError):
        form = (
            f"PATTERN: devices(...), PATTERN: distributed(...) or PATTERN: {ADOPT}(False), with a space after the "
            "colon and literal arguments"
        )
        raise ValueError(f"{line!r}: must be {form}") from None
    return Rule(line, pattern.removesuffix("/"), decorator.with_args(**marks.as_keywords(mark).kwargs))
