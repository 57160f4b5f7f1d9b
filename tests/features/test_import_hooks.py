"""Tests of import hooks and assertion rewriting, which see in ranks the imports that they see in a plain session."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages

pytestmark = pytest.mark.usefixtures("without_torch")

_TEST = """
    import pytest
    {imports}


    def test_in_the_driver():
        {body}


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_in_ranks():
        {body}
    """


@pytest.fixture
def hook_suite(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Provide a suite that can import the module `typed`, whose function has annotated parameters."""
    InstalledPackages(suite.path / "site-packages", monkeypatch)
    suite.write("site-packages/typed.py", "def double(number: int) -> int:\n    return number * 2\n")
    suite.ini("norecursedirs = site-packages")
    return suite


def _write(suite: Suite, imports: str, body: str) -> None:
    suite.write("test_it.py", _TEST.format(imports=imports, body=body))


def test_a_type_checking_import_hook_works_in_ranks_as_in_a_plain_session(hook_suite: Suite) -> None:
    pytest.importorskip("pytest_beartype")
    _write(hook_suite, "import typed", "typed.double('a')")
    run = hook_suite.run("-p", "pytest_beartype", "--beartype-packages=typed", "-W", "default")
    assert run.count() == {"FAILED": 2}, run.text
    summary = [line for line in run.text.splitlines() if line.startswith("FAILED ")]
    assert len(summary) == 2
    assert all("BeartypeCallHintParamViolation" in line for line in summary)


@pytest.mark.long
def test_asserts_of_registered_packages_are_rewritten(hook_suite: Suite) -> None:
    check = "def check_{0}(number):\n    assert number == 4\n"
    hook_suite.write("site-packages/checks.py", check.format("module"))
    hook_suite.write("site-packages/pack/__init__.py", "from pack.inner import check_inner\n")
    hook_suite.write("site-packages/pack/inner.py", check.format("inner"))
    hook_suite.write("conftest.py", "import pytest\npytest.register_assert_rewrite('checks', 'pack.inner')\n")
    _write(hook_suite, "import checks", "checks.check_module(3)")
    hook_suite.write("test_pack.py", _TEST.format(imports="import pack", body="pack.check_inner(5)"))
    run = hook_suite.run()
    assert run.count() == {"FAILED": 4}, run.text
    # In ranks, the frame of a library is one line, without an indentation of what follows.
    for comparison in ("3 == 4", "5 == 4"):
        assert len(re.findall(rf"^E +assert {comparison}$", run.text, re.MULTILINE)) == 2
