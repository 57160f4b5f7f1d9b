"""pytest-django: each rank has test databases of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from pytest_accel.features.plugins.rows import named
from pytest_accel.rank.context import RANK


def in_rank(config: pytest.Config) -> object:
    """Return the plugin that creates the databases of a rank."""
    context = config.stash[RANK]
    return _OwnDatabases(_add_suffix(), f"w{context.spec.world}r{context.rank}")


def in_driver(config: pytest.Config) -> None:
    """Raise an error for an unknown release."""
    _add_suffix()


def _add_suffix() -> Any:
    return named("pytest_django.fixtures", "_set_suffix_to_test_databases")


class _OwnDatabases:
    def __init__(self, add_suffix: Callable[[str], None], suffix: str) -> None:
        self._add_suffix = add_suffix
        self._suffix = suffix

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.argname == "django_db_modify_db_settings_xdist_suffix":
            result = yield
            self._add_suffix(self._suffix)  # pytest-django appends the name of an xdist worker in the same way.
            return result
        if fixturedef.argname != "django_db_setup":
            return (yield)
        # pytest-django creates the databases that `session.items` use; a rank has only some of the session's tests.
        items = request.session.items
        request.session.items = [*items, _UsesEverything()]  # type: ignore[list-item]
        try:
            return (yield)
        finally:
            request.session.items = items


class _UsesEverything:
    """A stand-in for a test that uses all databases, with serialized rollback."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return (
            pytest.mark.django_db(databases="__all__", serialized_rollback=True).mark if name == "django_db" else None
        )
