"""Tests of the mark `needs`: its arguments, and the leases that follow from them."""

from __future__ import annotations

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.core.marks import MarkError
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.resources.needs_mark import Supply, leases, read

NAMES = ("license", "port-9000", "memory", "cores")
SUPPLY = Supply({"license": 2, "port-9000": 1, "memory": 4, "cores": 4}, 2 * 2**30)


def needs(*args: object, **kwargs: object) -> pytest.Mark:
    """Return the mark as a suite has it; this project does not register it."""
    mark = pytest.mark.long(*args, **kwargs).mark
    object.__setattr__(mark, "name", "needs")
    return mark


def test_each_name_counts_once_with_the_most_that_any_mark_gives() -> None:
    assert read([needs("license", {"port-9000": 1}), needs(license=2), needs("license", cores=2)], NAMES) == {
        "license": 2,
        "port-9000": 1,
        "cores": 2,
    }
    assert read([needs(memory="8GiB"), needs(memory=2**20)], NAMES) == {"memory": 2**33}


@pytest.mark.parametrize(
    ("mark", "error"),
    [
        (needs(), "needs(): needs at least one of license, port-9000, memory, cores"),
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
        read([mark], NAMES)
    assert str(caught.value) == f"@pytest.mark.{error}"


def test_leases_are_in_one_order_and_memory_is_rounded_up_to_its_parts() -> None:
    found = leases([needs("port-9000", cores=3, memory=3 * 2**30, license=2)], SUPPLY)
    assert [(key.kind, key.need and key.need.count, key.ranks) for key, _ in found.leases] == [
        ("license", 2, 1),
        ("memory", 2, 1),
        ("port-9000", 1, 1),
        ("cpu", None, 3),
    ]
    assert [text for _, text in found.leases] == ["2 license", "3 GiB of memory", "1 port-9000", "3 cores"]
    assert found.beside(WorldKey("sim", DeviceNeed(1), 1, grouped=True)) == found.beside(None) == found.leases
    assert found.beside(WorldKey("cpu", None, 2, grouped=True)) == found.leases[:3]
    assert found.missing is None


def test_all_that_is_missing_is_said() -> None:
    found = leases([needs({"port-9000": 2}, license=3, memory="9GiB", cores=5)], SUPPLY)
    assert found.missing == (
        "needs 3 license; there are 2; needs 9 GiB of memory; there is 8 GiB; needs 2 port-9000; there is 1; "
        "needs 5 cores; there are 4"
    )
    assert found.beside(None) == ()
