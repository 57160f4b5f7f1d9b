"""Options of the plugin, and the :class:`Settings` from the command line, the environment and the ini file.

Each setting has one name in three forms: ``--accel-order`` on the command line, ``PYTEST_ACCEL_ORDER`` in the
environment, ``accel_order`` in the ini file. If several are given, the first in this order counts. Some settings have
no command line option (`_WITHOUT_FLAG`). pytest's ``-o accel_order=pci`` counts as one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.kinds import ALL_KINDS, name_kinds
from pytest_accel.settings import option_types

ACCEL = "accel"
IDS = "accel_ids"
ORDER = "accel_order"
REQUIRE = "accel_require"
STRICT = "accel_strict"
SHARE = "accel_share"
BUSY = "accel_busy"
WAIT = "accel_wait"
TIMEOUT = "accel_timeout"
FRESH = "accel_fresh"
CHECK_COLLECTIVES = "accel_check_collectives"
LEAKS = "accel_leaks"
KEEP_PROCESSES = "accel_keep_processes"
SCHEDULE = "accel_schedule"
PRELOAD = "accel_preload"
RANK_PLUGINS = "accel_rank_plugins"
OUTPUT = "accel_output"
PDB_RANK = "accel_pdb_rank"
LAUNCHER = "accel_launcher"
CLUSTER = "accel_cluster"
INFO = "accel_info"
PLAN = "accel_plan"
RECORD = "accel_record"
LOG = "accel_log"
REPORT = "accel_report"
RULES = "accel_rules"
ADOPT = "accel_adopt"
MARKS = "accel_marks"
SELECT = "accel_select"
SHARD = "accel_shard"
DURATIONS = "accel_durations"
CI = "accel_ci"
JITTER = "accel_jitter"
RESOURCES = "accel_resources"


class Settings(NamedTuple):
    """The values of all settings of one session. A dataclass takes pytest's start a millisecond more to define."""

    accel: str = "auto"
    """``auto``, ``none``, a kind, or a kind with an argument (``sim:8``, ``cpu:4``)."""
    ids: str | None = None
    """Indices or ids of the devices that the session may use, as given; None: all devices in the inherited mask."""
    order: str = "fastest"
    require: tuple[tuple[str, int], ...] = ()
    """Pairs of a kind and the minimum number of its devices. The session fails if there are fewer."""
    strict: bool = False
    """True if a test that would be skipped for missing hardware fails instead."""
    share: str | None = None
    """The ``share`` of marks that have none, as given (`option_types.parse_share`); None: devices are exclusive."""
    busy: Literal["ignore", "skip", "wait"] = "ignore"
    """Treatment of devices that processes outside the session use."""
    wait: float | None = None
    """Timeout in seconds for a test that waits for its devices; None: no timeout."""
    timeout: float = 300.0
    """Timeout in seconds of each phase of a test in a world, unless its mark has a ``timeout``."""
    fresh: bool = False
    """True if each test gets new processes."""
    check_collectives: bool = False
    """True if torch compares the ranks' collectives before it starts them."""
    output: str | None = None
    """Folder in which the output of each rank is kept; None: output is not kept."""
    pdb_rank: int | None = None
    """Rank to debug; None: the first that fails or reaches a breakpoint (rank 0 with ``--trace``)."""
    leaks: Literal["warn", "fail", "off"] = "warn"
    """Treatment of a test that leaks something in its ranks."""
    keep_processes: tuple[str, ...] = ()
    """Parts of command lines. Tests may leave processes with a matching command line running in their ranks."""
    schedule: Literal["on", "off", "always"] = "on"
    """``off`` if xdist assigns tests to its workers, and not the devices that they need. ``always`` if, without xdist,
    tests that can share a world run one after the other, too."""
    launcher: Literal["on", "off", "spread"] = "off"
    """``on`` if the processes that a launcher has started together form one session. ``spread`` if they also take turns
    at tests that only need devices; otherwise all of these run in rank 0."""
    select: str | None = None
    """Condition on what a test needs; tests that do not meet it are deselected. None: all tests are selected."""
    shard: tuple[int, int] | None = None
    """Number of the part of the selected tests that this session runs (from 1), and number of parts; None: all."""
    durations: str | None = None
    """Path of a file with the times of tests, as given; None: pytest's cache has them."""
    cluster: str | None = None
    """Cluster whose nodes run the tests that need devices: ``ray`` or ``ray:HOST:PORT``; None: this machine."""
    info: bool = False
    """True to show the devices and stop."""
    preload: tuple[str, ...] | Literal["none"] = ()
    """Modules that the fork server imports besides torch and pytest; ``none``: it imports neither torch nor plugins."""
    ci: bool = True
    """True if GitHub shows a summary of the session, in a job of GitHub Actions."""
    marks: tuple[tuple[str, str], ...] = ()
    """Pairs of a mark's name, ``devices`` or ``distributed``, and its owner, ``own`` (the plugin) or ``project``."""
    rank_plugins: tuple[tuple[str, bool], ...] = ()
    """Pairs of a plugin's name and True if ranks call all its hooks, False if ranks run without it."""
    resources: tuple[tuple[str, int], ...] = ()
    """Pairs of a named resource and how many there are; bytes of ``memory``."""
    jitter: int | None = None
    """Seed of random delays before collectives, and of the hash seeds of ranks; None: there are none."""

    @property
    def names_devices(self) -> bool:
        """True if the settings choose other devices, or another order of devices, than the defaults."""
        default = type(self)()
        return (self.accel, self.ids, self.order) != (default.accel, default.ids, default.order)


class _Option(NamedTuple):
    """Definition of one setting."""

    field: str
    """Name of its field in `Settings`."""
    ini_type: Literal["string", "bool", "int", "float", "args"]
    allowed: str
    """Allowed values, for error messages."""
    read: Callable[[Any], Any]
    """Converts text, or an ini value that pytest has converted; raises ValueError for a value that is not allowed."""
    help: str
    metavar: str | None = None


_IN_TOML = {"bool": " (true or false in TOML)", "string": " (a string in TOML)"}
"""The form that an ini value must have in native TOML, by the type of the setting."""


def _switch(field: str, help_text: str) -> _Option:
    """Return the definition of a setting that is on or off."""
    return _Option(field, "bool", "on or off", option_types.boolean, help_text)


def _select(value: object) -> str:
    """Return a condition on what tests need."""
    from pytest_accel.settings import select_expression

    condition = option_types.text(value)
    select_expression.parse(condition)
    return condition


_OPTIONS: dict[str, _Option] = {
    ACCEL: _Option(
        "accel",
        "string",
        "auto, none, or a kind such as cuda, cpu:4 or sim:8",
        option_types.text,
        "the accelerators that the session uses: auto (default), none, a kind, cpu:4, sim:8, sim:topology.toml",
        "KIND",
    ),
    IDS: _Option(
        "ids",
        "string",
        "indices or ids of devices with commas between them",
        option_types.device_names,
        "the devices that the session may use: 0,2 or ids (default: all that it can see)",
        "IDS",
    ),
    ORDER: _Option(
        "order",
        "string",
        "fastest, pci, free, near, or ids with commas between them",
        option_types.order,
        "the order in which devices are numbered: fastest (default), pci, free, near, or ids with commas",
        "ORDER",
    ),
    REQUIRE: _Option(
        "require",
        "string",
        f"KIND:N or a comma-separated list with each kind once, where N is an int >= 1 and KIND one of {ALL_KINDS}",
        option_types.require,
        "fail the session at once if there are fewer devices: cuda:4, or several kinds with commas",
        "KIND:N",
    ),
    STRICT: _switch(
        "strict",
        "make a skip for missing hardware a failure",
    ),
    SHARE: _Option(
        "share",
        "string",
        "a fraction > 0 and <= 1 such as 0.25, or a positive size such as 8GiB",
        option_types.share,
        "the share of each device that a test takes if its mark has no share=: 0.25 for four tests on a device, or "
        "8GiB (default: whole devices)",
        "SHARE",
    ),
    BUSY: _Option(
        "busy",
        "string",
        "ignore, skip or wait",
        option_types.one_of("ignore", "skip", "wait"),
        "for devices that processes outside the session use: ignore that (default), skip the devices, or wait until "
        "they are free",
        "WHAT",
    ),
    WAIT: _Option(
        "wait",
        "string",
        f"a time >= 0 such as {option_types.TIMES}",
        option_types.time,
        f"how long a test may wait for its devices, before it is an error: {option_types.TIMES} (default: no limit)",
        "TIME",
    ),
    TIMEOUT: _Option(
        "timeout",
        "string",
        f"a time > 0 such as {option_types.TIMES}",
        option_types.positive_time,
        f"how long each phase of a test in a world may take: {option_types.TIMES} (default: 300)",
        "TIME",
    ),
    FRESH: _switch(
        "fresh",
        "start new processes for each test",
    ),
    CHECK_COLLECTIVES: _switch(
        "check_collectives",
        "have torch compare the ranks' collectives before they begin (TORCH_DISTRIBUTED_DEBUG=DETAIL)",
    ),
    OUTPUT: _Option(
        "output",
        "string",
        "the path of a folder",
        option_types.text,
        "keep what each rank writes in this folder, one file for each world and rank",
        "DIR",
    ),
    PDB_RANK: _Option(
        "pdb_rank",
        "int",
        "an int >= 0",
        option_types.rank,
        "the rank that --pdb, --trace and breakpoint() debug (default: the first that fails or comes to a breakpoint; "
        "0 under --trace)",
        "N",
    ),
    LEAKS: _Option(
        "leaks",
        "string",
        "warn, fail or off",
        option_types.one_of("warn", "fail", "off"),
        "a test that leaves something behind in its ranks: warn (default), fail it, or say nothing (off)",
        "WHAT",
    ),
    SCHEDULE: _Option(
        "schedule",
        "string",
        "on, off or always",
        option_types.one_of("on", "off", "always"),
        "on (default): under xdist's --dist load and worksteal, choose the worker of each test by the devices that "
        "tests need; off: xdist chooses; always: as on, and without -n run tests that can share a world one after the "
        "other",
        "WHAT",
    ),
    LAUNCHER: _Option(
        "launcher",
        "string",
        "on, off or spread",
        option_types.one_of("on", "off", "spread"),
        "pytest started by torchrun, accelerate, deepspeed, mpirun or srun: each process runs all tests by itself "
        "(off, default), the processes are the ranks of one session (on), or they also take turns at tests that need "
        "only devices (spread)",
        "WHAT",
    ),
    SELECT: _Option(
        "select",
        "string",
        "a condition such as 'devices >= 2'",
        _select,
        'run only the tests whose needs meet this condition: "devices >= 2", "not marked", "fits"',
        "CONDITION",
    ),
    SHARD: _Option(
        "shard",
        "string",
        "I/N with ints 1 <= I <= N",
        option_types.shard,
        "run part I of N parts of the selected tests, which take about as long on equal machines: 2/4",
        "I/N",
    ),
    DURATIONS: _Option(
        "durations",
        "string",
        "the path of a file",
        option_types.text,
        "read the times of tests from this file, if it exists, and add those of this session to it",
        "FILE",
    ),
    CLUSTER: _Option(
        "cluster",
        "string",
        "ray or ray:HOST:PORT",
        option_types.cluster,
        "run the tests that need devices or several machines on a Ray cluster: this machine's (ray), or the one "
        "whose head listens there (ray:HOST:PORT; needs Ray: pytest-accel[ray])",
        "CLUSTER",
    ),
    CI: _switch(
        "ci",
        "in a job of GitHub Actions, show a summary of the session there: on (default) or off",
    ),
    MARKS: _Option(
        "marks",
        "string",
        "own, project, or a mark with one of these, such as distributed:project, or both marks with a comma",
        option_types.mark_owners,
        "the owner of the marks devices and distributed if the project registers marks of these names: the plugin "
        "(own) or the project; also for one mark: distributed:project (default: the project, unless its tests use "
        "fixtures of the plugin)",
        "OWNER",
    ),
    JITTER: _Option(
        "jitter",
        "int",
        "an int >= 0",
        option_types.rank,
        "delay each rank for a random time of up to 20 ms before each collective and message, and give each rank a "
        "hash seed of its own, to find races; a failure names this seed",
        "SEED",
    ),
    PRELOAD: _Option(
        "preload",
        "args",
        f"none, or names of modules (none of {', '.join(option_types.UNFORKABLE)}, which do not survive a fork)",
        option_types.preload,
        "names of modules that the fork server imports besides torch and pytest; none: not even torch",
    ),
    RANK_PLUGINS: _Option(
        "rank_plugins",
        "args",
        "-NAME or +NAME, or several with spaces",
        option_types.rank_plugins,
        "plugins that ranks do not load (-NAME), or whose hooks they all call (+NAME)",
    ),
    RESOURCES: _Option(
        "resources",
        "string",
        "NAME: COUNT, several with commas or on lines of their own, where NAME is of lower-case letters, digits, - and "
        f"_, and no kind of device, and COUNT an int from 1 to {option_types.MOST_RESOURCES}; cores may also be auto, "
        "and memory is auto or a size of 1GiB or more",
        option_types.resources,
        "resources besides devices that tests need, each with its number: license: 2, port-9000: 1, memory: auto, "
        "cores: auto",
    ),
    KEEP_PROCESSES: _Option(
        "keep_processes",
        "args",
        "texts that are not empty",
        option_types.texts,
        "texts in the command lines of processes that tests may leave running in their ranks, because a library keeps "
        "them and ends them itself",
    ),
}


FILES = {
    RECORD: "write each event of the session to this file: tests and their phases, worlds, waits, devices; `python -m "
    "pytest_accel trace`, `report`, `summary` and `census` read such files",
    REPORT: "write an HTML page about the session to this file: tests on devices over time, waits, failures, skips "
    "(needs Bokeh: pytest-accel[report])",
}
"""The options with the path of a file to write, and their help."""
BEGINNINGS = {RECORD: b"{", REPORT: b"<", LOG: b"012"}
"""The possible first bytes of such a file, and of that of ``--accel-log``, whose lines begin with the time."""
_LOG_HELP = (
    "write the steps of all processes to this file: joining, starting, leasing, forking, connecting, running, ending; "
    "PYTEST_ACCEL_LOG does the same for agents on other machines"
)
_OTHER_VARIABLES = frozenset(
    f"PYTEST_ACCEL_{name}" for name in ("ADDOPTS", "HELD", "LOCK_DIR", "LOG", "SECRET", "SESSION", "TESTRUNUID")
)
"""Variables of the plugin that are no settings; their modules have their meaning."""
_WITHOUT_FLAG = (
    *(BUSY, SCHEDULE, LEAKS, CI, MARKS),
    *(PRELOAD, RANK_PLUGINS, KEEP_PROCESSES, RESOURCES),
)
"""Settings without a command line option of their own: they describe a suite or its CI (``-o accel_leaks=fail``)."""
_REPORTING = (OUTPUT, CHECK_COLLECTIVES, PDB_RANK)
"""Settings whose options are in the second group of the help."""


def environment_variable(option: str) -> str:
    """Return the environment variable that sets `option`: ``PYTEST_ACCEL_ORDER`` for ``accel_order``."""
    return f"PYTEST_{option.upper()}"


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _argument_type(read: Callable[[Any], Any], allowed: str) -> Callable[[str], Any]:
    """Return a function for the argument ``type`` of argparse."""

    def convert(value: str) -> Any:
        try:
            return read(value)
        except option_types.ExplainedError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {name_kinds(allowed)}, got {value!r}") from None

    return convert


def add_options(parser: pytest.Parser) -> None:
    """Add every option and ini name of the plugin to `parser`."""
    group = parser.getgroup("accel", "accelerators and ranks: what runs on what")
    reports = parser.getgroup("accel-reports", "accelerators and ranks: reports and debugging")
    for option, definition in _OPTIONS.items():
        if option not in _WITHOUT_FLAG:
            kwargs: dict[str, Any] = (
                {"action": "store_const", "const": True}
                if definition.ini_type == "bool"
                else {"type": _argument_type(definition.read, definition.allowed), "metavar": definition.metavar}
            )
            its_group = reports if option in _REPORTING else group
            its_group.addoption(flag(option), dest=option, default=None, help=definition.help, **kwargs)
        parser.addini(option, definition.help, type=definition.ini_type, default=None)
    reports.addoption(
        flag(INFO),
        dest=INFO,
        action="store_true",
        default=False,
        help="show the devices, their order, their masks and who holds what, then stop",
    )
    reports.addoption(
        flag(PLAN),
        dest=PLAN,
        nargs="?",
        type=_argument_type(option_types.planned_machine, ""),
        const=(),
        default=None,
        metavar="KIND:N",
        help="show how long the tests would take on this machine, or on one with N devices of KIND (cuda:8), and with "
        "how many workers, then stop",
    )
    # Without a form in the environment, which the sessions that a test starts would inherit, and overwrite the files.
    for option, help_text in {**FILES, LOG: _LOG_HELP}.items():
        reports.addoption(
            flag(option),
            dest=option,
            type=_argument_type(option_types.text, "the path of a file"),
            default=None,
            metavar="FILE",
            help=help_text,
        )
    # These describe the suite rather than one session, so they can only be set in the ini file.
    parser.addini(
        RULES,
        "marks for tests whose files have none, one on a line: tests/gpu/*: devices(1)",
        type="linelist",
        default=[],
    )
    parser.addini(
        ADOPT,
        "the harness whose tests run in warm worlds as they are: torch (its MultiProcessTestCase)",
        type="string",
        default="",
    )


def is_distributed(config: pytest.Config) -> bool:
    """Return whether xdist distributes the tests of the session; `config` is that of the controller or of a worker."""
    # xdist sets `dist` to "no" in its workers.
    return getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")


def plans(config: pytest.Config) -> bool:
    """Return True if the session should show a plan (``--accel-plan``)."""
    return config.getoption(PLAN, None) is not None


def jitter(config: pytest.Config) -> int | None:
    """Return the seed of ``--accel-jitter``; None without this option. For a driver or a rank."""
    seed: int | None = _find(config, JITTER, _OPTIONS[JITTER])
    return seed


def has_resources(config: pytest.Config) -> bool:
    """Return whether the project names resources (``accel_resources``). For a driver or a rank."""
    return _find(config, RESOURCES, _OPTIONS[RESOURCES]) is not None


def shows_in_ci(settings: Settings) -> bool:
    """Return True if GitHub should show the session's summary: not that of a session which a test has started."""
    return settings.ci and bool(os.environ.get("GITHUB_STEP_SUMMARY")) and "PYTEST_CURRENT_TEST" not in os.environ


def planned_machine(config: pytest.Config) -> tuple[str, int] | None:
    """Return kind and number of the devices that the plan assumes; None for a plan of this machine, or no plan."""
    return config.getoption(PLAN, None) or None


def remove_output(path: str, option: str) -> None:
    """Remove an earlier file of `option`. Raise ``pytest.UsageError`` if `path` is another file."""
    from pytest_accel.core import whole_file

    try:
        whole_file.remove(path, BEGINNINGS[option])
    except FileExistsError as error:
        raise pytest.UsageError(f"{flag(option)} {path}: {error.strerror}; name a new file, or remove it") from None


def output_path(config: pytest.Config, option: str) -> str | None:
    """Return the path of the file of `option`, one of `FILES`; None without this option.

    Works before pytest has fully parsed the command line.
    """
    path: str | None = config.getoption(option, None) or getattr(config.known_args_namespace, option, None)
    return path if path is None or option == LOG else own_path(path)


def own_path(path: str) -> str:
    """Return the path that this process writes to for the file or folder `path`: ``record.rank-1.jsonl``.

    If a launcher has started several processes, and each is a session, they have one command line. All but the first
    get the rank into the name, so that none overwrites the file of another.
    """
    process = launcher_env.find_here()  # None in a session of all these processes, whose rank 0 has no such variables.
    if process is None or process.rank == 0:
        return path
    name, suffix = os.path.splitext(path)
    return f"{name}.rank-{process.rank}{suffix}"


def settings(config: pytest.Config) -> Settings:
    """Return the settings of the session. Raise ``pytest.UsageError`` for a value that is not allowed."""
    values: dict[str, Any] = {
        definition.field: _find(config, option, definition) for option, definition in _OPTIONS.items()
    }
    _check_variables()
    explicit = {field: value for field, value in values.items() if value is not None}
    return Settings(info=config.getoption(INFO), **explicit)


def sees_launchers(early_config: pytest.Config) -> bool:
    """Return True if the processes of a launcher form one session. Works before the command line is fully parsed.

    They do not on a cluster: a launcher such as srun may have started the cluster, and pytest in only one process.
    """
    launcher, cluster = (
        getattr(early_config.known_args_namespace, option, None) or _find(early_config, option, _OPTIONS[option])
        for option in (LAUNCHER, CLUSTER)
    )
    return launcher in ("on", "spread") and cluster is None


def given(config: pytest.Config, options: Sequence[str]) -> list[str]:
    """Return command line arguments for those of `options` that the command line or the environment sets."""
    words: list[str] = []
    for option in options:
        value = config.getoption(option, None)
        if value is None:
            value = _from_environment(option, _OPTIONS[option])
        if value is not None and value is not False:
            words += (
                [flag(option)]
                if value is True
                else [flag(option), f"{value:g}" if isinstance(value, float) else str(value)]
            )
    return words


def add_arguments(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Add `options` to a parser that is not pytest's, in the same form as in pytest."""
    for option in options:
        definition = _OPTIONS[option]
        parser.add_argument(
            flag(option),
            dest=option,
            type=_argument_type(definition.read, definition.allowed),
            metavar=definition.metavar,
            help=definition.help,
        )


def settings_without_pytest(arguments: argparse.Namespace) -> Settings:
    """Return the settings from the environment and `arguments`, which `add_arguments` has defined; read no ini file.

    Raise ``pytest.UsageError`` for a value that is not allowed.
    """
    values: dict[str, Any] = {}
    for option, definition in _OPTIONS.items():
        value = getattr(arguments, option, None)
        values[definition.field] = _from_environment(option, definition) if value is None else value
    return Settings(**{field: value for field, value in values.items() if value is not None})


def _find(config: pytest.Config, option: str, definition: _Option) -> Any:
    """Return the value of `option` from the first source that sets it, or None."""
    if (value := config.getoption(option, None)) is not None:
        return value
    overridden = getattr(config.known_args_namespace, "override_ini", None) or ()
    is_overridden = any(text.partition("=")[0] == option for text in overridden)
    if not is_overridden and (value := _from_environment(option, definition)) is not None:
        return value
    source = f"ini option {option}"
    try:
        value = config.getini(option)
    except (ValueError, TypeError, pytest.UsageError) as error:
        # pytest cannot convert the value. The class of the error depends on pytest's version; its text has the value.
        toml = _IN_TOML.get(definition.ini_type, "")
        raise pytest.UsageError(f"{source}: must be {name_kinds(definition.allowed)}{toml}: {error}") from None
    return None if value is None else _read(definition, value, source)


def _check_variables() -> None:
    """Raise ``pytest.UsageError`` for a variable that sets nothing: a misspelt requirement must not be silent."""
    for variable in os.environ:
        if variable.startswith("PYTEST_ACCEL_") and variable not in _OTHER_VARIABLES:
            known = list(map(environment_variable, _OPTIONS))
            if variable not in known:
                from difflib import get_close_matches

                close = get_close_matches(variable, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise pytest.UsageError(f"environment variable {variable}: there is no such setting{hint}")


def _from_environment(option: str, definition: _Option) -> Any:
    variable = environment_variable(option)
    # An empty variable counts as unset, because CI files often set variables without a value.
    text = os.environ.get(variable, "").strip()
    return _read(definition, text, f"environment variable {variable}") if text else None


def _read(definition: _Option, value: object, source: str) -> Any:
    try:
        return definition.read(value)
    except option_types.ExplainedError as error:
        raise pytest.UsageError(f"{source}: {error}") from None
    except ValueError:
        raise pytest.UsageError(f"{source}: must be {name_kinds(definition.allowed)}, got {value!r}") from None
