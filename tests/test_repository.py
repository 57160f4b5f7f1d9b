"""Tests of the package as a whole: its wheel, the modules that its import loads, and imports between its modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path

from packaging.requirements import Requirement

from pytest_accel import hooks
from pytest_accel.features import FEATURES
from tests.kernel import KERNEL
from tests.wheel import wheel

__all__ = ["wheel"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pytest_accel"
MODULES = sorted(PACKAGE.rglob("*.py"))

SHIMS = {"compat/pytest_shims.py", "compat/xdist_shims.py"}
"""The modules that use private names of pytest and pytest-xdist."""
PUBLIC_NAMES = {"fixtures.py"}
"""Modules that name a feature's classes because users do."""
VENDORS = {f"hardware/vendors/{name}.py" for name in ("cuda", "rocm", "xpu", "mps", "base_vendor")}
"""The vendors whose `verify` asks torch, in a rank, which devices the rank sees."""

RUNS_IN_A_RANK = {
    "compat/torch_api.py",
    *("rank/main.py", "rank/process_group.py", "rank/group_state.py"),
    "rank/operations.py",
    *("rank/torch_devices.py", "features/adoption/torch_harness.py"),
    "features/fake_group.py",
}

RUNS_BETWEEN_TESTS = (
    *("rank/rank_plugin", "rank/link_to_driver", "rank/runner", "rank/reports"),
    *("rank/collector", "rank/leak_check", "rank/process_state", "rank/debugger"),
    "rank/rank_output",
    *("rank/operations", "forkserver/rank_process"),
    *("rank/device_memory", "rank/torch_devices", "rank/signed_store"),
    *("core/processes", "messages/serialization", "messages/unix_sockets", "compat/torch_api"),
)
"""The modules whose functions a rank calls when it has run a test."""
RUNS_BETWEEN_TESTS_OF_THE_DRIVER = (
    *("driver/driver", "driver/world", "driver/items", "driver/rank_monitor", "driver/link_to_rank"),
    *("driver/debugger_relay", "driver/output_tail"),
    *("pool/pool", "pool/worlds", "pool/pool_client"),
    *("pool/starter", "forkserver/client"),
    *("leases/leases", "leases/locks", "leases/demand", "leases/shared_folder"),
    *("diagnostics/inspector", "diagnostics/collectives"),
    "messages/connect",
    *("xdist_hooks", "features/record/live_hooks"),
)
"""The modules whose functions a driver or the pool calls when a test without marks, or a fixture of one, has run."""
_MAIN_MODULES = {"pool", "leases", "driver", "launch"}
"""Modules with the name of a package: the class that the package is named after, or its public names."""
REPLACEABLE = {
    *("os", "signal", "socket", "select", "fcntl", "pickle", "json", "struct"),
    *("time", "threading", "asyncio", "gc", "traceback", "zlib"),
    *("contextlib", "subprocess", "selectors", "queue", "shutil"),
}
"""Modules whose functions a test may have replaced by then."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports, with its full dotted path."""

    name: str
    line: int
    typing_only: bool
    """True if only a type checker reads the import."""

    def is_of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _walk(node: ast.AST, package: str, *, typing_only: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield Import(alias.name, node.lineno, typing_only)
        case ast.ImportFrom(module=module, names=names, level=level):
            above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            origin = ".".join([*above, *([module] if module else [])])
            for alias in names:
                yield Import(f"{origin}.{alias.name}", node.lineno, typing_only)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]):
            if called in {"import_module", "__import__"}:
                yield Import(name, node.lineno, typing_only)
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for guarded in node.body:
            yield from _walk(guarded, package, typing_only=True)
        for other in node.orelse:
            yield from _walk(other, package, typing_only=typing_only)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, typing_only=typing_only)


@cache
def each_import() -> list[tuple[str, Import]]:
    """Return every import of the package, with its module's path below `pytest_accel`.

    Calls such as `import_module("x")` are imports, too.
    """
    return [
        (path.relative_to(PACKAGE).as_posix(), found)
        for path in MODULES
        for found in _walk(parsed(path), ".".join(path.relative_to(ROOT).parent.parts), typing_only=False)
    ]


def is_unpublished(name: str) -> bool:
    """Return whether `name` is private to pytest or xdist, so that any release may change it."""
    parts = name.split(".")
    if parts[0] == "_pytest":
        return True
    if parts[0] == "pytest":
        return any(part.startswith("_") and not part.startswith("__") for part in parts)
    # xdist publishes the functions of its top level; its modules are its own.
    return parts[0] == "xdist" and len(parts) > 1 and not parts[1].startswith(("is_xdist_", "get_xdist_"))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pytest_finds_the_plugin() -> None:
    found = [point for point in entry_points(group="pytest11") if point.name == "accel"]
    assert [point.value for point in found] == ["pytest_accel.plugin"], "is pytest-accel installed here?"


def test_importing_any_module_does_not_import_torch() -> None:
    names = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if path.name != "__main__.py"
    )
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        raise SystemExit(f"importing {{name}} imports torch")
"""
    run_python(code)


def test_the_wheel_contains_the_typed_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == {path.relative_to(ROOT).as_posix() for path in [*MODULES, PACKAGE / "py.typed"]}


def test_the_wheel_requires_lowest_versions_and_leaves_the_choice_to_the_user(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    version = run_python("import pytest_accel; print(pytest_accel.__version__)")
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("pytest-accel", version, "MIT")
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    always = [one for one in required if "extra" not in str(one.marker)]
    assert "torch" not in {one.name for one in always}, "pip would replace a build whose version does not suit it"
    assert {str(one.specifier) for one in required if one.name == "torch"} == {">=2.4"}
    assert [str(one) for one in always if [bound.operator for bound in one.specifier] != [">="]] == []


def part_of(module: str) -> str:
    """Return the part of the package that has `module`, a path below `pytest_accel`: ``pool``, ``features/record``.

    The modules directly in `pytest_accel` are in the part ``.``.
    """
    *folders, name = module.split("/")
    if folders[:1] == ["features"]:  # A feature may be a single module.
        return "/".join([*folders, name][:2]).removesuffix(".py").removesuffix("/__init__")
    return "/".join(folders[:1]) or "."


def may_import(importer: str, imported: str) -> bool:
    """Return whether modules of the part `importer` may import from the part `imported`."""
    if importer == imported:
        return True
    if importer == ".":
        return not imported.startswith("features/")
    if importer in KERNEL:
        return imported in KERNEL[: KERNEL.index(importer)]
    arrows = {f"features/{feature.name}": feature.stands_on for feature in FEATURES}
    return imported in (*KERNEL, ".", *(f"features/{name}" for name in arrows.get(importer, ())))


def own_imports() -> Iterator[tuple[str, str, int]]:
    """Yield each import of one module of the package by another: both paths below `pytest_accel`, and the line."""
    paths = {path.relative_to(PACKAGE).as_posix() for path in MODULES}
    for module, found in each_import():
        if not found.is_of("pytest_accel") or module == "__init__.py":  # The package imports names on access.
            continue
        parts = found.name.split(".")[1:]
        while parts and f"{'/'.join(parts)}.py" not in paths and f"{'/'.join(parts)}/__init__.py" not in paths:
            parts.pop()  # The name of a function or class.
        stem = "/".join(parts)
        imported = f"{stem}.py" if f"{stem}.py" in paths else f"{stem}/__init__.py".lstrip("/")
        if imported != module:
            yield module, imported, found.line


def test_each_package_is_in_the_kernel_or_a_feature() -> None:
    features = {f"features/{feature.name}" for feature in FEATURES}
    parts = {part_of(path.relative_to(PACKAGE).as_posix()) for path in MODULES}
    assert parts == {".", "features", *KERNEL, *features}


def test_features_implement_each_hook_of_the_kernel_that_other_plugins_do_not() -> None:
    implemented = {
        node.name
        for feature in FEATURES
        for path in (f"features/{feature.name}.py", f"features/{feature.name}/hooks.py")
        if PACKAGE / path in MODULES
        for node in parsed(PACKAGE / path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_accel_")
    }
    specified = {name for name in vars(hooks) if name.startswith("pytest_accel_")}
    assert implemented == specified - {"pytest_accel_rank_data", "pytest_accel_merge"}


def test_packages_import_only_what_their_place_allows() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, imported, _ in own_imports()
        if imported not in {"__init__.py", "features/__init__.py"} and module not in PUBLIC_NAMES
        if not may_import(part_of(module), part_of(imported))
    ]
    assert wrong == []


def test_modules_that_run_outside_of_ranks_import_none_of_their_modules() -> None:
    above = KERNEL[KERNEL.index("rank") + 1 :]
    found = [pair for *pair, _ in own_imports() if part_of(pair[0]) in above and part_of(pair[1]) == "rank"]
    # Here, a process that the fork server has forked becomes a rank.
    assert {importer for importer, _ in found} == {"forkserver/rank_process.py"}
    assert {imported for _, imported in found} == {"rank/main.py"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for module, imported, _ in own_imports():
        needs.setdefault(module, set()).add(imported)
    sorter = TopologicalSorter(needs)
    sorter.prepare()  # Raises CycleError, which names the modules.


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in MODULES if path.name not in {"__init__.py", "hooks.py", "commands.py"})
    packages = {path.parent.name for path in MODULES if path.name == "__init__.py"} - {"pytest_accel"}
    assert [
        name for name, count in names.items() if count > 1 or (name in packages and name not in _MAIN_MODULES)
    ] == []


def test_torch_is_imported_where_ranks_run() -> None:
    wrong = [
        f"{module}:{found.line} imports {found.name}"
        for module, found in each_import()
        if found.is_of("torch") and not found.typing_only and module not in RUNS_IN_A_RANK | VENDORS
    ]
    assert wrong == []


def test_unpublished_names_of_pytest_and_xdist_are_in_two_modules() -> None:
    wrong = [
        f"{module}:{found.line} imports {found.name}"
        for module, found in each_import()
        if is_unpublished(found.name) and not found.typing_only and module not in SHIMS
    ]
    assert wrong == []


YOUNG_NAMES_OF_TORCH = {
    *("AcceleratorError", "accelerator", "current_accelerator", "get_default_backend_for_device", "master_listen_fd"),
    *("queue_len", "queue_pop", "queue_push", "set_code_exec_strategy", "use_libuv", "uuid"),
}
"""Names that torch lacks, or cannot use, in the oldest release that is supported."""
USES_TORCHS_HARNESS = {
    "features/adoption/torch_harness.py": "replaces methods of `MultiProcessTestCase`, which is private as a whole",
    "features/adoption/suite_adoption.py": "looks for `MultiProcessTestCase`, whose module the suite imports itself",
}
"""The modules that use torch's test harness, each with its use."""


def torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each private or young name of torch that the module `tree` uses as an attribute, with its line.

    A private attribute is taken for torch's unless it is one of ``self``, of ``cls`` or of a module of the standard
    library, or `tree` defines it.
    """
    nodes = list(ast.walk(tree))
    own = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=owner)) if owner in {"self", "cls"} | sys.stdlib_module_names:
                continue
            case ast.Attribute(attr=name):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                pass
            case ast.keyword(arg=str(name)):
                pass
            case _:
                continue
        private = name.startswith("_") and not name.startswith("__") and name not in own
        if private or name in YOUNG_NAMES_OF_TORCH:
            yield node.lineno, name


def test_private_and_young_names_of_torch_are_in_one_module() -> None:
    uses_torch = re.compile(r"^ +(import|from) torch\b|modules\b.*[\"']torch\b", re.MULTILINE)
    users = [path for path in MODULES if uses_torch.search(path.read_text(encoding="utf-8"))]
    checked = {path.relative_to(PACKAGE).as_posix() for path in users} - USES_TORCHS_HARNESS.keys()
    assert len(checked) > 15
    wrong = [
        f"{module}:{line} uses {name}"
        for module in checked - {"compat/torch_api.py"}
        for line, name in torch_names(parsed(PACKAGE / module))
    ]
    wrong += [
        f"{module}:{found.line} imports {found.name}"
        for module, found in each_import()
        if found.is_of("torch") and module != "compat/torch_api.py"
        if any(part.startswith("_") for part in found.name.split("."))
    ]
    assert wrong == []


def test_code_that_runs_between_tests_uses_directly_imported_functions() -> None:
    wrong = [
        f"{name}.py:{node.lineno} calls {ast.unparse(node.func)}"
        for name in (*RUNS_BETWEEN_TESTS, *RUNS_BETWEEN_TESTS_OF_THE_DRIVER)
        for node in ast.walk(parsed(PACKAGE / f"{name}.py"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id in REPLACEABLE
    ]
    assert wrong == []


def unpickles(tree: ast.Module) -> bool:
    """Return whether the module `tree` unpickles, by itself or with `multiprocessing.connection.Connection.recv`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="load" | "loads", value=ast.Name(id="pickle"))):
                return True
            case ast.ImportFrom(module="pickle", names=names):
                if {"load", "loads", "Unpickler"} & {alias.name for alias in names}:
                    return True
            case ast.Attribute(attr="Unpickler"):
                return True
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                return True
    return False


def test_security_md_lists_every_place_that_unpickles() -> None:
    table = (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("## Every place that unpickles")[2]
    documented = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\S+\.py)`", row.split("|")[1])
    }
    found = {path.relative_to(PACKAGE).as_posix() for path in MODULES if unpickles(parsed(path))}
    assert documented == found


def _opens_text_without_encoding(call: ast.Call) -> bool:
    """Return whether `call` opens a file, or reads a program's output, as text of the locale's encoding."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)  # The function `read_text` has an encoding of its own.
    if ast.unparse(call.func) in ("open", "_open", "os.fdopen", "fdopen", "io.open"):
        mode = given.get("mode", call.args[1] if len(call.args) > 1 else ast.Constant("r"))
        return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
    return any(
        isinstance(value := given.get(one), ast.Constant) and value.value is True
        for one in ("text", "universal_newlines")
    )


def test_text_is_read_and_written_with_an_encoding() -> None:
    """Without one, ``-X warn_default_encoding`` warns, which a suite may turn into an error."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and _opens_text_without_encoding(node)
    ]
    assert found == []
