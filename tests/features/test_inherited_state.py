"""Tests of the state with which a rank begins: random states, and what it has of the session's process."""

from __future__ import annotations

from tests.features.conftest import Suite


def test_each_rank_begins_with_random_states_of_its_own(suite: Suite) -> None:
    suite.write(
        "test_a.py",
        """
        import random
        import secrets
        import sys
        import uuid

        import pytest


        def initial_seed(torch):
            return torch.initial_seed()

        def weights(torch):
            return torch.nn.Linear(4, 4).weight.tolist()

        def numpy_draw(torch):
            numpy = sys.modules.get("numpy")
            return secrets.token_bytes() if numpy is None else numpy.random.rand(4).tolist()

        def python_draw(torch):
            return random.random()

        def token(torch):
            return secrets.token_bytes()

        def uuid1(torch):
            return uuid.uuid1().bytes

        @pytest.mark.parametrize(
            "draw",
            [initial_seed, weights, numpy_draw, python_draw, token, uuid1],
        )
        @pytest.mark.distributed(2, kind="cpu")
        def test_differs(draw, gather):
            import torch

            one, other = gather(draw(torch))
            assert one != other
        """,
    )
    # These tests run later in the same world, and continue the streams, as those of one process do.
    seed = "import os\n\nif 'RANK' in os.environ:\n    import torch\n\n    torch.manual_seed(3)\n"
    suite.write("with_seed/conftest.py", seed)
    suite.write(
        "with_seed/test_b.py",
        """
        import pytest


        @pytest.mark.parametrize("number", range(3))
        @pytest.mark.distributed(2, kind="cpu")
        def test_seeded(number, gather):
            import torch

            generator = torch.Generator().manual_seed(3)
            drawn = [torch.rand(1, generator=generator).item() for _ in range(number + 1)]
            assert gather(torch.rand(1).item()) == [drawn[-1]] * 2
        """,
    )
    assert suite.run().count() == {"PASSED": 9}


_FACTS = """
    import os
    import resource
    import signal


    def umask():
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def limits():
        return [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)]

    def affinity():
        return sorted(os.sched_getaffinity(0))

    def nice():
        return os.getpriority(os.PRIO_PROCESS, 0)

    def policy():
        return os.sched_getscheduler(0)

    def ignored():
        return [number for number in (1, 2, 10, 12, 15) if signal.getsignal(number) is signal.SIG_IGN]

    def folder():
        return os.getcwd()

    FACTS = {"umask": umask, "limits": limits, "nice": nice, "ignored": ignored, "folder": folder}
    if hasattr(os, "sched_setaffinity"):
        FACTS |= {"affinity": affinity, "policy": policy}

    def change():
        os.umask(0o027)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000) - 1, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if "affinity" in FACTS:
            os.sched_setaffinity(0, affinity()[:1])
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    """


def test_ranks_have_what_a_conftest_sets_in_the_main_process(suite: Suite) -> None:
    suite.without_torch()
    (suite.path / "work").mkdir()
    suite.write("facts.py", _FACTS)
    suite.write(
        "conftest.py",
        """
        import json
        import os
        import signal
        from pathlib import Path

        import facts

        def pytest_configure():
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)

        def pytest_sessionstart(session):
            if not hasattr(session.config, "workerinput"):
                before = {name: read() for name, read in facts.FACTS.items()}
                facts.change()
                os.chdir("work")
                after = {name: read() for name, read in facts.FACTS.items()}
                assert all(before[name] != after[name] for name in ("umask", "limits", "ignored"))
                Path(__file__).with_name("facts.json").write_text(json.dumps(after))
        """,
    )
    suite.write(
        "test_it.py",
        """
        import json
        import os
        import signal
        from pathlib import Path

        import facts
        import pytest

        @pytest.mark.parametrize("name", sorted(facts.FACTS))
        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_has(name):
            expected = json.loads(Path(__file__).with_name("facts.json").read_text())
            assert json.loads(json.dumps(facts.FACTS[name]())) == expected[name]

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_dies():
            assert signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL
            os._exit(3)

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_last(): ...
        """,
    )
    run = suite.run()
    outcomes = run.outcomes()
    assert outcomes.pop("test_dies") == "FAILED"
    assert set(outcomes.values()) == {"PASSED"}, run.text
    assert len(outcomes) >= 5
    assert "SIGPIPE" not in run.text  # A conftest changes it in each process, which does not change the verdict.
