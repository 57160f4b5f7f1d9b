"""Tests of the mark `needs`: its arguments, and the leases that follow from them."""

from __future__ import annotations

import pytest

from pytest_accel.core.marks import MarkError
from pytest_accel.features.resources import leases
from pytest_accel.hardware.inventory import PretendedMachine

GIB = 2**30
MACHINE = PretendedMachine(0, "sim", {"license": 2, "port-9000": 1, "memory": 101 * GIB, "cores": 4})
"""The devices of its memory are 2 GiB each."""


def needs(*args: object, **kwargs: object) -> pytest.Mark:
    """Return the mark as a suite has it; this project does not register it."""
    mark = pytest.mark.long(*args, **kwargs).mark
    object.__setattr__(mark, "name", "needs")
    return mark


def counts(*marks: pytest.Mark) -> list[tuple[str, int]]:
    """Return the kind and the number of devices of each lease of a test with these `marks`, in their order."""
    return [(key.kind, key.need.count) for key in leases(marks, MACHINE).keys if key.need is not None]


def test_each_name_counts_once_with_the_most_that_any_mark_gives_and_leases_are_in_one_order() -> None:
    marks = needs("port-9000", {"license": 1}), needs(license=2), needs("license", cores=2)
    assert counts(*marks) == [("cores", 2), ("license", 2), ("port-9000", 1)]
    assert leases(marks, MACHINE).missing is None


def test_memory_is_rounded_up_to_its_devices() -> None:
    assert counts(needs(memory="8GiB"), needs(memory=20)) == [("memory", 4)]
    assert counts(needs(memory=8 * GIB + 1)) == [("memory", 5)]
    assert len(MACHINE.of("memory").devices) == 50


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        (needs(), "needs(): needs at least one of license, port-9000, memory, cores"),
        (needs({}), "needs({}): needs at least one of license, port-9000, memory, cores"),
        (
            needs("licence"),
            "needs('licence'): there is no resource 'licence' in accel_resources, allowed are license, port-9000, "
            "memory, cores",
        ),
        (needs(license=0), "needs(license=0): license must be an int >= 1, got 0"),
        (needs(cores=True), "needs(cores=True): cores must be an int >= 1, got True"),
        (needs({"port-9000": "1"}), "needs({'port-9000': '1'}): port-9000 must be an int >= 1, got '1'"),
        (
            needs("memory"),
            "needs('memory'): memory must be a positive size such as \"8GiB\", a positive int of bytes, got None",
        ),
        (
            needs(["license"]),
            "needs(['license']): there is no resource ['license'] in accel_resources, allowed are license, port-9000, "
            "memory, cores",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(mark: pytest.Mark, error: str) -> None:
    with pytest.raises(MarkError) as caught:
        leases((mark,), MACHINE)
    assert str(caught.value) == f"@pytest.mark.{error}"
