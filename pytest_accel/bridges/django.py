"""pytest-django: each rank has test databases of its own."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_accel.stash import RANK


def rank_plugin(config: pytest.Config) -> object:
    return _Rank(config)


class _Rank:
    def __init__(self, config: pytest.Config) -> None:
        context = config.stash[RANK]
        self._suffix = f"w{context.spec.world}r{context.rank}"

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.argname == "django_db_modify_db_settings_xdist_suffix":
            result = yield
            self._name_databases()
            return result
        if fixturedef.argname != "django_db_setup":
            return (yield)
        # The plugin makes the databases that the collected tests use, and of these a rank knows one at a time.
        items = request.session.items
        request.session.items = [*items, _UsesAllDatabases()]  # type: ignore[list-item]
        try:
            return (yield)
        finally:
            request.session.items = items

    def _name_databases(self) -> None:
        """Name the test databases by world and rank, as the plugin names them by xdist's worker."""
        from pytest_django import fixtures

        fixtures._set_suffix_to_test_databases(suffix=self._suffix)


class _UsesAllDatabases:
    """Stands for a test that uses all databases."""

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return pytest.mark.django_db(databases="__all__").mark if name == "django_db" else None
