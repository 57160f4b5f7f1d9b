"""Tests of the hooks that ranks call: those of the documented table, for plugins that implement every hook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest import hookspec

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages

pytestmark = pytest.mark.usefixtures("without_torch")

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rank-sessions.md"
_ROW = re.compile(r"^\| (`pytest_.*`) \| (.*) \|$", re.MULTILINE)
_HOOKS = sorted(name for name in vars(hookspec) if name.startswith("pytest_"))
_LISTENING = ["pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_runtest_logfinish", "pytest_collectreport"]
_SUMMARY_HOOK = "pytest_terminal_summary"
_HISTORIC = {
    "pytest_addoption",
    "pytest_addhooks",
    "pytest_plugin_registered",
    "pytest_configure",
    "pytest_warning_recorded",
}
"""Historic hooks, which cannot be wrapped."""
_NOT_CALLED_IN_RANKS = {
    "pytest_report_header",
    "pytest_report_collectionfinish",
    "pytest_report_teststatus",
    "pytest_terminal_summary",
    "pytest_runtestloop",
    "pytest_ignore_collect",
}
"""Hooks that a rank does not call: it has no terminal reporter, its own ``pytest_runtestloop``, and lists no folder."""

_MAKE_HOOKS = """
    import os
    import sys
    from pathlib import Path

    import pytest


    def note(plugin, hook):
        path = Path(os.environ["NOTES"], f"{plugin}.{os.environ.get('RANK', 'driver')}")
        with path.open("a") as file:
            file.write(f"{hook}\\n")


    def make_hook(plugin, hook):
        def called():
            note(plugin, hook)

        return called


    def make_wrapper(plugin, hook):
        @pytest.hookimpl(wrapper=True)
        def called():
            note(plugin, hook)
            return (yield)

        return called


    def add_hooks(names, module, make=make_hook):
        for name in names.split():
            setattr(sys.modules[module], name, make(module, name))
    """
_TESTS = """
    import json
    import os
    import sys
    import warnings
    from pathlib import Path

    import pytest

    in_ranks = pytest.mark.distributed(2, kind="cpu", init=False)


    @pytest.fixture(params=["word"])
    def value(request, pytestconfig):
        hooks = {
            name: sorted({implementation.plugin_name for implementation in hook.get_hookimpls()})
            for name, hook in vars(pytestconfig.pluginmanager.hook).items()
            if name.startswith("pytest_")
        }
        Path(os.environ["NOTES"], f"hooks.{os.environ.get('RANK', 'driver')}").write_text(json.dumps(hooks))
        return request.param


    @pytest.mark.skipif("sys.platform == 'none'")
    def test_here(value):
        assert value == "word"
        warnings.warn("a warning")
        assert value == "other"


    @pytest.mark.skipif("sys.platform == 'none'")
    @in_ranks
    def test_in_ranks(value):
        assert value == "word"
        warnings.warn("a warning")
        assert value == "other"
    """


def _documented_hooks() -> dict[str, str]:
    """Return the text of the documented table for each hook; fail if a hook has two rows."""
    documented: dict[str, str] = {}
    for names, text in _ROW.findall(_PAGE.read_text(encoding="utf-8")):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in documented, f"two rows for {name}"
            documented[name] = text
    return documented


def _is_called(text: str, implemented: set[str], *, wrapper: bool = False) -> bool:
    """Return True if a rank calls a hook with the table's `text` in a plugin with the hooks `implemented`."""
    if text.startswith("not called"):
        return False
    if text.startswith("called if it is a wrapper"):
        return wrapper
    if not text.startswith("called unless the plugin listens to reports"):
        assert text.startswith("called"), text
        return True
    summarises = "or writes a summary" in text and _SUMMARY_HOOK in implemented
    return not summarises and implemented.isdisjoint(_LISTENING)


@pytest.fixture
def install(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Provide a function that installs a distribution `name`: one module with the code `text`, which is a plugin."""
    packages = InstalledPackages(suite.path / "site-packages", monkeypatch)
    monkeypatch.setenv("NOTES", str(suite.path))
    suite.write("site-packages/make_hooks.py", _MAKE_HOOKS)
    return lambda name, text: packages.install(name, "pytest11", f"{name} = {name}", name, textwrap.dedent(text))


def _plugin_code(hooks: list[str], make: str = "make_hook") -> str:
    """Return the code of a plugin that implements `hooks` with the function `make` of ``make_hooks.py``."""
    return f"import make_hooks\nmake_hooks.add_hooks({' '.join(hooks)!r}, __name__, make_hooks.{make})\n"


def _mistakes(plugins: dict[str, list[str]], is_registered: Callable[[str, str], bool]) -> list[str]:
    """Return a line for each plugin and hook for which `is_registered` disagrees with the documented table."""
    documented = _documented_hooks()
    mistakes = []
    for plugin, hooks in plugins.items():
        for hook in hooks:
            called = plugin == "local" or _is_called(documented[hook], set(hooks), wrapper=plugin == "wraps")
            if is_registered(plugin, hook) != called:
                mistakes.append(f"{plugin}: {hook}: documented as {'called' if called else 'not called'}")
    return mistakes


def test_each_hook_of_pytest_is_documented() -> None:
    assert set(_HOOKS) - set(_documented_hooks()) == set()


def test_ranks_call_the_documented_hooks(suite: Suite, install: Callable[[str, str], None]) -> None:
    other_hooks = [name for name in _HOOKS if name not in (*_LISTENING, _SUMMARY_HOOK)]
    plugins = {
        "listens": _HOOKS,
        "summarises": [*other_hooks, _SUMMARY_HOOK],
        "runs_tests": other_hooks,
        "wraps": [name for name in _HOOKS if name not in _HISTORIC],
        "registered": [name for name in other_hooks if name not in ("pytest_addoption", "pytest_addhooks")],
        "local": _HOOKS,
    }
    for name in ("listens", "summarises", "runs_tests"):
        install(name, _plugin_code(plugins[name]))
    install("wraps", _plugin_code(plugins["wraps"], "make_wrapper"))
    install(
        "registers",
        f"""
        import make_hooks


        class Registered:
            pass


        for name in {plugins["registered"]!r}:
            setattr(Registered, name, staticmethod(make_hooks.make_hook("registered", name)))


        def pytest_configure(config):
            config.pluginmanager.register(Registered(), "registered")
        """,
    )
    suite.write("local.py", _plugin_code(_HOOKS))
    for name in ("listens", "summarises", "runs_tests", "wraps", "registers", "local"):
        suite.plugin(name)
    suite.ini("enable_assertion_pass_hook = true")
    suite.write("test_it.py", _TESTS)

    assert suite.run("-Wdefault").count() == {"FAILED": 2}

    hooks = {process: json.loads((suite.path / f"hooks.{process}").read_text()) for process in ("driver", "0")}
    calls = {
        (plugin, process): set(suite.read(f"{plugin}.{process}")) for plugin in plugins for process in ("driver", "0")
    }
    assert all(plugin in hooks["driver"][hook] for plugin, implemented in plugins.items() for hook in implemented)
    assert _mistakes(plugins, lambda plugin, hook: plugin in hooks["0"][hook]) == []
    for plugin in plugins:
        registered = {hook for hook, names in hooks["0"].items() if plugin in names}
        assert calls[plugin, "0"] <= registered
        not_called = _NOT_CALLED_IN_RANKS if plugin == "local" else set()
        assert (calls[plugin, "driver"] & registered) - calls[plugin, "0"] == {
            "pytest_report_from_serializable",
            *not_called,
        }


_NOTED_HOOKS = ["pytest_configure", "pytest_runtest_setup", "pytest_runtest_logreport"]
_PLUGIN_NAME_TESTS = """
    import os
    from pathlib import Path

    import pytest


    def names(config):
        return sorted(name for name, plugin in config.pluginmanager.list_name_plugin() if plugin and "my_" in name)


    def test_here(pytestconfig):
        Path(os.environ["NOTES"], "names.driver").write_text("\\n".join(names(pytestconfig)))


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_in_ranks(pytestconfig):
        assert pytestconfig.getoption("my_option") == 7
        Path(os.environ["NOTES"], f"names.{os.environ['RANK']}").write_text("\\n".join(names(pytestconfig)))
    """


@pytest.mark.long
def test_ranks_load_the_same_plugins(
    suite: Suite, install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed plugins and those of the project are named by ``-p``, by the environment, and by a conftest."""
    option = "\n\ndef pytest_addoption(parser):\n    parser.addoption('--my-option', type=int)\n"
    install("my_published", _plugin_code(_NOTED_HOOKS) + option)
    install("my_blocked", _plugin_code(_NOTED_HOOKS))
    for name in ("my_module", "my_environment"):
        suite.write(f"site-packages/{name}.py", _plugin_code(_NOTED_HOOKS))
    for name in ("my_own_module", "my_own_environment", "my_own_conftest"):
        suite.write(f"{name}.py", _plugin_code(_NOTED_HOOKS))
    suite.write("conftest.py", "pytest_plugins = ['my_own_conftest']")
    monkeypatch.setenv("PYTEST_PLUGINS", "my_environment,my_own_environment,my_blocked")
    suite.write("test_it.py", _PLUGIN_NAME_TESTS)
    options = ["-pmy_published", "-pmy_module", "-pmy_own_module", "-pno:my_blocked", "-pno:terminal", "--my-option=7"]

    def called_hooks() -> dict[str, list[str]]:
        """Run a session; return the hooks that rank 0 has called, by plugin."""
        for path in suite.path.glob("*.0"):
            path.unlink()
        assert suite.run(*options, quiet=True).ret == 0
        return {path.stem: sorted(set(path.read_text().split())) for path in suite.path.glob("my_*.0")}

    hooks_of_installed = ["pytest_configure", "pytest_runtest_setup"]
    installed = dict.fromkeys(("my_published", "my_module", "my_environment"), hooks_of_installed)
    own = {name: sorted(_NOTED_HOOKS) for name in ("my_own_module", "my_own_environment", "my_own_conftest")}
    assert called_hooks() == {**installed, **own}
    assert suite.read("names.0") == suite.read("names.1") == suite.read("names.driver") == sorted([*installed, *own])

    suite.ini("accel_rank_plugins = -my_published +my_module -my_own_module -my_blocked +my_unknown")
    assert called_hooks() == {
        "my_module": sorted(_NOTED_HOOKS),
        "my_environment": hooks_of_installed,
        "my_own_environment": sorted(_NOTED_HOOKS),
        "my_own_conftest": sorted(_NOTED_HOOKS),
    }


def test_ranks_load_modules_that_a_runner_passes_to_pytest(suite: Suite) -> None:
    """PyCharm's runner passes its plugin so. Other objects cannot be sent to a rank."""
    suite.write("passed.py", "import pytest\n\n@pytest.fixture\ndef passed():\n    return 7\n")
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_in_ranks(passed):
            assert passed == 7
        """,
    )
    suite.write("pytest.ini", "[pytest]\naccel = sim:4\n")
    suite.write(
        "runner.py",
        """
        import sys

        import passed
        import pytest

        sys.exit(pytest.main(sys.argv[1:], [passed, object()]))
        """,
    )
    command = [sys.executable, "runner.py", "-p", "accel", "-p", "xdist"]
    done = subprocess.run(command, cwd=suite.path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
