"""What is installed, as far as pytest asks for it when a session starts: read once for all ranks.

pytest and its plugins read the metadata of every installed distribution two or three times a session, which is a third
of the time in which a rank starts, and more where more is installed. It does not change while a session runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from typing import Any


class _Remembered(metadata.PathDistribution):
    """A distribution whose files are read when they are first asked for, and then no more."""

    @cached_property
    def entry_points(self) -> Any:
        return super().entry_points

    @cached_property
    def metadata(self) -> Any:
        return super().metadata

    @cached_property
    def files(self) -> Any:
        return super().files


def _remembered(found: metadata.Distribution) -> metadata.Distribution:
    if type(found) is metadata.PathDistribution:
        found.__class__ = _Remembered
    return found


class Installed:
    """What has been read until now. Kept by the fork server, and so inherited by the ranks."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str], list[metadata.Distribution]] = {}
        """By what was asked for (None: all distributions) and the entry of `sys.path`."""

    @contextlib.contextmanager
    def remembered(self) -> Iterator[None]:
        """Within, whoever asks what is installed is told what is known. Not for tests, which may install something."""
        finder: Any = metadata.MetadataPathFinder
        original, own = finder.find_distributions, vars(finder)["find_distributions"]

        def find(context: Any = metadata.DistributionFinder.Context()) -> Iterator[metadata.Distribution]:  # noqa: B008
            for entry in context.path:
                if not os.path.isabs(entry):
                    # What it means depends on the working directory.
                    yield from original(metadata.DistributionFinder.Context(name=context.name, path=[entry]))
                    continue
                if (context.name, entry) not in self._known:
                    asked = metadata.DistributionFinder.Context(name=context.name, path=[entry])
                    self._known[context.name, entry] = [_remembered(found) for found in original(asked)]
                yield from self._known[context.name, entry]

        finder.find_distributions = staticmethod(find)
        try:
            yield
        finally:
            finder.find_distributions = own
