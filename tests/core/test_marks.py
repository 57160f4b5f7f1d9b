"""Tests of the marks: their arguments, the values of both marks together, and the closest marks of a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from pytest_accel.core.device import Near, Share
from pytest_accel.core.kinds import kinds
from pytest_accel.core.marks import MARKER_LINES, MarkError, MarkOwners, Marks, closest_marks, has_list, marks_in, read

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "marks.md"
GIB = 1024**3
KINDS = ", ".join(kinds())
DEVICES_ARGUMENTS = "n, at_least, kind, memory, capability, name, share, near, fresh"
DISTRIBUTED_ARGUMENTS = (
    "world_size, at_least, nodes, backend, kind, devices_per_rank, init, timeout, fresh, visible, env, launcher"
)
MEMORY = 'a positive size such as "40GiB", a positive int of bytes or None'
SHARE = 'a fraction > 0 and <= 1, a positive size such as "8GiB" or None'
SIZES = 'an int >= 1, "all" or a non-empty list of them'
TIME = 'a time > 0 such as 300 (seconds), "90s", "5min" or "1.5h" or None'
_COLLECTED = "the world_size with which the test was collected"
_RENAME = "; rename the test's parameter world_size if it has another meaning"
ENV = "a mapping of variable names (str) to values (str) or None"


def devices(*args: Any, **kwargs: Any) -> pytest.Mark:
    return pytest.mark.devices.with_args(*args, **kwargs).mark


def distributed(*args: Any, **kwargs: Any) -> pytest.Mark:
    return pytest.mark.distributed.with_args(*args, **kwargs).mark


def refusal(marks: Marks, world_size: object = None) -> str:
    with pytest.raises(MarkError) as caught:
        read(marks, world_size=world_size)
    return str(caught.value)


def test_no_mark_has_no_arguments() -> None:
    # Without a mark, the value of a parameter called world_size is ignored.
    assert read(Marks()) == read(Marks(), world_size=3) == ({}, {})


@pytest.mark.parametrize(
    ("mark", "arguments"),
    [
        (devices(), {}),
        (devices(3), {"n": 3}),
        (devices("all"), {"n": "all"}),
        (devices("all", at_least=2), {"n": "all", "at_least": 2}),
        (devices(kind="sim"), {"kind": "sim"}),
        (devices(memory="40GiB"), {"memory": 40 * GIB}),
        (devices(capability="9.0"), {"capability": (9, 0)}),
        (devices(name="*H100*"), {"name": "*H100*"}),
        (devices(share=0.25), {"share": Share(fraction=0.25)}),
        (devices(share="8GiB"), {"share": Share(bytes=8 * GIB)}),
        *((devices(2, near=near), {"n": 2, "near": near}) for near in get_args(Near)),
        (devices(fresh=True), {"fresh": True}),
    ],
)
def test_the_arguments_of_devices_are_read(mark: pytest.Mark, arguments: dict[str, object]) -> None:
    assert read(Marks(mark)) == (arguments, {})


@pytest.mark.parametrize(
    ("mark", "arguments"),
    [
        (distributed(), {"world_size": 2}),
        (distributed(4), {"world_size": 4}),
        (distributed("all"), {"world_size": "all"}),
        (distributed("all", at_least=4, nodes=2), {"world_size": "all", "at_least": 4, "nodes": 2}),
        (distributed(4, nodes=2), {"world_size": 4, "nodes": 2}),
        (distributed(nodes=2), {"world_size": 2, "nodes": 2}),
        (distributed(backend="gloo"), {"world_size": 2, "backend": "gloo"}),
        (distributed(kind="cpu"), {"world_size": 2, "kind": "cpu"}),
        (distributed(devices_per_rank=2), {"world_size": 2, "devices_per_rank": 2}),
        (distributed(init=False), {"world_size": 2, "init": False}),
        (distributed(visible="rank"), {"world_size": 2, "visible": "rank"}),
        (distributed(launcher="mpirun"), {"world_size": 2, "launcher": "mpirun"}),
        (distributed(env={"B": "", "A": "1"}), {"world_size": 2, "env": (("A", "1"), ("B", ""))}),
        (distributed(timeout="5min"), {"world_size": 2, "timeout": 300.0}),
        (distributed(timeout=3, fresh=True), {"world_size": 2, "timeout": 3.0, "fresh": True}),
    ],
)
def test_the_arguments_of_distributed_are_read(mark: pytest.Mark, arguments: dict[str, object]) -> None:
    assert read(Marks(None, mark)) == ({}, arguments)


@pytest.mark.parametrize(
    ("marks", "of_devices", "of_ranks"),
    [
        (Marks(devices(2), distributed(4)), {"n": 2}, {"world_size": 4, "devices_per_rank": 2}),
        (Marks(devices(2), distributed(devices_per_rank=2)), {"n": 2}, {"devices_per_rank": 2}),
        # If n is not given, it follows from devices_per_rank.
        (Marks(devices(memory=1), distributed(devices_per_rank=2)), {"n": 2, "memory": 1}, {"devices_per_rank": 2}),
        (Marks(devices(kind="cuda"), distributed()), {"kind": "cuda"}, {"kind": "cuda"}),
        (Marks(devices(), distributed(kind="cuda")), {"kind": "cuda"}, {"kind": "cuda"}),
        (Marks(devices(fresh=True), distributed()), {"fresh": True}, {}),
        (Marks(devices(), distributed(fresh=True)), {}, {"fresh": True}),
    ],
)
def test_the_arguments_of_both_marks_are_combined(
    marks: Marks, of_devices: dict[str, object], of_ranks: dict[str, object]
) -> None:
    assert read(marks) == (of_devices, {"world_size": 2} | of_ranks)


def values(make: object, argument: str, allowed: str, *bad: object) -> list[tuple[object, str, str, object]]:
    return [(make, argument, allowed, value) for value in bad]


@pytest.mark.parametrize(
    ("make", "argument", "allowed", "value"),
    [
        *values(devices, "n", 'an int >= 1 or "all"', 0, -1, True, 1.0, "2", "ALL", None, [2], ["all"]),
        *values(devices, "at_least", "an int >= 1", 0, True, "all", None),
        *values(devices, "kind", f"one of {KINDS} or None", "gpu", "CUDA", "auto", "", 3),
        *values(devices, "memory", MEMORY, 0, -1, True, 1.5, "40", "40 parsecs", "", [1]),
        *values(devices, "capability", 'a version such as "9.0" or None', 9.0, 9, "nine", "", "9.", (9, 0)),
        *values(devices, "name", 'a non-empty pattern such as "*H100*" or None', "", " ", 100),
        *values(devices, "share", SHARE, 0, 0.0, -0.5, 1.01, 2, True, float("nan"), "half", [0.5]),
        *values(devices, "near", "one of nvlink, numa, pcie or None", "infiniband", "", 1),
        *values(devices, "fresh", "True or False", 1, "yes", None),
        *values(
            distributed, "world_size", SIZES, 0, -2, True, 2.0, "2", "ALL", None, [], (), [2, 0], [2, True], [[2]], {2}
        ),
        *values(distributed, "at_least", "an int >= 1", 0, True, "all", None),
        *values(distributed, "nodes", "an int >= 1 or None", 0, -1, True, 2.0, "2", [1]),
        *values(
            distributed,
            "backend",
            "a non-empty str, a non-empty list of them or None",
            "",
            " ",
            1,
            [],
            ["gloo", 3],
            [["gloo"]],
        ),
        *values(distributed, "kind", f"one of {KINDS} or None", "cuda:0", "gpu", 0),
        *values(distributed, "devices_per_rank", "an int >= 1", 0, -1, False, 2.0, None),
        *values(distributed, "init", "True or False", 0, "no", None),
        *values(distributed, "timeout", TIME, 0, -1, True, float("inf"), float("nan"), 10**400, "0s", "-1", "5 m", ""),
        *values(distributed, "fresh", "True or False", 1, None),
        *values(distributed, "visible", "one of world, rank", "all", None, 1),
        *values(distributed, "launcher", '"mpirun" or None', "torchrun", "", True),
        *values(distributed, "env", ENV, [("A", "1")], "A=1", {"A": 1}, {1: "A"}, {"": "1"}, {"A=B": "1"}, {"A": "\0"}),
    ],
)
def test_an_argument_that_is_not_allowed(
    make: Callable[..., pytest.Mark], argument: str, allowed: str, value: object
) -> None:
    mark = make(**{argument: value})
    text = f"@pytest.mark.{mark.name}({argument}={value!r}): {argument} must be {allowed}, got {value!r}"
    assert refusal(Marks(**{mark.name: mark})) == text


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (
            Marks(devices(1, 2)),
            "@pytest.mark.devices(1, 2): at most one argument may be positional, n, and given once",
        ),
        (
            Marks(devices(1, n=2)),
            "@pytest.mark.devices(1, n=2): at most one argument may be positional, n, and given once",
        ),
        (
            Marks(devices(count=2)),
            f"@pytest.mark.devices(count=2): there is no argument count, allowed are {DEVICES_ARGUMENTS}",
        ),
        (
            Marks(None, distributed(nprocs=2)),
            f"@pytest.mark.distributed(nprocs=2): there is no argument nprocs, allowed are {DISTRIBUTED_ARGUMENTS}",
        ),
        (
            Marks(None, distributed([2, 4, 2])),
            "@pytest.mark.distributed(world_size=[2, 4, 2]): world_size must name each size once, got [2, 4, 2]",
        ),
        (
            Marks(None, distributed(backend=["gloo", "gloo"])),
            "@pytest.mark.distributed(backend=['gloo', 'gloo']): backend must name each backend once, "
            "got ['gloo', 'gloo']",
        ),
        (
            Marks(devices(2, at_least=2)),
            "@pytest.mark.devices(at_least=2): at_least is for n='all', got 2",
        ),
        (
            Marks(None, distributed([2, 4], at_least=2)),
            "@pytest.mark.distributed(at_least=2): at_least is for world_size='all', got [2, 4]",
        ),
        (
            Marks(devices(kind="cuda"), distributed(kind="cpu")),
            "@pytest.mark.devices(kind='cuda') with @pytest.mark.distributed(kind='cpu'): "
            "kind must be equal, since both marks describe each rank here, got 'cuda' and 'cpu'",
        ),
        (
            Marks(devices(4), distributed(devices_per_rank=2)),
            "@pytest.mark.devices(n=4) with @pytest.mark.distributed(devices_per_rank=2): "
            "n and devices_per_rank must be equal, since both marks describe each rank here, got 4 and 2",
        ),
        (
            Marks(devices("all"), distributed()),
            "@pytest.mark.devices(n='all') with @pytest.mark.distributed: n must be an int here, since it is the "
            "number of devices of each rank; distributed('all') makes as many ranks as there are devices",
        ),
        (
            Marks(None, distributed(nodes=3)),
            "@pytest.mark.distributed(nodes=3): nodes must be an int >= 1 and at most world_size, which is 2, got 3",
        ),
    ],
)
def test_wrong_calls_are_errors(marks: Marks, text: str) -> None:
    assert refusal(marks) == text


def test_a_list_takes_the_chosen_value() -> None:
    mark = distributed([1, "all"], backend=("gloo", "mpi"))
    assert read(Marks(None, mark), world_size="all", backend="mpi") == ({}, {"world_size": "all", "backend": "mpi"})
    text = "(backend=['gloo', 'mpi']): no test was made for each entry of the list, since the mark was added too late"
    with pytest.raises(MarkError, match=re.escape(text)):
        read(Marks(None, mark), world_size=1)


@pytest.mark.parametrize(
    ("mark", "param", "text"),
    [
        (distributed(), 4, f"(world_size=2): {_COLLECTED} must be 2 as in the mark, got 4"),
        (
            distributed([1, 2]),
            True,
            f"(world_size=[1, 2]): {_COLLECTED} must be 1 or 2 as in the mark, got True",
        ),
    ],
)
def test_a_parameter_that_contradicts_the_mark(mark: pytest.Mark, param: object, text: str) -> None:
    assert refusal(Marks(None, mark), param) == f"@pytest.mark.distributed{text}{_RENAME}"


CONFTEST = """
import pytest
from pytest_accel.core.marks import MARKER_LINES

def pytest_configure(config):
    for line in MARKER_LINES:
        config.addinivalue_line("markers", line)
"""


@pytest.fixture(autouse=True)
def _no_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep nested runs from loading installed plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def collect(pytester: pytest.Pytester, tests: str) -> list[pytest.Item]:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it="import pytest, unittest\n" + tests)
    items, _ = pytester.inline_genitems("--strict-markers")
    return items


def first_arguments(pytester: pytest.Pytester, tests: str) -> dict[str, tuple[Any, Any]]:
    """Return `n` and `world_size` of the closest marks of each test (None: no such mark), by the test's name."""
    found = {item.name: closest_marks(item) for item in collect(pytester, tests)}
    return {
        name: (devices and devices.args[0], distributed and distributed.args[0])
        for name, (devices, distributed) in found.items()
    }


def test_the_closest_mark_counts(pytester: pytest.Pytester) -> None:
    tests = """
pytestmark = pytest.mark.devices(1)

def test_of_module(): pass

@pytest.mark.devices(2)
def test_of_function(): pass

@pytest.mark.distributed(2)
class TestClass:
    def test_of_class(self): pass

    @pytest.mark.distributed(3)
    def test_of_method(self): pass

    class TestInner:
        def test_of_outer_class(self): pass

@pytest.mark.devices(3)
class TestOther(TestClass):
    @pytest.mark.distributed(4)
    class TestInner:
        def test_of_inner_class(self): pass

def test_of_module_again(): pass
"""
    assert first_arguments(pytester, tests) == {
        "test_of_module": (1, None),
        "test_of_function": (2, None),
        "test_of_class": (3, 2),
        "test_of_method": (3, 3),
        "test_of_outer_class": (1, 2),
        "test_of_inner_class": (3, 4),
        "test_of_module_again": (1, None),
    }


def test_the_examples_of_the_reference(pytester: pytest.Pytester) -> None:
    snippets = re.findall(r"```python\n(.*?)```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)
    needs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for item in collect(pytester, "\n".join(snippets)):
        marks = closest_marks(item)
        size, backend = (2 if has_list(marks.distributed) else None), ("gloo" if item.name == "test_reduce" else None)
        needs[item.name] = read(marks, world_size=size, backend=backend)
    assert needs["test_sampler"] == ({}, {"world_size": 2, "backend": "gloo"})
    assert needs["test_four_ranks_with_two_devices_each"] == (
        {"n": 2, "memory": 16 * GIB},
        {"world_size": 4, "devices_per_rank": 2},
    )
    assert len(needs) == 11
    assert ({}, {}) not in needs.values()


def test_the_reference_names_every_argument_and_kind() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for line in MARKER_LINES:
        signature = line.partition("): ")[0].replace("'", '"')
        assert f"\n`{signature})`\n" in text
    for argument in f"{DEVICES_ARGUMENTS}, {DISTRIBUTED_ARGUMENTS}".split(", "):
        assert f"\n| `{argument}` |" in text
    assert f"\n{', '.join(f'`{kind}`' for kind in KINDS.split(', '))}\n" in text


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("import pytest\n@pytest.mark.distributed(2)\ndef test(): ...\n", {"distributed"}),
        ("pytestmark = [pytest.mark.devices, pytest.mark.slow]\n", {"devices"}),
        (
            "from pytest import mark\n@mark . devices(2)\n@mark.distributed\nclass Test: ...\n",
            {"devices", "distributed"},
        ),
        ("def distributed(): devices = bookmark.devices\n", set()),
        ("@pytest.mark.devices_of_old\n", set()),
        ("", set()),
    ],
)
def test_marks_are_found_in_the_text_of_a_file(text: str, marks: set[str]) -> None:
    assert marks_in(text) == marks


@pytest.mark.parametrize(
    ("lines", "owner", "of_project"),
    [
        ([], None, set()),
        (["distributed: in ranks", "slow"], None, {"distributed"}),
        (["distributed(backend): in ranks"], None, {"distributed"}),
        pytest.param([*MARKER_LINES, "devices: with devices"], None, {"devices"}, id="copies"),
        (["distributed: in ranks"], "own", set()),
        ([], "project", {"devices", "distributed"}),
    ],
)
def test_the_owner_of_a_mark(lines: list[str], owner: Literal["own", "project"] | None, of_project: set[str]) -> None:
    """A line that begins with the signature of the plugin's mark, as ``pytest --markers`` shows it, is a copy."""
    owners = MarkOwners(lambda: lines, owner)
    assert owners.of_project == of_project
    assert owners.is_ours(distributed(2)) is ("distributed" not in of_project)
    owners.give(mark := distributed(3))
    assert owners.is_ours(mark)
