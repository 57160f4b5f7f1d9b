"""Tests of pytest-django: each rank has its own databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

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


        class Publisher(models.Model):
            name = models.CharField(max_length=100)
        """,
    )
    pair.write("shop/migrations/__init__.py", "")
    pair.write(
        "shop/migrations/0001_initial.py",
        """
        from django.db import migrations, models


        def add_publisher(apps, schema_editor):
            apps.get_model("shop", "Publisher").objects.using(schema_editor.connection.alias).create(name="First")


        def fields(name):
            return [("id", models.AutoField(primary_key=True)), (name, models.CharField(max_length=100))]


        class Migration(migrations.Migration):
            initial = True
            dependencies = []
            operations = [
                migrations.CreateModel("Book", fields("title")),
                migrations.CreateModel("Publisher", fields("name")),
                migrations.RunPython(add_publisher),
            ]
        """,
    )
    pair.write(
        "test_shop.py",
        """
        import os

        import pytest
        from django.db import connections
        from shop.models import Book, Publisher

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


        @two
        @pytest.mark.django_db(transaction=True, serialized_rollback=True)
        def test_rows_of_migrations():
            in_ranks()
            assert [publisher.name for publisher in Publisher.objects.all()] == ["First"]


        @pytest.mark.django_db
        def test_unmarked():
            Book.objects.create(title="Fifth")
            assert Book.objects.count() == 1
        """,
    )
    plain, marked = pair.plain.run(), pair.marked.run("-n2")
    assert marked.outcomes() == plain.outcomes()
    assert marked.ret == plain.ret
    assert marked.count() == {"PASSED": 4}
    for one in (pair.plain, pair.marked):
        assert not list(one.path.glob("*.sqlite3*"))
