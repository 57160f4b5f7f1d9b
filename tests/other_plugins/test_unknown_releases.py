"""Tests of releases of other plugins that lack internals: they are refused with name and version."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_CONFTEST = """
    from importlib import import_module

    import pytest


    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        delattr(config.option if "{place}" == "config.option" else import_module("{place}"), "{name}")
    """
_TESTS = """
    import pytest


    @pytest.mark.distributed(2, device="cpu")
    def test_in_ranks():
        pass


    def test_unmarked():
        pass
    """


@pytest.mark.parametrize(
    ("modules", "plugin", "owner"),
    [
        pytest.param(modules, plugin, owner, id=plugin, marks=needs(*(name.partition(".")[0] for name in modules)))
        for modules, plugin, owner in [
            (["pytest_arraydiff.plugin"], "pytest-arraydiff", "pytest_arraydiff.plugin:ArrayComparison"),
            (["pytest_bdd.plugin"], "pytest-bdd", "pytest_bdd.reporting:ReportContext"),
            (["pytest_deadfixtures"], "pytest-deadfixtures", "config.option:showrepeated"),
            (["pytest_dependency"], "pytest-dependency", "pytest_dependency:DependencyManager"),
            (["pytest_django.plugin"], "pytest-django", "pytest_django.fixtures:_set_suffix_to_test_databases"),
            (["pytest_flakefinder"], "pytest-flakefinder", "pytest_flakefinder:FlakeFinderPlugin"),
            (["pytest_forked"], "pytest-forked", "pytest_forked:pytest_runtest_protocol"),
            (["pytest_isolate.plugin"], "pytest-isolate", "pytest_isolate.plugin:get_isolation_options"),
            (["pytest_order.plugin"], "pytest-order", "pytest_order.plugin:fail_after_cannot_order"),
            (["pytest_recording.plugin"], "pytest-recording", "pytest_recording.utils:merge_kwargs"),
            # pytest-reportportal implements hooks of pytest-bdd if that is installed.
            (["pytest_bdd.plugin", "pytest_reportportal"], "pytest-reportportal", "config.option:rp_enabled"),
            (["xprocess.pytest_xprocess"], "pytest-xprocess", "xprocess.pytest_xprocess:getrootdir"),
        ]
    ],
)
def test_release_that_lacks_internals_is_refused(pair: Pair, modules: list[str], plugin: str, owner: str) -> None:
    pair.plugin(*modules)
    place, _, name = owner.partition(":")
    pair.write("conftest.py", _CONFTEST.format(place=place, name=name))
    pair.write("test_it.py", _TESTS)
    run = pair.marked.run("-Wignore")
    text = f"ERROR: pytest-accel does not know release {version(plugin)} of {plugin}, which has no {name}: install"
    assert text in run.text + run.errors
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in run.text + run.errors
