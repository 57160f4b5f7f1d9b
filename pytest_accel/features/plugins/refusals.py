"""Uses of other plugins that are refused in a session with marked tests, and the conditions under which they are."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from pytest_accel.core.stash_keys import MARKED

Condition = Callable[[pytest.Config, Sequence[pytest.Item]], bool]
"""Returns whether a session with these marked tests uses a plugin in a certain way."""


def registered_name(config: pytest.Config, plugin: str) -> str | None:
    """Return the name under which `plugin` is registered, None if it is not; `plugin` may be the name of its module.

    A plugin is registered under the name of its entry point, or under its module's name if it was loaded with ``-p``.
    """
    named = config.pluginmanager.list_name_plugin()  # `get_plugins` fails if a plugin is not hashable.
    loaded = ((name, one) for name, one in named if one is not None)
    return next((name for name, one in loaded if plugin in (name, getattr(one, "__name__", None))), None)


def _is_given(config: pytest.Config, *flags: str) -> bool:
    """Return whether one of `flags` is on the command line, in ``addopts`` or in ``PYTEST_ADDOPTS``.

    The names under which a plugin stores its options differ between releases.
    """
    words = [*config.invocation_params.args, *config.getini("addopts")]
    words += shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    return any(str(word).partition("=")[0] in flags for word in words)


def _given(*flags: str, ini: Sequence[str] = (), mark: str | None = None) -> Condition:
    """Return the condition that one of the options `flags` or settings `ini` is given, and that a test has `mark`."""
    return lambda config, items: (
        (_is_given(config, *flags) or any(_is_set(config, name) for name in ini))
        and (mark is None or _any_has(items, mark))
    )


def _is_set(config: pytest.Config, name: str) -> bool:
    """Return whether the setting `name` has another value than an empty one or False."""
    try:
        return bool(config.getini(name))
    except ValueError:  # This release of the plugin has no such setting.
        return False


def _in_several_ranks(condition: Condition) -> Condition:
    """Return the condition that marked tests which run in more than one rank meet `condition`."""

    def applies(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
        several = [item for item in items if item.stash[MARKED].key.ranks > 1]
        return bool(several) and condition(config, several)

    return applies


def _any_has(items: Sequence[pytest.Item], *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for item in items for mark in marks)


def _changes_source(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether inline-snapshot changes source by values in the driver, which lacks the values of marked tests.

    ``review``, a default flag at a terminal, asks first.
    """
    state = getattr(sys.modules.get("inline_snapshot._global_state"), "state", lambda: None)()
    flags = set(getattr(state, "flags", ())) if getattr(state, "active", False) else set()
    return bool(flags & {"create", "fix", "trim", "update"}) and "review" not in flags


def _rewrites_cassettes(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    marks = [mark for item in items for mark in item.iter_markers("vcr")]
    return "rewrite" in [mark.kwargs.get("record_mode", config.option.record_mode) for mark in marks]


def _isolates(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-isolate forks the process for a marked test."""
    if any(registered_name(config, name) for name in ("forked", "timeout")):
        return False  # pytest-isolate turns itself off next to these two plugins.
    limits = ("isolate_timeout", "isolate_mem_limit", "isolate_cpu_limit")
    flags = ("--isolate", "--forked", *(f"--{limit.replace('_', '-')}" for limit in limits))
    isolates = _given(*flags, ini=limits)(config, items) or _any_has(items, "isolate", "forked", "timeout")
    return isolates and not _is_given(config, "--no-isolate")


def _measures_memory(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-memray records the memory of a marked test."""
    limits = ("limit_memory", "limit_leaks", "limit_leaked_objects")
    return config.option.memray or config.getini("memray") or _any_has(items, *limits)


def _runs_in_threads(config: pytest.Config, items: Sequence[pytest.Item]) -> bool:
    """Return whether pytest-run-parallel runs a marked test in several threads."""
    unsafe = [item for item in items if not item.get_closest_marker("thread_unsafe")]
    by_mark = _any_has(unsafe, "parallel_threads", "force_parallel_threads")
    return by_mark or (_is_given(config, "--parallel-threads") and bool(unsafe))


class Refusal(NamedTuple):
    """A use of a plugin that is refused in a session with marked tests. The error is one line: ``TEXT: INSTEAD``."""

    plugin: str
    """The plugin's name (`registered_name`)."""
    applies: Condition
    text: str
    instead: str = "do without it, or deselect marked tests (-m 'not distributed and not devices')"


_ARRAYS = "--arraydiff-generate-path"
_FORCED = ("--force-regen", "--regen-all")
_IMAGES = ("--mpl-generate-path", "--mpl-generate-hash-library", "--mpl-generate-summary", "--mpl-results-path")
_FILES = "would have each rank of a marked test write the same files"
_INLINE, _MINUTES = "inline_snapshot.pytest_plugin", "--flake-max-minutes"
_ORDER = "--error-on-failed-ordering"
_TESTMON = tuple(f"--testmon{rest}" for rest in ("", "-forceselect", "-noselect", "-nocollect", "-env"))

REFUSALS = (
    Refusal(
        "pytest_arraydiff.plugin",
        _in_several_ranks(_given(_ARRAYS, mark="array_compare")),
        f"{_ARRAYS} {_FILES}",
    ),
    Refusal("pytest_examples", _given("--update-examples"), f"--update-examples {_FILES}"),
    Refusal(
        "pytest_insta.plugin",  # By default it only creates files that are missing.
        _in_several_ranks(lambda config, items: config.option.insta in ("record", "review", "update")),
        f"--insta=update, record and review {_FILES}",
    ),
    Refusal(
        "pytest_mpl.plugin",  # By default each rank has a folder for its results.
        _given(*_IMAGES, ini=("mpl-generate-summary", "mpl-results-path"), mark="mpl_image_compare"),
        f"a folder of pytest-mpl for images or results {_FILES}",
    ),
    Refusal("pytest_regressions.plugin", _in_several_ranks(_given(*_FORCED)), f"{' and '.join(_FORCED)} {_FILES}"),
    Refusal(_INLINE, _changes_source, "inline-snapshot's create, fix, trim and update do not work for tests in ranks"),
    Refusal(
        "codspeed_plugin",
        lambda config, items: _is_given(config, "--codspeed") or "CODSPEED_ENV" in os.environ,
        "pytest-codspeed would run functions unequally often on ranks",
    ),
    Refusal("pytest_deadfixtures", _given("--dup-fixtures"), "--dup-fixtures cannot compare fixtures of ranks"),
    Refusal("pytest_flakefinder", _given(_MINUTES), f"{_MINUTES} would let ranks disagree on the end, by their clocks"),
    Refusal("memray_manager", _measures_memory, "pytest-memray cannot measure the memory of ranks"),
    Refusal("pytest_order.plugin", _given(_ORDER), f"{_ORDER} cannot fail marked tests"),
    Refusal("testmon.pytest_testmon", _given(*_TESTMON), "pytest-testmon does not know which code ranks execute"),
    Refusal(
        "pytest_forked",
        lambda config, items: config.option.forked or _any_has(items, "forked"),
        "pytest-forked runs a test in a fork of the pytest process, and a marked test runs in ranks",
        "do without it, or deselect marked tests; `fresh=True` gives a marked test new processes",
    ),
    Refusal(
        "pytest_isolate.plugin",
        _isolates,
        "pytest-isolate runs a test in a fork of the pytest process, and cannot isolate the ranks of a marked test",
        "use --no-isolate; `fresh=True` gives a marked test new processes, `timeout=` limits it",
    ),
    Refusal(
        "pytest_recording.plugin",
        _rewrites_cassettes,
        "in pytest-recording's record mode `rewrite`, each rank would remove the recordings of the others",
        "remove the cassettes, and record with --record-mode=once",
    ),
    Refusal(
        "pytest_reportportal.plugin",
        _given("--reportportal"),  # Each rank would start its own launch, or would lack the plugin's loggers.
        "--reportportal cannot report tests that run in ranks",
        "do without it, and import the file of --junitxml into ReportPortal",
    ),
    Refusal(
        "pytest_run_parallel.plugin",
        _runs_in_threads,
        "pytest-run-parallel would mix up the collectives of a marked test, which runs in ranks",
        "give the test the mark `thread_unsafe`, too",
    ),
)


def refusals(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[str]:
    """Yield the text of each refusal that applies to the session and its marked tests `items`."""
    for refusal in REFUSALS:
        if registered_name(config, refusal.plugin) and refusal.applies(config, items):
            yield f"{refusal.text}: {refusal.instead}"
