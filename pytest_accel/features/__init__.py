"""The features of the plugin: optional parts, each in a folder of its own, which plug into the kernel.

`FEATURES` is the one table of them. The kernel calls them at the moments that `Moment` lists, and knows none by name. A
session that does not need a feature imports none of its modules. To delete a feature, delete its folder, its row here,
its names in ``pytest_accel.__init__``, and its tests in ``tests/features``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.marks import NEEDS, compares_arguments, registered
from pytest_accel.core.stash_keys import LAUNCHED, SESSION
from pytest_accel.settings import options

Moment = Literal[
    "start",
    "configure",
    "configure_rank",
    "marks_of_file",
    "divide",
    "plan_all",
    "collected",
    "read_needs",
    "select",
    "redirected",
    "collection_finished",
    "workers_collected",
    "around_call",
    "make_launch",
    "make_faults",
    "open_fake_group",
    "connect_cluster",
    "start_job",
    "why_no_launcher",
]
"""The moments at which the kernel calls functions of these names in the modules ``features/NAME/hooks.py``:

- ``start(early_config, args)``: the command line is known, and no conftest has been imported. Not in ranks.
- ``configure(session)``: pytest calls ``pytest_configure``. Not in ranks.
- ``configure_rank(config)``: the same in a rank.
- ``marks_of_file(config, path, text)``: a file is about to be collected. Returns names of the plugin's marks that its
  tests may get although they are not in its text.
- ``divide(config, nodes, selectable)``: marks of some collected ``nodes`` have lists. Puts a test for each entry in
  place of each such test. ``selectable`` is True if the command line may select the new tests by their names.
- ``plan_all(plan, at_least, resources)``: a mark has "all". Returns the `ItemPlan` for the largest number of devices
  or ranks that can run; ``plan(number)`` returns that for a number.
- ``collected(config, items)``: the items are collected, and no plugin has modified the list.
- ``read_needs(session, items)``: plugins have modified the list, and the items may be selected and redirected; some
  have the mark ``needs``. Stores the `DriverLeases` of new ones, and returns the errors of those whose marks are wrong.
- ``select(session, items, found, redirector, shard)``: the items may be deselected; ``found`` has those with marks.
- ``redirected(session, items, redirected)``: new items run in worlds, and this process is to run tests. Raises
  ``pytest.UsageError`` if they cannot run.
- ``collection_finished(session, items)``: marked tests were found, and ``pytest_collection_finish`` follows.
- ``workers_collected(session, ids, workers)``: a worker of xdist has collected. In the controller.
- ``around_call(context)``: a rank is about to call a test. Returns a context manager for the call.
- ``make_launch(request, tmp_path_factory)``: returns the value of the fixture `launch`.
- ``make_faults(context)``: returns a context manager with the value of the fixture `faults` in a rank.
- ``open_fake_group(context)``: a rank is about to open a fake process group. Returns its store.
- ``connect_cluster(session)``: returns the cluster whose machines run the tests.
- ``start_job(spec, callbacks, lock, launcher, world, on_end)``: starts the ranks of a world with a launcher; see
  `StartJob` in `pool/world_manager.py`.
- ``why_no_launcher(launcher)``: returns why ``launcher`` cannot start ranks on this machine; None if it can.
"""
Condition = Callable[[pytest.Config], bool]


class Feature(NamedTuple):
    """One feature, with the moments at which the kernel calls it."""

    name: str
    """Name of its folder."""
    moments: Mapping[Moment, Condition]
    """The moments, each with the condition on which the feature is imported and called."""
    stands_on: tuple[str, ...] = ()
    """Names of the features from which it imports."""
    commands: tuple[str, ...] = ()
    """Its commands of ``python -m pytest_accel``, the keys of `COMMANDS` in ``features/NAME/commands.py``."""
    about_machine: bool = False
    """True if its commands get the settings of the machine; False if they get the arguments, such as files."""


def _always(config: pytest.Config) -> bool:
    return True


def _adopts(config: pytest.Config) -> bool:
    """Return whether the ini file adds marks to tests."""
    return bool(config.getini(options.RULES) or config.getini(options.ADOPT))


def _is_launched(config: pytest.Config) -> bool:
    """Return whether this process and others that a launcher has started are to be one session."""
    return options.sees_launchers(config) and launcher_env.find_here() is not None


def _orders(config: pytest.Config) -> bool:
    """Return whether the order of tests under xdist, or their times, are the plugin's matter from the beginning on."""
    session = config.stash[SESSION]
    if session.is_worker:
        return False
    return session.settings.durations is not None or options.is_distributed(config)


def _plans(config: pytest.Config) -> bool:
    """Return whether the session plans, or runs one of several parts of the tests."""
    settings = config.stash[SESSION].settings
    return settings.shard is not None or options.plans(config)


def _selects(config: pytest.Config) -> bool:
    settings = config.stash[SESSION].settings
    return settings.select is not None or settings.shard is not None


def _records(config: pytest.Config) -> bool:
    """Return whether the events of the session are recorded."""
    in_ci = options.shows_in_ci(config.stash[SESSION].settings)
    return in_ci or any(options.output_path(config, option) is not None for option in options.FILES)


def _selects_by_argument(config: pytest.Config) -> bool:
    return compares_arguments(getattr(config.option, "markexpr", ""))


def _has_jitter(config: pytest.Config) -> bool:
    return options.jitter(config) is not None


def _owns_needs(config: pytest.Config) -> bool:
    """Return whether marks ``needs`` are the plugin's. Without ``accel_resources``, a registered one is not."""
    return options.has_resources(config) or NEEDS not in registered(config.getini("markers"))


FEATURES = (
    Feature("adoption", {"configure": _adopts, "configure_rank": _adopts, "marks_of_file": _adopts}),
    Feature(
        "launchers",
        {
            "start": _is_launched,
            "configure": lambda config: LAUNCHED in config.stash,
            "start_job": _always,
            "why_no_launcher": _always,
        },
        stands_on=("launch",),
    ),
    Feature("ray", {"connect_cluster": _always}, stands_on=("launchers",)),
    Feature(
        "order",
        {"configure": _orders, "redirected": _always, "collection_finished": _always},
        commands=("durations",),
    ),
    Feature(
        "planning",
        {
            "start": lambda config: getattr(config.known_args_namespace, options.PLAN, None) is not None,
            "configure": _plans,
            "collected": _selects_by_argument,
            "select": _selects,
        },
        stands_on=("order",),
    ),
    Feature(
        "record",
        {"configure": _records, "redirected": _always, "workers_collected": _always},
        stands_on=("order", "planning"),
        commands=("trace", "report", "summary", "census"),
    ),
    Feature("plugins", {"configure_rank": _always, "redirected": _always}),
    Feature("properties", {"around_call": lambda config: "hypothesis" in sys.modules}),
    Feature("launch", {"make_launch": _always}),
    Feature("faults", {"configure": _has_jitter, "make_faults": _always, "around_call": _has_jitter}),
    Feature("fake_group", {"open_fake_group": _always}),
    Feature("sizes", {"divide": _always, "plan_all": _always}),
    Feature(
        "resources",
        {"configure": options.has_resources, "configure_rank": options.has_resources, "read_needs": _owns_needs},
    ),
    Feature(
        "doctor",
        {"configure": lambda config: bool(config.getoption(options.INFO))},
        commands=("info", "doctor"),
        about_machine=True,
    ),
)
"""All features, in the order in which they are called."""


def needed(moment: Moment, config: pytest.Config) -> bool:
    """Return whether any feature is to be called at `moment`."""
    return any(condition(config) for _, condition in _at(moment))


def call(moment: Moment, config: pytest.Config, *arguments: Any) -> list[Any]:
    """Call the features that `config` needs at `moment` with `arguments`; return what they return, without None."""
    found = [_load(name) for name, condition in _at(moment) if condition(config)]
    results = (getattr(module, moment)(*arguments) for module in found)
    return [result for result in results if result is not None]


def call_one(moment: Moment, config: pytest.Config, *arguments: Any) -> Any:
    """Return what the one feature that serves `moment` returns; raise ``pytest.UsageError`` if none does."""
    results = call(moment, config, *arguments)
    if not results:
        raise pytest.UsageError(f"this installation of pytest-accel lacks the feature for {moment!r}")
    return results[0]


def commands() -> dict[str, bool]:
    """Return the names of all commands, each with True if it gets the arguments, False for the machine's settings."""
    # The doctor's come first: the help of the first command has the options of the machine.
    features = sorted(FEATURES, key=lambda feature: not feature.about_machine)
    return {name: not feature.about_machine for feature in features for name in feature.commands}


def command(name: str) -> Any:
    """Return the function of the command `name`, which returns an exit status."""
    (feature,) = (feature.name for feature in FEATURES if name in feature.commands)
    return _load(feature, "commands").COMMANDS[name]


def _at(moment: Moment) -> Iterator[tuple[str, Condition]]:
    return ((feature.name, feature.moments[moment]) for feature in FEATURES if moment in feature.moments)


def _load(name: str, module: str = "hooks") -> Any:
    """Return a module of a feature. Raise ``pytest.UsageError`` if it cannot be imported."""
    try:
        return import_module(f"{__name__}.{name}.{module}")
    except ImportError as error:
        raise pytest.UsageError(f"pytest-accel: the feature {name!r} cannot be imported: {error}") from error
