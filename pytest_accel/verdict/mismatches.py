"""Comparison of the ranks' last messages of a test: collectives, process groups and messages. Pure functions.

Operations on one channel, and with one tag, meet in the order in which they were issued. So it is enough to compare
numbers: those beyond the smaller one are without a counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct

from pytest_accel.core.rank_messages import CallSite, Channel, Finished, GroupMessages
from pytest_accel.core.rank_names import DEFAULT_GROUP

_NO_MESSAGES = GroupMessages({})


class UnequalCollectives(Struct, frozen=True):
    """The ranks issued different numbers of collectives in a process group."""

    detail: ClassVar[str] = "collectives"
    """The `Cause.detail` of a failure for this."""
    group: str
    """Name of the group, or `DEFAULT_GROUP`."""
    members: tuple[int, ...]
    numbers: Mapping[int, int]
    """By rank: the number since the group was made."""


class UnequalGroups(Struct, frozen=True):
    """The ranks made different numbers of process groups."""

    detail: ClassVar[str] = "process groups"
    numbers: Mapping[int, int]
    """By rank."""


class UnmetMessages(Struct, frozen=True):
    """Messages that were sent and not received, or awaited and not sent."""

    detail: ClassVar[str] = "messages"
    number: int
    """The number of messages that were not received; negative: of those that `receiver` awaits."""
    receiver: int
    senders: tuple[int, ...]
    """The ranks that have sent them, or should have; empty if the receiver awaits a message of any rank."""
    group: str
    place: CallSite
    """The place of the last operation."""


Mismatch = UnequalCollectives | UnequalGroups | UnmetMessages


class Unawaited(Struct, frozen=True):
    """A collective for which a test has not waited, and that did not succeed, in some ranks."""

    ranks: tuple[int, ...]
    place: CallSite
    error: str | None
    """First line of the error; None: it has not completed."""


class _Operations(Struct):
    """The operations of some ranks on channels that lead to one rank, in one direction."""

    issued: int = 0
    """Number since the group was made."""
    by_tag: Counter[int] = Counter()
    """Number of the test's operations."""
    places: dict[int, CallSite] = {}
    """Place of the last operation with each tag."""
    unclear: bool = False
    """True if the numbers do not tell which operations have met."""

    def __add__(self, other: _Operations) -> _Operations:
        return _Operations(
            self.issued + other.issued,
            self.by_tag + other.by_tag,
            self.places | other.places,
            self.unclear or other.unclear,
        )


class _Receiver:
    """The operations in one group that lead to one rank."""

    def __init__(self, rank: int, members: Sequence[int], ranks: Mapping[int, GroupMessages]) -> None:
        """`ranks` are the operations of each rank of the group."""
        self.rank = rank
        self.sent = {one: _on(ranks[one], (False, members.index(rank))) for one in sorted(ranks)}
        """By sender."""
        self.received = {one: _on(ranks[rank], (True, members.index(one))) for one in sorted(ranks)}
        """By sender, without the operations that receive from any rank."""
        self.from_any = _on(ranks[rank], (True, None))

    @property
    def total(self) -> tuple[_Operations, _Operations]:
        """All messages that were sent and received."""
        return sum(self.sent.values(), _Operations()), sum(self.received.values(), self.from_any)

    @property
    def is_pending(self) -> bool:
        """True if messages are still on their way, or are awaited."""
        pairs = [self.total] if self.from_any.issued else zip(self.sent.values(), self.received.values(), strict=True)
        return any(not (one.unclear or other.unclear) and one.issued != other.issued for one, other in pairs)

    def unmet(self, group: str) -> Iterator[UnmetMessages]:
        """Yield the messages of the test without a counterpart; `group` is the group's name."""
        for sender, sent in self.sent.items():
            for number, place in _differences(sent, self.received[sender]):
                if number < 0 or not self.from_any.issued:
                    yield UnmetMessages(number, self.rank, (sender,), group, place)
        for number, place in _differences(*self.total) if self.from_any.issued else ():
            senders = [one for one, sent in self.sent.items() if sent.by_tag] if number > 0 else ()
            yield UnmetMessages(number, self.rank, tuple(senders), group, place)


def compare_collectives(finished: Mapping[int, Finished]) -> list[UnequalCollectives]:
    """Return the process groups in which the ranks issued different numbers of collectives."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, left in finished.items():
        for name, (members, number) in left.collectives.items():
            if number is not None:
                groups.setdefault((name, members), {})[rank] = number
    return [
        UnequalCollectives(name, members, numbers)
        for (name, members), numbers in groups.items()
        if len(set(numbers.values())) > 1
    ]


def compare_groups(finished: Mapping[int, Finished]) -> list[UnequalGroups]:
    """Return the numbers of process groups that the ranks made in the test; nothing if all are equal."""
    numbers = {rank: left.groups_by_test for rank, left in finished.items()}
    return [UnequalGroups(numbers)] if len(set(numbers.values())) > 1 else []


def have_different_groups(finished: Mapping[int, Finished]) -> bool:
    """Return whether some ranks have a process group that others should have, too, or that changes the next names.

    torch numbers groups in all ranks, and derives the names of those that only their members make from their number.
    """
    held: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank, left in finished.items():
        for name, (members, _) in left.collectives.items():
            held.setdefault((name, members), set()).add(rank)
    return any(
        not ranks >= finished.keys() & (members if name == DEFAULT_GROUP or name.isdigit() else finished.keys())
        for (name, members), ranks in held.items()
    )


def unmet_messages(finished: Mapping[int, Finished]) -> list[UnmetMessages]:
    """Return the messages of the test that were sent and not received, or awaited and not sent."""
    return [unmet for name, receiver in _receivers(finished) for unmet in receiver.unmet(name)]


def unawaited_collectives(finished: Mapping[int, Finished]) -> list[Unawaited]:
    """Return the collectives of the test that it has not waited for, and that did not succeed."""
    ranks: dict[tuple[CallSite, str | None], list[int]] = {}
    for rank, left in sorted(finished.items()):
        for one in left.unawaited:
            error = None if one.error is None else one.error.strip().partition("\n")[0]
            ranks.setdefault((one.place, error), []).append(rank)
    return [Unawaited(tuple(waiting), place, error) for (place, error), waiting in ranks.items()]


def are_pending(finished: Mapping[int, Finished]) -> bool:
    """Return whether messages, also those of wider fixtures, are still on their way, or are awaited."""
    return any(receiver.is_pending for _, receiver in _receivers(finished))


def _receivers(finished: Mapping[int, Finished]) -> Iterator[tuple[str, _Receiver]]:
    """Yield the name of each group with each of its ranks."""
    if not any(left.messages for left in finished.values()):
        return
    groups = {(name, members) for left in finished.values() for name, (members, _) in left.collectives.items()}
    for name, members in sorted(groups):
        # A rank that has destroyed the group has left nothing in it.
        ranks = {
            rank: left.messages.get(name, _NO_MESSAGES)
            for rank, left in finished.items()
            if left.collectives.get(name, ((), 0))[0] == members
        }
        for rank in sorted(ranks):
            yield name, _Receiver(rank, members, ranks)


def _on(messages: GroupMessages, channel: Channel) -> _Operations:
    """Return the operations on one channel."""
    counts = [one for one in messages.by_test if one.channel == channel]
    return _Operations(
        messages.issued.get(channel, 0),
        Counter({one.tag: one.number for one in counts}),
        {one.tag: one.place for one in counts},
        channel in messages.failed or channel in messages.shared,
    )


def _differences(sent: _Operations, received: _Operations) -> Iterable[tuple[int, CallSite]]:
    """Return how many messages were sent and not received, for each tag where this is not 0, and the last place.

    A negative number is that of operations which wait for a message.
    """
    if sent.unclear or received.unclear:
        return
    numbers = {tag: sent.by_tag[tag] - received.by_tag[tag] for tag in {**sent.places, **received.places}}
    rest = sent.issued - received.issued
    by_test = sum(numbers.values())
    if rest != by_test:
        # Wider fixtures have left messages, with tags that are not known. The test may have taken some of them.
        if rest * by_test <= 0:
            return
        tag = max(numbers, key=lambda one: numbers[one] * by_test)
        numbers = {tag: min(abs(rest), abs(by_test)) * (1 if rest > 0 else -1)}
    for tag, number in numbers.items():
        if number:
            yield number, (sent if number > 0 else received).places[tag]
