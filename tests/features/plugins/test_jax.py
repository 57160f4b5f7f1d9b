"""Tests of JAX in ranks: the examples of docs/how-to/jax-and-mpi.md, and initializing JAX again in a process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite

pytestmark = needs("jax")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "jax-and-mpi.md"
_REINITIALIZING = """
    import os

    import pytest

    PIDS = set()

    @pytest.fixture(params=[1, 2])
    def own(request, free_port, rank, world_size, pytestconfig):
        import jax
        import jax.extend.backend

        jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{free_port}", world_size, rank)
        yield jax
        jax.distributed.shutdown()
        if os.environ["FORGETS"] == "1":
            jax.clear_caches()
            jax.extend.backend.clear_backends()

    def gathers(jax, rank):
        from jax.experimental.multihost_utils import process_allgather

        assert process_allgather(jax.numpy.array(rank)).tolist() == [0, 1]
        assert PIDS <= {os.getpid()}
        PIDS.add(os.getpid())

    @pytest.mark.distributed(2, init=False, env={"JAX_PLATFORMS": "cpu", "FORGETS": "1"})
    def test_forgets(own, rank): gathers(own, rank)

    @pytest.mark.distributed(2, init=False, env={"JAX_PLATFORMS": "cpu", "FORGETS": "0"})
    def test_remembers(own, rank): gathers(own, rank)
    """


def test_examples_of_the_page_pass_and_jax_starts_again_only_after_clearing_its_backends(
    suite: Suite,
) -> None:
    blocks = re.findall(r"^```python needs jax( conftest)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [bool(conftest) for conftest, _ in blocks] == [True, False, False, False]
    for number, (conftest, block) in enumerate(blocks):
        suite.write("conftest.py" if conftest else f"test_page_{number}.py", block)
    suite.write("test_reinitializing.py", _REINITIALIZING)
    run = suite.run("--accel=none")
    assert run.outcomes() == {
        "test_gather": "PASSED",
        "test_sum_over_all_devices": "PASSED",
        "test_devices": "PASSED",
        "test_main[1]": "PASSED",
        "test_main[2]": "PASSED",
        "test_forgets[1]": "PASSED",
        "test_forgets[2]": "PASSED",
        "test_remembers[1]": "PASSED",
        "test_remembers[2]": "ERROR",
    }
    message = "jax.distributed.initialize() must be called before any JAX calls that might initialise the XLA backend"
    assert f"RuntimeError: {message}" in run.text
