"""Tests of the results at the terminal and in the junit file if ranks pass, fail, skip or disagree."""

from __future__ import annotations

import re
import socket
import xml.etree.ElementTree

import pytest

from tests.features.conftest import Suite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")

_OUTCOMES = """
    import os
    import sys
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


    def test_passes(record_property):
        record_property("mine", 7)
        print("silent")


    def test_introspection(rank):
        expected = {"left": [1, 2, 3], "right": rank}
        assert expected == {"left": [1, 2, 3], "right": 0}


    def test_alike():
        print("same on all")
        raise ValueError("on every rank")


    def test_output(rank):
        print("same on all")
        print("from", rank, file=sys.stderr)
        assert False, "see the output"


    class Strange(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")
            self.keep = lambda: None


    def test_strange_exception(rank):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise Strange("this", "that") from error


    @pytest.fixture
    def breaks_on_one(rank):
        if rank == 1:
            raise RuntimeError("no setup on rank 1")


    def test_setup_error(breaks_on_one):
        pass


    @pytest.fixture
    def breaks_at_end(rank):
        yield
        if rank == 0:
            raise RuntimeError("no teardown on rank 0")


    def test_two_errors(breaks_at_end, rank):
        assert rank == 7, "in the call"


    @pytest.mark.xfail(reason="known", strict=True)
    def test_xfail():
        raise AssertionError


    @pytest.mark.xfail(reason="known on rank 1", strict=True)
    def test_xfail_on_one_rank(rank):
        assert rank == 0


    @pytest.mark.xfail
    def test_xpass():
        pass


    @pytest.mark.xfail(strict=True, reason="must fail")
    def test_strict_xpass():
        pass


    @pytest.mark.xfail(raises=KeyError)
    def test_xfail_raises():
        raise KeyError("right")


    @pytest.mark.xfail(raises=KeyError)
    def test_xfail_raises_other():
        raise ValueError("wrong")


    @pytest.mark.xfail(run=False, reason="would harm")
    def test_xfail_not_run():
        Path("harm").touch()


    @pytest.mark.xfail(reason="in setup")
    def test_xfail_setup(breaks_on_one):
        pass


    @pytest.mark.xfail
    def test_xfail_one_dies(rank):
        if rank:
            os._exit(0)


    def test_dynamic_xfail(request):
        request.node.add_marker(pytest.mark.xfail(reason="added in the test"))
        raise AssertionError


    def test_dynamic_xfail_raises(request):
        request.applymarker(pytest.mark.xfail(raises=KeyError))
        raise ValueError("wrong too")


    def test_dynamic_strict_xpass(request):
        request.node.add_marker(pytest.mark.xfail(reason="added strictly", strict=True))


    def test_skip():
        pytest.skip("inside the ranks")


    def test_fail_without_trace():
        pytest.fail("said plainly", pytrace=False)


    def test_after_all():
        pass
    """


def test_outcomes_of_ranks_are_merged_into_one_result_for_each_test(suite: Suite) -> None:
    suite.all_plugins()
    file = suite.write("test_outcomes.py", _OUTCOMES)
    run = suite.run("-rA", CAUSES, "--durations=3", "--durations-min=0", "-o", "junit_family=xunit1")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    expected = {
        "test_passes": "PASSED",
        "test_introspection": "FAILED failed: AssertionError; rank 1",
        "test_alike": "FAILED failed: ValueError; ranks 0-1",
        "test_output": "FAILED failed: AssertionError; ranks 0-1",
        "test_strange_exception": "FAILED failed: Strange; ranks 0-1",
        "test_setup_error": "ERROR failed: RuntimeError; rank 1",
        "test_two_errors": "FAILED ERROR",
        "test_xfail": "XFAIL failed: AssertionError; ranks 0-1",
        "test_xfail_on_one_rank": "XFAIL failed: AssertionError; rank 1",
        "test_xpass": "XPASS",
        "test_strict_xpass": "FAILED",
        "test_xfail_raises": "XFAIL failed: KeyError; ranks 0-1",
        "test_xfail_raises_other": "FAILED failed: ValueError; ranks 0-1",
        "test_xfail_not_run": "XFAIL",
        "test_xfail_setup": "XFAIL failed: RuntimeError; rank 1",
        "test_xfail_one_dies": "XFAIL died: status 0; rank 1",
        "test_dynamic_xfail": "XFAIL",
        "test_dynamic_xfail_raises": "FAILED failed: ValueError; ranks 0-1",
        "test_dynamic_strict_xpass": "FAILED failed; ranks 0-1",
        "test_skip": "SKIPPED",
        "test_fail_without_trace": "FAILED failed: Failed; ranks 0-1",
        "test_after_all": "PASSED",
    }
    run.expect(expected)
    # The ranks of the first failure have different texts.
    two = "failed: AssertionError; rank [01], failed: RuntimeError; rank 0"
    assert re.fullmatch(two, run.causes["test_two_errors"])
    assert run.causes.keys() - {"test_two_errors"} == {test for test, text in expected.items() if not text.isupper()}
    assert not (suite.path / "harm").exists()

    shown = run.failure("test_introspection")
    assert "E       AssertionError: assert {'left': [1, ...], 'right': 1} == {'left': [1, ...], 'right': 0}" in shown
    assert "E         {'right': 1} != {'right': 0}" in shown
    assert "rank 1 of 2 on cpu" in shown
    assert "rank 0: passed" in shown
    shown = run.failure("test_alike")
    assert shown.count("E       ValueError: on every rank") == 1
    assert re.search(r"^ranks 0-1: failed at test_\w+\.py:\d+$", shown, re.MULTILINE)
    assert re.search(r"- Captured stdout call \[ranks 0-1\] -+\nsame on all\n", shown)
    shown = run.failure("test_output")
    for rank in (0, 1):
        assert re.search(rf"- Captured stdout call \[rank {rank}\] -+\nsame on all\nfrom {rank}\n", shown)
    shown = run.failure("test_strange_exception")
    assert "KeyError: 'inner'" in shown
    assert "The above exception was the direct cause" in shown
    assert "test_outcomes.Strange: this and that" in shown
    assert "[XPASS(strict)] must fail" in run.failure("test_strict_xpass")
    assert "[XPASS(strict)] added strictly" in run.failure("test_dynamic_strict_xpass")
    assert "said plainly" in run.failure("test_fail_without_trace")
    assert "items.py" not in run.text  # No traceback shows a frame of the plugin.

    line = file.read_text().splitlines().index('    pytest.skip("inside the ranks")') + 1
    for text in (
        f"SKIPPED [1] test_outcomes.py:{line}: inside the ranks",
        "FAILED test_outcomes.py::test_introspection - rank 1: AssertionError: assert {",
        "FAILED test_outcomes.py::test_alike - ranks 0-1: ValueError: on every rank",
        "ERROR test_outcomes.py::test_setup_error - rank 1: RuntimeError: no setup on rank 1",
        "XFAIL test_outcomes.py::test_xfail - known",
        "test_outcomes.py::test_xfail_not_run - [NOTRUN] would harm",
        "XFAIL test_outcomes.py::test_dynamic_xfail - added in the test",
        "XPASS test_outcomes.py::test_xpass",
        "PASSED test_outcomes.py::test_passes",
    ):
        assert text in run.text, text
    assert "slowest 3 durations" in run.text

    cases = xml.etree.ElementTree.parse(suite.path / "causes.xml").findall(".//testcase")
    # As in any session, the junit file has one case for a failure in the call and one for an error in the teardown.
    assert sorted(case.attrib["name"] for case in cases) == sorted([*expected, "test_two_errors"])
    by_name = {case.attrib["name"]: case for case in cases}
    properties = {entry.attrib["name"]: entry.attrib["value"] for entry in by_name["test_passes"].iter("property")}
    assert float(properties.pop("accel_wait")) >= 0
    assert properties == {"mine": "7", "accel_ranks": "2", "accel_host": socket.gethostname()}
    (skipped,) = by_name["test_skip"].iter("skipped")
    assert skipped.attrib["message"] == "inside the ranks"
    assert skipped.text == f"{file}:{line}: inside the ranks"
    (failure,) = by_name["test_alike"].iter("failure")
    assert failure.attrib["message"] == "ranks 0-1: ValueError: on every rank"
    (error,) = by_name["test_setup_error"].iter("error")
    assert "no setup on rank 1" in error.attrib["message"]
    assert float(by_name["test_passes"].attrib["time"]) >= 0


@pytest.mark.long
def test_warnings_of_ranks_are_reported_once(suite: Suite) -> None:
    suite.write(
        "test_warnings.py",
        """
        import warnings

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


        class Mine(UserWarning):
            pass


        def test_warns():
            warnings.warn("from all ranks", UserWarning)


        def test_warns_differently(rank):
            warnings.warn(f"from rank {rank}", Mine)


        def test_fails():
            warnings.warn("is an error", DeprecationWarning)


        @pytest.mark.filterwarnings("error:mine alone")
        def test_fails_by_mark():
            warnings.warn("mine alone", UserWarning)


        @pytest.mark.filterwarnings("ignore:nobody sees")
        def test_ignored():
            warnings.warn("nobody sees", UserWarning)
        """,
    )
    run = suite.run("-W", "default", "-W", "error::DeprecationWarning")
    assert run.count() == {"PASSED": 3, "FAILED": 2}
    assert "2 failed, 3 passed, 3 warnings" in run.text
    summary = run.text.partition("warnings summary")[2]
    assert len(re.findall(r"test_warnings.py:\d+: UserWarning: from all ranks", summary)) == 1
    assert "test_warnings.py::test_warns\n" in summary
    assert "Mine: from rank 0" in summary
    assert "Mine: from rank 1" in summary
    assert "nobody sees" not in summary
    assert "DeprecationWarning: is an error" in run.failure("test_fails")
