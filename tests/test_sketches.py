"""What crosses from a rank to its driver in place of an exception."""

from __future__ import annotations

import pytest

from pytest_accel.worlds.sketches import mark_repeated, sketch


class ExampleError(Exception):
    """Has an attribute of the same name as exception groups, which may be anything."""

    def __init__(self, exceptions: object) -> None:
        super().__init__("text")
        self.exceptions = self if exceptions is None else exceptions


@pytest.mark.parametrize("exceptions", [3, ["a"], ("a",), None, ()])
def test_an_attribute_of_a_users_exception_is_no_group(exceptions: object) -> None:
    found = sketch(ExampleError(exceptions))
    assert (found.text, found.peer, found.own) == ("text", None, False)


def test_a_group_repeats_what_all_its_errors_repeat() -> None:
    one, other = ExampleError(()), ExampleError(())
    mark_repeated(one, 1, own=True)
    assert sketch(ExampleError((one, other))).peer is None
    mark_repeated(other, 1)
    found = sketch(ExampleError((one, other)))
    assert (found.peer, found.own) == (1, False)
