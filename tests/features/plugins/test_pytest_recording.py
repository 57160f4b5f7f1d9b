"""Tests of pytest-recording: all ranks replay a cassette, and one rank records it."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs

pytestmark = needs("pytest_recording")

_SUITE = """
    import os
    import threading
    import urllib.request
    from http.server import BaseHTTPRequestHandler, HTTPServer

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu")

    class Hello(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *args): pass

    @pytest.fixture(scope="session")
    def served():
        if os.path.exists("offline"):
            yield
            return
        server = HTTPServer(("127.0.0.1", 0), Hello)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        server.server_close()
        thread.join()

    def matches(one, other): return one.path == other.path

    @pytest.fixture(scope="module")
    def vcr_config(): return {"match_on": ["method", "path"]}

    def get(port, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port or 9}/{path}") as answer:
            return answer.read()

    @two
    @pytest.mark.vcr
    def test_passes(served):
        assert get(served, "one") == b"hello"
        if "RANK" in os.environ:
            import torch.distributed as dist

            dist.barrier()
        assert get(served, "two") == b"hello"

    @two
    @pytest.mark.vcr
    def test_fails(served): assert get(served, "three") == (b"hallo" if LAST else b"hello")

    @two
    @pytest.mark.vcr
    def test_rank_1_alone(served):
        if os.environ.get("RANK") == "1":
            get(served, "five")

    @pytest.mark.vcr
    def test_unmarked(served): assert get(served, "four") == b"hello"
    """


def _read_cassettes(pair: Pair) -> list[dict[str, list[str]]]:
    """Return the paths of the requests in each cassette, for the plain and the marked suite."""
    return [
        {
            file.name: [line.rpartition("/")[2] for line in file.read_text().splitlines() if "uri:" in line]
            for file in (suite.path / "cassettes" / "test_web").iterdir()
        }
        for suite in (pair.plain, pair.marked)
    ]


def test_all_ranks_replay_cassettes_and_one_records(pair: Pair) -> None:
    pair.plugin("pytest_recording.plugin")
    pair.write("test_web.py", _SUITE)
    _, marked = pair.run_both("--record-mode=once")
    assert marked.count() == {"PASSED": 3, "FAILED": 1}
    assert marked.result("test_fails") == "FAILED"
    plain, recorded = _read_cassettes(pair)
    assert plain == recorded
    assert recorded["test_passes.yaml"] == ["one", "two"]

    pair.write("offline", "")
    replayed = pair.marked.run("--block-network", "-n1", "test_web.py", "-k", "not alone")
    assert replayed.outcomes() == {"test_passes": "PASSED", "test_fails": "FAILED", "test_unmarked": "PASSED"}

    run = pair.marked.run("--record-mode=rewrite", "-k", "test_passes")
    assert "record with --record-mode=once" in run.text + run.errors
    assert _read_cassettes(pair)[1] == recorded
