"""What ranks that live and do not come to an end are at: their stacks, and the collectives that they wait in."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_accel.worlds.autopsy import take_stacks, where
from pytest_accel.worlds.collectives import account, read_record
from pytest_accel.worlds.files import flight_path, stack_path
from pytest_accel.worlds.flight import take_records
from pytest_accel.worlds.stacks import STACK_SIGNAL


def stacks_of(directory: str, world: int, pids: Mapping[int, int]) -> dict[int, str]:
    """As `take_stacks`, of the ranks `pids` of world number `world` of the session in `directory`."""
    paths = {rank: stack_path(directory, world, rank) for rank in pids}
    return take_stacks(dict(pids), paths, STACK_SIGNAL)


def collectives_of(directory: str, world: int, pids: Mapping[int, int], stacks: Mapping[int, str]) -> list[str]:
    """Lines as `account` has them.

    Ranks that wait for nobody belong among `pids`, too: it may be they who have not come.
    """
    paths = {rank: flight_path(directory, world, rank) for rank in pids}
    records = {rank: read_record(record) for rank, record in take_records(pids, paths).items()}
    return account(records, {rank: where(stack) for rank, stack in stacks.items()})
