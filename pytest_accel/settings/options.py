"""Options of the plugin, and the :class:`Settings` from the command line, the environment and the ini file.

Each setting has one name in three forms: ``--accel-order`` on the command line, ``PYTEST_ACCEL_ORDER`` in the
environment, ``accel_order`` in the ini file. If several are given, the first in this order counts. Some settings have
no command line option, and some none in the ini file. pytest's ``-o accel_order=pci`` counts as the former.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

if TYPE_CHECKING:
    from pytest_accel.hardware.inventory import Machine

ACCEL = "accel"
IDS = "accel_ids"
ORDER = "accel_order"
PRELOAD = "accel_preload"
LAUNCHER = "accel_launcher"
CLUSTER = "accel_cluster"
INFO = "accel_info"
PLAN = "accel_plan"
RECORD = "accel_record"
LOG = "accel_log"
REPORT = "accel_report"
RULES = "accel_rules"
ADOPT = "accel_adopt"
JITTER = "accel_jitter"
RESOURCES = "accel_resources"


class Settings(NamedTuple):
    """The values of all settings of one session (no dataclass, which takes a millisecond to define): see the help."""

    accel: str = "auto"
    ids: str | None = None
    order: str = "fastest"
    require: tuple[tuple[str, int], ...] = ()
    """Pairs of a kind and the minimum number of its devices."""
    strict: bool = False
    share: str | None = None
    """The share as given (`option_types.parse_share`); None for exclusive devices."""
    busy: Literal["ignore", "skip", "wait"] = "ignore"
    wait: float | None = None
    timeout: float = 300.0
    fresh: bool = False
    output: str | None = None
    pdb_rank: int | None = None
    leaks: Literal["warn", "fail", "off"] = "warn"
    schedule: Literal["on", "off", "always"] = "on"
    launcher: Literal["on", "off"] = "off"
    select: str | None = None
    shard: tuple[int, int] | None = None
    """Number of the part that this session runs (from 1), and number of parts."""
    durations: str | None = None
    cluster: str | None = None
    preload: tuple[str, ...] | Literal["none"] = ()
    marks: Literal["own", "project"] | None = None
    rank_plugins: tuple[tuple[str, bool], ...] = ()
    """Pairs of a plugin's name and True if ranks call all its hooks, False if ranks run without it."""
    resources: tuple[tuple[str, int], ...] = ()
    """Pairs of a named resource and how many there are; bytes of ``memory``."""
    jitter: int | None = None


class _Option(NamedTuple):
    """Definition of a setting."""

    read: str
    """Name of the function in `option_types` that converts text, or an ini value that pytest has converted."""
    metavar: str | None
    """The value in the help of its option; None for a switch, or a setting without an option."""
    ini: Literal["string", "bool", "args"] | None
    """Type of its ini setting; None for a setting about one session, which ``addopts`` can give."""
    allowed: str
    """Allowed values, for error messages."""
    help: str


_TIMES = "300 (seconds), 90s, 5min or 1.5h"
_OPTIONS: dict[str, _Option] = {
    ACCEL: _Option(
        *("text", "KIND", "string", "auto, none, or a kind such as cuda, cpu:4 or sim:8"),
        "the accelerators that the session uses: auto (default), none, a kind, cpu:4, sim:8, sim:topology.toml",
    ),
    IDS: _Option(
        *("device_names", "IDS", None, "indices or ids of devices with commas between them"),
        "the devices that the session may use: 0,2 or ids (default: all that it can see)",
    ),
    ORDER: _Option(
        *("order", "ORDER", "string", "fastest, pci, free, near, or ids with commas between them"),
        "the order in which devices are numbered: fastest (default), pci, free, near, or ids with commas",
    ),
    "accel_require": _Option(
        *("require", "KIND:N", "string"),
        "KIND:N or a comma-separated list with each kind once, where N is an int >= 1 and KIND one of {kinds}",
        "fail the session at once if there are fewer devices: cuda:4, or several kinds with commas",
    ),
    "accel_strict": _Option(
        *("boolean", None, "bool", "on or off"),
        "make a skip for missing hardware a failure",
    ),
    "accel_wait": _Option(
        *("time", "TIME", "string", f"a time >= 0 such as {_TIMES}"),
        f"how long a test may wait for its devices, before it is an error: {_TIMES} (default: no limit)",
    ),
    "accel_timeout": _Option(
        *("positive_time", "TIME", "string", f"a time > 0 such as {_TIMES}"),
        f"how long each phase of a test in a world may take: {_TIMES} (default: 300)",
    ),
    "accel_output": _Option(
        *("text", "DIR", "string", "the path of a folder"),
        "keep what each rank writes in this folder, one file for each world and rank",
    ),
    "accel_pdb_rank": _Option(
        *("rank", "N", None, "an int >= 0"),
        "the rank that --pdb, --trace and breakpoint() debug (default: the first that fails or comes to a "
        "breakpoint; 0 under --trace)",
    ),
    LAUNCHER: _Option(
        *("launcher", "WHAT", "string", "on or off"),
        "pytest started by torchrun, accelerate, deepspeed, mpirun or srun: each process runs all tests by itself "
        "(off, default), or the processes are the ranks of one session (on)",
    ),
    CLUSTER: _Option(
        *("cluster", "CLUSTER", "string"),
        "ray or ray:HOST:PORT, the address of the cluster's head (ray:// is Ray's client server)",
        "run the tests that need devices or several machines on a Ray cluster: this machine's (ray), or the one "
        "whose head listens there (ray:HOST:PORT; needs Ray: pytest-accel[ray])",
    ),
    "accel_select": _Option(
        *("condition", "CONDITION", None, "a condition such as 'devices >= 2'"),
        'run only the tests whose needs meet this condition: "devices >= 2", "not marked", "fits"',
    ),
    "accel_shard": _Option(
        *("shard", "I/N", None, "I/N with ints 1 <= I <= N"),
        "run part I of N parts of the selected tests, which take about as long on equal machines: 2/4",
    ),
    "accel_durations": _Option(
        *("text", "FILE", "string", "the path of a file"),
        "read the times of tests from this file, if it exists, and add those of this session to it",
    ),
    JITTER: _Option(
        *("rank", "SEED", None, "an int >= 0"),
        "delay each rank for a random time of up to 20 ms before each collective and message, and give each rank a "
        "hash seed of its own, to find races; a failure names this seed",
    ),
    "accel_fresh": _Option(
        *("boolean", None, "bool", "on or off"),
        "start new processes for each test",
    ),
    "accel_share": _Option(
        *("share", None, "string", "a fraction > 0 and <= 1 such as 0.25, or a positive size such as 8GiB"),
        "the share of each device that a test takes if its mark has no share=: 0.25 for four tests on a device, or "
        "8GiB (default: whole devices)",
    ),
    "accel_busy": _Option(
        *("busy", None, "string", "ignore, skip or wait"),
        "for devices that processes outside the session use: ignore that (default), skip the devices, or wait "
        "until they are free",
    ),
    "accel_leaks": _Option(
        *("leaks", None, "string", "warn, fail or off"),
        "a test that leaves something behind in its ranks: warn (default), fail it, or say nothing (off)",
    ),
    "accel_schedule": _Option(
        *("schedule", None, "string", "on, off or always"),
        "on (default): under xdist's --dist load and worksteal, choose the worker of each test by the devices that "
        "tests need; off: xdist chooses; always: as on, and without -n run tests that can share a world one after "
        "the other",
    ),
    "accel_marks": _Option(
        *("mark_owner", None, "string", "own or project"),
        "the owner of the marks devices and distributed: the plugin (own) or the project (default: the project for a "
        "mark that it registers)",
    ),
    PRELOAD: _Option(
        *("preload", None, "args"),
        "none, or names of modules (none of jax, jaxlib, tensorflow, cupy, paddle, which do not survive a fork)",
        "names of modules that the fork server imports besides torch and pytest; none: not even torch",
    ),
    "accel_rank_plugins": _Option(
        *("rank_plugins", None, "args", "-NAME or +NAME, or several with spaces"),
        "plugins that ranks do not load (-NAME), or whose hooks they all call (+NAME)",
    ),
    RESOURCES: _Option(
        *("resources", None, "string"),
        "NAME: COUNT, several with commas or on lines of their own, where NAME is of lower-case letters, digits, - "
        "and _, and no kind of device, and COUNT an int from 1 to 512; cores may also be auto, and memory is auto "
        "or a size of 1GiB or more",
        "resources besides devices that tests need, each with its number: license: 2, port-9000: 1, memory: auto, "
        "cores: auto",
    ),
}
"""The settings of a session, then of a suite. The latter have no command line option (``-o accel_leaks=fail``)."""
_PLAN = _Option(
    *("planned_machine", "KIND:N", None),
    "nothing (this machine; a path goes before the option) or KIND:N such as cuda:8, with N an int from 1 to 256 and "
    "KIND one of {kinds}",
    "show how long the tests would take on this machine, or on one with N devices of KIND (cuda:8), and with how many "
    "workers, then stop",
)
FILES = {
    RECORD: "write each event of the session to this file: tests and their phases, worlds, waits, devices; `python -m "
    "pytest_accel trace`, `report`, `summary` and `census` read such files",
    REPORT: "write an HTML page about the session to this file: tests, use of devices, waits, failures, skips",
}
"""The options with the path of a file to write, and their help."""
BEGINNINGS = {RECORD: b"{", REPORT: b"<", LOG: b"012"}
"""The possible first bytes of each file; the lines of ``--accel-log`` begin with the time."""
_LOG_HELP = (
    "write the steps of all processes to this file: joining, starting, leasing, forking, connecting, running, ending; "
    "PYTEST_ACCEL_LOG does the same for agents on other machines"
)
_OTHER_VARIABLES = ("ADDOPTS", "HELD", "LOCK_DIR", "LOG", "SECRET", "SESSION", "TESTRUNUID")
"""Variables of the plugin, after ``PYTEST_ACCEL_``, that are no settings; their modules have their meaning."""


def environment_variable(option: str) -> str:
    """Return the environment variable that sets `option`: ``PYTEST_ACCEL_ORDER`` for ``accel_order``."""
    return f"PYTEST_{option.upper()}"


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def add_options(parser: pytest.Parser) -> None:
    """Add every option and ini name of the plugin to `parser`."""
    group = parser.getgroup("accel", "accelerators and ranks: what runs on what")
    reports = parser.getgroup("accel-reports", "accelerators and ranks: reports and debugging")
    for option, definition in _OPTIONS.items():
        if definition.metavar is not None:
            its_group = reports if option in ("accel_output", "accel_pdb_rank") else group
            _add_argument(its_group.addoption, option, definition)
        if definition.ini is not None:
            parser.addini(option, definition.help, type=definition.ini, default=None)
    strict, info = "accel_strict", "show the devices, their order, their masks and who holds what, then stop"
    group.addoption(flag(strict), dest=strict, action="store_const", const=True, help=_OPTIONS[strict].help)
    reports.addoption(flag(INFO), dest=INFO, action="store_true", default=False, help=info)
    _add_argument(reports.addoption, PLAN, _PLAN, nargs="?", const=())
    # Without a form in the environment, which the sessions that a test starts would inherit, and overwrite the files.
    for option, help_text in {**FILES, LOG: _LOG_HELP}.items():
        _add_argument(reports.addoption, option, _Option("text", "FILE", None, "the path of a file", help_text))
    # These describe the suite rather than one session, so they can only be set in the ini file.
    rules = "marks for tests whose files have none, one on a line: tests/gpu/*: devices(1)"
    parser.addini(RULES, rules, type="linelist", default=[])
    harness = (
        "what runs in processes that have imported torch, without changes: torch (tests of its MultiProcessTestCase), "
        "spawn (processes that tests spawn), or both"
    )
    parser.addini(ADOPT, harness, type="string", default="")


def is_distributed(config: pytest.Config) -> bool:
    """Return whether xdist distributes the tests of the session; `config` is the controller's or a worker's."""
    return getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")  # Workers have dist "no".


def plans(config: pytest.Config) -> bool:
    """Return True if the session should show a plan (``--accel-plan``)."""
    return config.getoption(PLAN, None) is not None


def _from_command_line(config: pytest.Config, option: str) -> Any:
    """Return the value of `option` on the command line, or None; also before this is fully parsed."""
    value = config.getoption(option, None)
    return getattr(config.known_args_namespace, option, None) if value is None else value


def find(config: pytest.Config, option: str) -> Any:
    """Return the value of `option` from the first source that sets it, or None. For a driver or a rank."""
    definition = _OPTIONS[option]
    if (value := _from_command_line(config, option)) is not None:
        return value
    overridden = getattr(config.known_args_namespace, "override_ini", None) or ()
    is_overridden = any(text.partition("=")[0] == option for text in overridden)
    if not is_overridden and (value := _from_environment(option)) is not None:
        return value
    if definition.ini is None:
        return None
    source = f"ini option {option}"
    try:
        value = config.getini(option)
    except (ValueError, TypeError, pytest.UsageError) as error:
        # pytest cannot convert the value. The class of the error depends on pytest's version; its text has the value.
        raise pytest.UsageError(f"{source}: must be {_allowed(definition)}: {error}") from None
    return None if value is None else _read(definition, value, source)


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
    """Return the path of the file of `option`, one of `FILES`; None without this option."""
    path: str | None = _from_command_line(config, option)
    return path if path is None or option == LOG else own_path(path)


def own_path(path: str) -> str:
    """Return the path that this process writes to for the file or folder `path`: ``record.rank-1.jsonl``.

    If a launcher has started several processes, and each is a session, they have one command line. All but the first
    get the rank into the name, so that none overwrites the file of another.
    """
    from pytest_accel.core import launcher_env

    process = launcher_env.find_here()  # None in a session of all these processes, whose rank 0 has no such variables.
    if process is None or process.rank == 0:
        return path
    name, suffix = os.path.splitext(path)
    return f"{name}.rank-{process.rank}{suffix}"


def settings(config: pytest.Config) -> Settings:
    """Return the settings of the session. Raise ``pytest.UsageError`` for a value that is not allowed."""
    values = {option: find(config, option) for option in _OPTIONS}
    # A misspelt requirement must not be silent.
    known = {*map(environment_variable, _OPTIONS), *(f"PYTEST_ACCEL_{name}" for name in _OTHER_VARIABLES)}
    for variable in os.environ:
        if variable.startswith("PYTEST_ACCEL_") and variable not in known:
            from difflib import get_close_matches

            close = get_close_matches(variable, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise pytest.UsageError(f"environment variable {variable}: there is no such setting{hint}")
    return _made_of(values)


def sees_launchers(early_config: pytest.Config) -> bool:
    """Return True if the processes of a launcher form one session.

    They do not on a cluster: a launcher such as srun may have started the cluster, and pytest in only one process.
    """
    return find(early_config, LAUNCHER) == "on" and find(early_config, CLUSTER) is None


def given(config: pytest.Config, options: Sequence[str]) -> list[str]:
    """Return command line arguments for the `options` that the command line or the environment sets."""
    words: list[str] = []
    for option in options:
        if (value := config.getoption(option, None)) is not None or (value := _from_environment(option)) is not None:
            text = f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else str(value)
            words += [flag(option), text] if _OPTIONS[option].metavar else ["-o", f"{option}={text}"]
    return words


def add_arguments(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Add `options` to a parser that is not pytest's, in the same form as in pytest."""
    for option in options:
        _add_argument(parser.add_argument, option, _OPTIONS[option])


def _add_argument(add: Callable[..., object], option: str, definition: _Option, **more: object) -> None:
    def convert(value: str) -> Any:
        try:
            return _convert(definition, value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    add(flag(option), dest=option, type=convert, metavar=definition.metavar, help=definition.help, **more)


def settings_without_pytest(arguments: argparse.Namespace) -> Settings:
    """Return the settings from the environment and `arguments`, which `add_arguments` has defined; read no ini file.

    Raise ``pytest.UsageError`` for a value that is not allowed.
    """
    values = {option: getattr(arguments, option, None) for option in _OPTIONS}
    return _made_of({one: _from_environment(one) if value is None else value for one, value in values.items()})


def _made_of(values: Mapping[str, Any]) -> Settings:
    return Settings(**{one.removeprefix("accel_"): value for one, value in values.items() if value is not None})


def _from_environment(option: str) -> Any:
    variable = environment_variable(option)
    # An empty variable counts as unset, because CI files often set variables without a value.
    text = os.environ.get(variable, "").strip()
    return _read(_OPTIONS[option], text, f"environment variable {variable}") if text else None


def _read(definition: _Option, value: object, source: str) -> Any:
    try:
        return _convert(definition, value)
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None


def _convert(definition: _Option, value: object) -> Any:
    """Return the value of a setting. Raise ValueError with a text that says what is allowed."""
    if definition.read == "text" and isinstance(value, str) and value.strip():
        return value.strip()  # Without the import, which few sessions need.
    from pytest_accel.settings import option_types, select_expression

    try:
        return getattr(option_types, definition.read)(value)
    except select_expression.ExplainedError:
        raise
    except ValueError:
        raise ValueError(f"must be {_allowed(definition)}, got {value!r}") from None


def _allowed(definition: _Option) -> str:
    from pytest_accel.core.kinds import name_kinds  # Imported here, because few sessions need it.

    return name_kinds(definition.allowed)


def machine_for(settings: Settings) -> Machine:
    """Return the machine with the kind, devices, order and treatment of busy devices in `settings`.

    If this process runs inside a rank, the machine has only the devices that the rank holds.

    Raise ValueError for a kind that is not allowed.
    """
    # Imported here, because most sessions need no devices.
    from pytest_accel.hardware.held_devices import held_here
    from pytest_accel.hardware.inventory import Machine

    return Machine(
        settings.accel,
        settings.ids,
        settings.order,
        skip_busy=settings.busy == "skip",
        held=held_here(),
        resources=dict(settings.resources),
    )
