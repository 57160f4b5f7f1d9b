"""Plugins that cannot run marked tests, or not with some of their options, and have no bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest


class Refusal(NamedTuple):
    """A use of a plugin that is refused in a session with marked tests."""

    plugin: str
    """The name under which the plugin is registered."""
    applies: Callable[[pytest.Config], bool]
    """Tells from the options whether the session uses what is refused."""
    text: str
    """One line: what cannot work, and what to do."""


REFUSALS: tuple[Refusal, ...] = ()


def refusals(config: pytest.Config) -> Iterator[str]:
    """Give the text of each refusal that applies to the session."""
    for refusal in REFUSALS:
        if config.pluginmanager.has_plugin(refusal.plugin) and refusal.applies(config):
            yield refusal.text
