"""Tests of the server from which the sessions of suites are forked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")

_CONFTEST = """
    import json
    import os
    import random
    import signal
    import sys
    from pathlib import Path

    FACTS = {
        "arguments": [argument for argument in sys.argv if "--basetemp" not in argument],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "main": sys.modules["__main__"].__spec__.name,
        "path": list(dict.fromkeys(sys.path)),
        "signals": {name: repr(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGCHLD", "SIGPIPE")},
        "input": sys.stdin.read(),
    }
    if "KILLED_BY" in os.environ:
        os.kill(os.getpid(), int(os.environ["KILLED_BY"]))


    def pytest_unconfigure(config):
        with open("random.txt", "a") as file:
            file.write(f"{random.random()}\\n")
        program = Path("/proc/self/cmdline").read_text()
        Path("facts.json").write_text(json.dumps([FACTS, "session_server" in program]))
    """


def test_a_forked_session_starts_like_a_new_interpreter(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_it.py", "def test_it():\n    pass\n")
    monkeypatch.setenv("ONLY_OF_THIS_TEST", "value with \udcff")
    sessions = []
    for new_interpreter in (False, True):
        if new_interpreter:
            suite.new_interpreters()
        assert suite.run("-s").count() == {"PASSED": 1}
        facts, forked = json.loads((suite.path / "facts.json").read_text())
        assert forked != new_interpreter
        sessions.append(facts)
    assert sessions[0] == sessions[1]
    assert len(set(suite.read("random.txt"))) == 2
