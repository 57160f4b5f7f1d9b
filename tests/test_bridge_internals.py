"""What bridges take of other plugins' internals is refused where it is absent."""

from __future__ import annotations

import pytest

from pytest_accel.bridges.internals import internals


def test_a_release_without_what_a_bridge_needs_is_refused() -> None:
    assert internals("plugin", "json.decoder", "JSONDecoder").JSONDecoder.__name__ == "JSONDecoder"
    with pytest.raises(pytest.UsageError, match=r"plugin: json.decoder of the installed release has no `Lost`"):
        internals("plugin", "json.decoder", "JSONDecoder", "Lost")
