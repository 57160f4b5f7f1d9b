"""Settings that a test leaves changed in its ranks: put back, and told as the session wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Suite

_LEAVES = """
    import os

    import pytest
    import torch

    pytestmark = pytest.mark.distributed(2, device="cpu")
    STARTED = os.getpid(), os.getcwd()


    def test_leaves_on_both(tmp_path_factory):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = True


    def test_leaves_on_one(rank):
        if rank == 1:
            os.chdir("/")


    def test_finds_all_put_back():
        assert (os.getpid(), os.getcwd()) == STARTED
        assert torch.get_default_dtype() == torch.float32
        assert torch.ones(1).device.type == "cpu"
        assert torch.get_deterministic_debug_mode() == 0
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.deterministic
"""


@pytest.mark.parametrize("what", ["warn", "fail", "off"])
def test_what_is_left_is_put_back_and_told_as_wanted(suite: Suite, what: str) -> None:
    suite.write("test_leaves.py", _LEAVES)
    run = suite.run("-W", "default", "--accel-leaks", what)
    assert run.count() == ({"PASSED": 3, "ERROR": 2} if what == "fail" else {"PASSED": 3}), run.text
    on_both = "ranks 0-1 left torch's default dtype changed from torch.float32 to torch.float64; it has been put back"
    assert (on_both in run.text) == (what != "off")
    assert ("rank 1 left the working directory changed from" in run.text) == (what != "off")
    assert run.text.count("PytestWarning: ") == (6 if what == "warn" else 0)


def test_an_error_by_the_sessions_filters_is_one_of_the_test(suite: Suite) -> None:
    suite.write("test_leaves.py", _LEAVES)
    run = suite.run("-W", "error")
    assert run.count() == {"PASSED": 3, "ERROR": 2}


def test_what_wider_fixtures_set_and_put_back_is_nobodys_leftover(suite: Suite) -> None:
    suite.write(
        "test_wider.py",
        """
        import os

        import pytest
        import torch

        pytestmark = pytest.mark.distributed(2, device="cpu")


        @pytest.fixture(scope="module", autouse=True)
        def doubles(tmp_path_factory):
            before = os.getcwd()
            torch.set_default_dtype(torch.float64)
            os.chdir(tmp_path_factory.mktemp("here"))
            yield
            torch.set_default_dtype(torch.float32)
            os.chdir(before)


        @pytest.mark.parametrize("number", range(2))
        def test_counts_in_doubles(number, monkeypatch):
            monkeypatch.chdir("/")
            assert torch.ones(1).dtype == torch.float64
        """,
    )
    run = suite.run("--accel-leaks", "fail")
    assert run.count() == {"PASSED": 2}, run.text
