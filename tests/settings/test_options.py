"""Tests of the options: command line, environment variables and ini files, their errors, and the reference page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.kinds import kinds
from pytest_accel.hardware.kernel_files import cpu_slots, usable_memory
from pytest_accel.settings import options as accel_config
from pytest_accel.settings.options import Settings, environment_variable

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md"
WITHOUT_INI = {f"accel_{name}" for name in ("ids", "pdb_rank", "select", "shard", "jitter")}
"""The settings that an ini file cannot give: they are about one session."""
WITHOUT_FLAG = {
    *("accel_fresh", "accel_share", "accel_busy", "accel_leaks", "accel_schedule", "accel_marks"),
    *("accel_preload", "accel_rank_plugins", "accel_resources"),
}
"""The settings that have no option of their own: they are about a suite."""
MOST_FLAGS, MOST_INI = 20, 21
KINDS = ", ".join(kinds())
REQUIRE = f"KIND:N or a comma-separated list with each kind once, where N is an int >= 1 and KIND one of {KINDS}"
SWITCH = "on or off"
TIME = "such as 300 (seconds), 90s, 5min or 1.5h"
SHARE = "a fraction > 0 and <= 1 such as 0.25, or a positive size such as 8GiB"
IDS = "indices or ids of devices with commas between them"
CLUSTER = "ray or ray:HOST:PORT, the address of the cluster's head (ray:// is Ray's client server)"
ORDER = "fastest, pci, free, near, or ids with commas between them"
ACCEL = "auto, none, or a kind such as cuda, cpu:4 or sim:8"
PRELOAD = "none, or names of modules (none of jax, jaxlib, tensorflow, cupy, paddle, which do not survive a fork)"

# Option, its text, the field of the settings and its value. The text is the same on the command line, in the
# environment and in an ini file.
GOOD: list[tuple[str, str, str, Any]] = [
    ("accel", "sim:8", "accel", "sim:8"),
    ("accel_ids", "0,2", "ids", "0,2"),
    ("accel_order", "pci", "order", "pci"),
    ("accel_require", "cuda:4", "require", (("cuda", 4),)),
    ("accel_require", "cuda:4, cpu:2", "require", (("cuda", 4), ("cpu", 2))),
    ("accel_pdb_rank", "1", "pdb_rank", 1),
    ("accel_output", "some/logs", "output", "some/logs"),
    ("accel_leaks", "fail", "leaks", "fail"),
    ("accel_schedule", "always", "schedule", "always"),
    ("accel_launcher", "on", "launcher", "on"),
    ("accel_cluster", "ray:head-1.lan:6379", "cluster", "ray:head-1.lan:6379"),
    ("accel_marks", "project", "marks", "project"),
    ("accel_busy", "wait", "busy", "wait"),
    ("accel_share", "0.25", "share", "0.25"),
    ("accel_timeout", "20", "timeout", 20.0),
    ("accel_timeout", "5min", "timeout", 300.0),
    ("accel_wait", "90 s", "wait", 90.0),
    ("accel_wait", "1.5h", "wait", 5400.0),
    ("accel_select", "devices >= 2", "select", "devices >= 2"),
    ("accel_shard", "2/4", "shard", (2, 4)),
    ("accel_jitter", "7", "jitter", 7),
    ("accel_preload", "none", "preload", "none"),
    ("accel_preload", "numpy, torch.nn numpy", "preload", ("numpy", "torch.nn")),
    ("accel_rank_plugins", "-timeout +my.own", "rank_plugins", (("timeout", False), ("my.own", True))),
    ("accel_resources", "license: 2,port-9000:1", "resources", (("license", 2), ("port-9000", 1))),
    (
        "accel_resources",
        "license: 2\n  memory: 4GiB\n  cores: 2",
        "resources",
        (("license", 2), ("memory", 2**32), ("cores", 2)),
    ),
    (
        "accel_resources",
        "memory: auto, cores: auto",
        "resources",
        (("memory", max(2**30, usable_memory())), ("cores", cpu_slots())),
    ),
]
SWITCHES = [("accel_strict", "strict"), ("accel_fresh", "fresh")]
RESOURCES = (
    "NAME: COUNT, several with commas or on lines of their own, where NAME is of lower-case letters, digits, - and _, "
    "and no kind of device, and COUNT an int from 1 to 512; cores may also be auto, and memory is auto or a size of "
    "1GiB or more"
)
RANK_PLUGINS = "-NAME or +NAME, or several with spaces"
BAD = [
    *(
        ("accel_preload", text, PRELOAD)
        for text in ("none numpy", "my-package", "a..b", "a/b.py", "numpy jax", "cupy.cuda")
    ),
    *(("accel_rank_plugins", text, RANK_PLUGINS) for text in ("timeout", "-", "- timeout", "-a,+b")),
    ("accel_pdb_rank", "1.5", "an int >= 0"),
    ("accel_shard", "3/2", "I/N with ints 1 <= I <= N"),
    *((option, "maybe", SWITCH) for option in ("accel_strict", "accel_fresh")),
    ("accel_marks", "theirs", "own or project"),
    ("accel_require", "cuda", REQUIRE),
    ("accel_require", "cuda:0", REQUIRE),
    ("accel_require", "cuda:two", REQUIRE),
    ("accel_require", "gpu:2", REQUIRE),
    ("accel_require", "cuda:1,cuda:2", REQUIRE),
    ("accel_require", "cuda:1,", REQUIRE),
    ("accel_leaks", "kill", "warn, fail or off"),
    ("accel_schedule", "maybe", "on, off or always"),
    ("accel_launcher", "torchrun", "on or off"),
    ("accel_cluster", "ray:6379", CLUSTER),
    ("accel_busy", "kill", "ignore, skip or wait"),
    *(("accel_share", text, SHARE) for text in ("0", "4", "nan", "8GB8", "-8GiB")),
    *(("accel_wait", text, f"a time >= 0 {TIME}") for text in ("-1", "nan", "soon", "5m", "s", "1h30min")),
    *(("accel_timeout", text, f"a time > 0 {TIME}") for text in ("0", "0s", "inf", "5 minutes")),
    *(
        ("accel_resources", text, RESOURCES)
        for text in ("license", "license: 0", "license: 513", "cores: 1000000", "License: 1", "a: 1, a: 2", "cuda: 1")
    ),
    *(("accel_resources", text, RESOURCES) for text in ("auto: 1", "license: auto", "memory: 1MiB", "memory: 4", ",")),
    ("accel", "", ACCEL),
    ("accel_ids", "", IDS),
    ("accel_order", "", ORDER),
    ("accel_require", "", REQUIRE),
    ("accel_busy", "", "ignore, skip or wait"),
]


class Probe:
    """A plugin that only adds the options and reads them."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        accel_config.add_options(parser)

    def pytest_configure(self, config: pytest.Config) -> None:
        accel_config.settings(config)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the plugin's environment variables, and keep runs within tests from loading installed plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in [name for name in os.environ if name == "PYTEST_ACCEL" or name.startswith("PYTEST_ACCEL_")]:
        monkeypatch.delenv(name)


def settings(pytester: pytest.Pytester, *args: str) -> Settings:
    """Return the settings of a run with the arguments `args`."""
    pytester.plugins = [Probe()]
    return accel_config.settings(pytester.parseconfig(*args))


def usage_error(pytester: pytest.Pytester, *args: str) -> str:
    """Return the text of the usage error that the arguments `args` cause."""
    with pytest.raises(pytest.UsageError) as caught:
        settings(pytester, *args)
    return str(caught.value)


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def write_ini(pytester: pytest.Pytester, option: str, text: str) -> None:
    """Write an ini file that sets `option` to `text`."""
    pytester.makeini(f"[pytest]\n{option} = {text}\n")


def test_each_form_sets_the_field(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(pytester) == Settings()
    for option, text, field, value in GOOD:
        expected = Settings(**{field: value})
        words = ["-o", f"{option}={text}"] if option in WITHOUT_FLAG else [flag(option), text]
        assert settings(pytester, *words) == expected
        with monkeypatch.context() as patched:
            patched.setenv(environment_variable(option), text)
            assert settings(pytester) == expected
        if option not in WITHOUT_INI:
            write_ini(pytester, option, text)
            assert settings(pytester) == expected
            (pytester.path / "tox.ini").unlink()
    for option, field in SWITCHES:
        words = ["-o", f"{option}=on"] if option in WITHOUT_FLAG else [flag(option)]
        assert getattr(settings(pytester, *words), field) is True
        write_ini(pytester, option, "true")
        assert getattr(settings(pytester), field) is True
        for text, value in ("No", False), ("ON", True):
            with monkeypatch.context() as patched:
                patched.setenv(environment_variable(option), text)
                assert getattr(settings(pytester), field) is value


def test_the_command_line_overrides_the_environment_which_overrides_the_ini_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ini(pytester, "accel_order", "pci")
    assert settings(pytester).order == "pci"
    monkeypatch.setenv("PYTEST_ACCEL_ORDER", " ")
    assert settings(pytester).order == "pci", "an empty variable is unset"
    monkeypatch.setenv("PYTEST_ACCEL_ORDER", "free")
    assert settings(pytester).order == "free"
    assert settings(pytester, "-o", "accel_order=fastest").order == "fastest"
    assert settings(pytester, "-o", "accel_order=fastest", "--accel-order", "near").order == "near"
    monkeypatch.setenv("PYTEST_ACCEL_ORDER", "nowhere!")
    assert settings(pytester, "--accel-order", "near").order == "near", "what is overridden is not checked"


def test_a_value_that_is_not_allowed_is_an_error_that_names_its_source(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, text, allowed in BAD:
        if option not in WITHOUT_FLAG and (option, "bool") not in [(name, "bool") for name, _ in SWITCHES]:
            lines = usage_error(pytester, f"{flag(option)}={text}").splitlines()
            error = f"error: argument {flag(option)}: must be {allowed}, got {text!r}"
            assert any(line.endswith(error) for line in lines), lines
        if text:  # An empty variable is unset.
            with monkeypatch.context() as patched:
                patched.setenv(variable := environment_variable(option), text)
                assert usage_error(pytester) == f"environment variable {variable}: must be {allowed}, got {text!r}"
        if option not in WITHOUT_INI:
            write_ini(pytester, option, text)
            message = usage_error(pytester)
            end = ":" if option in dict(SWITCHES) else ", got "
            assert message.startswith(f"ini option {option}: must be {allowed}{end}")
            assert text in message or option in ("accel_preload", "accel_rank_plugins")
            (pytester.path / "tox.ini").unlink()


def test_a_plan_is_for_this_machine_or_a_number_of_devices(pytester: pytest.Pytester) -> None:
    for value in ("abacus:8", "cuda:0", "cuda", "cuda:257", ":8", "cuda:", "8xcuda", "90s", "sim:1,cuda:1"):
        error = usage_error(pytester, f"--accel-plan={value}")
        assert "--accel-plan: must be nothing (this machine; a path goes before the option) or KIND:N such as" in error


def test_the_reference_has_the_options_of_the_code(pytester: pytest.Pytester) -> None:
    shown = pytester.runpytest_inprocess("--help", plugins=[Probe()]).stdout.str()
    assert re.findall(r"^accelerators and ranks: (.*):$", shown, re.MULTILINE) == [
        "what runs on what",
        "reports and debugging",
    ]
    flags = set(re.findall(r"^  (--accel[\w-]*)", shown, re.MULTILINE))
    ini_types = dict(re.findall(r"^  (accel\w*) \((\w+)\):", shown, re.MULTILINE))
    assert (len(flags), len(ini_types)) == (MOST_FLAGS, MOST_INI), "more are a wall"
    text = REFERENCE.read_text(encoding="utf-8")
    table = text.partition("\n| Command line |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line[1:-1].split(" |")] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(--[\w-]+)", row[0])} == flags
    for name in [*flags, *(name for name in ini_types if flag(name) not in flags)]:
        assert f"\n## `{name}`\n" in text
    documented = {}
    for command_line, environment, ini_name, _, default in rows:
        if not ini_name:
            continue
        (name,) = re.findall(r"`(\w+)`", ini_name)
        documented[name] = (re.findall(r"\((\w+)\)$", ini_name) or ["string"])[0]
        if flag(name) in flags:
            assert command_line.startswith(f"[`{flag(name)}")
        if name in ("accel_rules", "accel_adopt"):
            assert environment == ""
            continue
        assert environment == f"`{environment_variable(name)}`"
        value = getattr(Settings(), name.removeprefix("accel_") if name != "accel" else name)
        match value:
            case str():
                assert default == f"`{value}`"
            case bool():
                assert default == ("on" if value else "off")
            case float():
                assert default == f"{value:g}"
    assert documented == ini_types


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest reads native TOML from 9.0 on")
def test_the_ini_and_toml_examples_of_the_reference_give_the_same_settings(pytester: pytest.Pytester) -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for language, file in (("ini", "pytest.ini"), ("toml", "pyproject.toml")):
        (snippet,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        (pytester.path / file).write_text(snippet, encoding="utf-8")
        assert settings(pytester) == Settings(order="pci", timeout=60.0, preload=("numpy", "torch.nn"))
        (pytester.path / file).unlink()


def test_a_variable_that_is_no_setting_is_an_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a misspelt requirement of a CI job would not be noticed."""
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", "/nowhere")
    settings(pytester)
    monkeypatch.setenv("PYTEST_ACCEL_REQIRE", "cuda:2")
    about = "environment variable PYTEST_ACCEL_REQIRE: there is no such setting"
    assert usage_error(pytester) == f"{about}; did you mean PYTEST_ACCEL_REQUIRE?"
