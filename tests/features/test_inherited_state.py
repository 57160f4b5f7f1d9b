"""Tests of what a rank has of the session's process when it begins."""

from __future__ import annotations

from tests.features.conftest import Suite

_FACTS = """
    import os
    import resource
    import signal

    FACTS = {
        "umask": lambda: [os.umask(mask := os.umask(0)), mask][1],
        "limits": lambda: [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "nice": lambda: os.getpriority(os.PRIO_PROCESS, 0),
        "ignored": lambda: [one for one in (1, 2, 10, 12, 15) if signal.getsignal(one) is signal.SIG_IGN],
        "folder": os.getcwd,
    }
    if hasattr(os, "sched_setaffinity"):
        FACTS["affinity"] = lambda: sorted(os.sched_getaffinity(0))
        FACTS["policy"] = lambda: os.sched_getscheduler(0)

    def change():
        os.umask(0o027)
        resource.setrlimit(resource.RLIMIT_NOFILE, (900, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setpriority(os.PRIO_PROCESS, 0, 7)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if "affinity" in FACTS:
            os.sched_setaffinity(0, FACTS["affinity"]()[:1])
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    """


def test_ranks_have_what_a_conftest_sets_in_each_process_and_the_folder_of_the_main_process(suite: Suite) -> None:
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
            before = {name: read() for name, read in facts.FACTS.items()}
            facts.change()
            if not hasattr(session.config, "workerinput"):
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
