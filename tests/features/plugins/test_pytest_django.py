"""Tests of pytest-django: each rank has its own databases."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs

pytestmark = needs("pytest_django")


def test_each_rank_of_each_worker_has_its_own_databases(pair: Pair) -> None:
    pair.plugin("pytest_django.plugin")
    pair.ini("DJANGO_SETTINGS_MODULE = project_settings\npythonpath = .")
    pair.write(
        "project_settings.py",
        """
        def _database(name):
            return {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": f"{name}.sqlite3",
                "TEST": {"NAME": f"test_{name}.sqlite3"},
            }

        DATABASES = {"default": _database("default"), "other": _database("other")}
        INSTALLED_APPS = ["shop"]
        SECRET_KEY = "not one"
        USE_TZ = True
        DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
        """,
    )
    pair.write("shop/__init__.py", "")
    pair.write(
        "shop/models.py",
        """
        from django.db import models

        class Book(models.Model):
            title = models.CharField(max_length=100)
        """,
    )
    pair.write(
        "test_shop.py",
        """
        import os

        import pytest
        from django.db import connections
        from shop.models import Book

        two = pytest.mark.distributed(2, kind="cpu")

        def in_ranks():
            import torch.distributed as dist

            if "RANK" in os.environ:
                dist.barrier()

        @two
        @pytest.mark.django_db
        def test_passes():
            assert Book.objects.count() == 0
            in_ranks()
            Book.objects.create(title="First")
            in_ranks()
            assert Book.objects.count() == 1

        @two
        @pytest.mark.django_db(databases=["other"])
        def test_other_database():
            assert "test_other" in str(connections["other"].settings_dict["NAME"])
            Book.objects.using("other").create(title="Third")
            in_ranks()
            assert Book.objects.using("other").count() == 1

        @pytest.mark.django_db
        def test_unmarked():
            Book.objects.create(title="Fifth")
            assert Book.objects.count() == 1
        """,
    )
    assert pair.run_marked(pair.plain.run(), "-n2").count() == {"PASSED": 3}
    for one in (pair.plain, pair.marked):
        assert not list(one.path.glob("*.sqlite3*"))
