"""Tests of pytest-django: ranks have no databases."""

from __future__ import annotations

from tests.features.conftest import Suite
from tests.features.plugins.conftest import needs

pytestmark = needs("pytest_django")


def test_a_marked_test_cannot_use_a_database(suite: Suite) -> None:
    suite.without_torch()
    suite.plugin("pytest_django.plugin")
    suite.ini("DJANGO_SETTINGS_MODULE = project_settings\npythonpath = .")
    suite.write(
        "project_settings.py",
        """
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        SECRET_KEY = "not one"
        """,
    )
    suite.write(
        "test_shop.py",
        """
        import pytest
        from django.db import connection

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_marked(settings): assert settings.SECRET_KEY == "not one"

        @pytest.mark.devices(1, kind="cpu")
        @pytest.mark.django_db
        def test_database(): connection.ensure_connection()

        @pytest.mark.django_db
        def test_unmarked(): connection.ensure_connection()
        """,
    )
    run = suite.run("-n2")
    run.expect({"test_marked": "PASSED", "test_database": "ERROR", "test_unmarked": "PASSED"})
    assert "cannot use databases of pytest-django" in run.text
