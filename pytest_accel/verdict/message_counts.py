"""Comparison of the messages that the ranks have sent and received in a test, and collectives left. Pure functions.

Operations on one channel, and with one tag, meet in the order in which they were issued. So it is enough to compare
numbers: those beyond the smaller one are without a counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from pytest_accel.core.frames import Folders
from pytest_accel.core.group_names import DEFAULT_GROUP, group_label
from pytest_accel.core.rank_messages import CallSite, Channel, Finished, GroupMessages
from pytest_accel.core.rank_names import ranks_text

_NO_MESSAGES = GroupMessages({})
_SHOWN = 8
"""Number of lines. In a large world, each rank may have left a message."""


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

    def lines(self, where: str, folders: Folders) -> list[str]:
        """Return the lines about the messages of the test without a counterpart; `where` names the group."""
        lines = []
        for sender, sent in self.sent.items():
            for number, place in _differences(sent, self.received[sender]):
                at = _at(place, folders)
                if number < 0:
                    who = f"rank {self.rank} waits for {_messages(-number)} from rank {sender}"
                    lines.append(f"{who} that rank {sender} did not send{where}: {at}")
                elif not self.from_any.issued:
                    who = f"rank {sender} sent {_messages(number)} to rank {self.rank}"
                    lines.append(f"{who} that rank {self.rank} did not receive{where}: {at}")
        for number, place in _differences(*self.total) if self.from_any.issued else ():
            at = _at(place, folders)
            if number < 0:
                lines.append(f"rank {self.rank} waits for {_messages(-number)} that no rank sent{where}: {at}")
            else:
                senders = ranks_text([one for one, sent in self.sent.items() if sent.by_tag])
                who = f"{senders} sent {_messages(number)} to rank {self.rank}"
                lines.append(f"{who} that rank {self.rank} did not receive{where}: {at}")
        return lines


def unmatched_messages(finished: Mapping[int, Finished], folders: Folders) -> list[str]:
    """Return lines about the messages of the test that were sent and not received, or awaited and not sent."""
    lines: list[str] = []
    for name, receiver in _receivers(finished):
        lines += receiver.lines("" if name == DEFAULT_GROUP else f" in {group_label(name)}", folders)
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"... and {more} more of this kind"]


def unawaited_collectives(finished: Mapping[int, Finished], folders: Folders) -> list[str]:
    """Return lines about the collectives of the test that it has not waited for, and that did not succeed."""
    ranks: dict[str, list[int]] = {}
    for rank, left in sorted(finished.items()):
        for one in left.unawaited:
            end = "has not completed" if one.error is None else f"failed: {one.error.strip().partition(chr(10))[0]}"
            ranks.setdefault(f"{_at(one.place, folders)}, for which the test did not wait, {end}", []).append(rank)
    return [f"{ranks_text(waiting)}: {line}" for line, waiting in ranks.items()]


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


def _messages(number: int) -> str:
    return f"{number} message{'s' if number > 1 else ''}"


def _at(place: CallSite, folders: Folders) -> str:
    return f"{place.function} at {folders.shown(place.path)}:{place.line}"
