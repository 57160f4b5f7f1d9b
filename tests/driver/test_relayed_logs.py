"""Tests of the text that a driver reads from the files of a world's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.paths import END_OF_CALL, log_file_path, terminal_path
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.diagnostics.inspector import WorldInspector
from pytest_accel.driver import relayed_logs
from pytest_accel.driver.log_tail import CHUNK
from pytest_accel.driver.relayed_logs import RelayedLogs

SPEC = WorldSpec(1, WorldKey("cpu", None, 2, grouped=True))


class Relay:
    """Logs of a world of two ranks, the file that the ranks share, and the text that has been passed on."""

    def __init__(self, folder: Path, *, terminal: bool) -> None:
        path = terminal_path if terminal else log_file_path
        self.path = Path(path(str(folder), 1, 0))
        self.texts: list[str] = []
        inspector = WorldInspector(str(folder), SPEC)
        self.logs = RelayedLogs(
            inspector, SPEC, "terminal" if terminal else "log_file", self.texts.append, terminal=terminal
        )

    def add(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def taken(self) -> str:
        """Return the text since the last call, without the marks."""
        text = "".join(self.texts).replace(END_OF_CALL, "")
        self.texts.clear()
        return text


def test_text_of_a_teardown_waits_for_the_end_of_the_call_in_all_ranks(tmp_path: Path) -> None:
    relay = Relay(tmp_path, terminal=True)
    relay.logs.drain()  # There is no file.
    relay.add(f"call of 0\n{END_OF_CALL}teardown of 0\ncall of 1\n{END_OF_CALL}teardown of 1\n")
    relay.logs.drain()
    assert relay.taken() == "call of 0\nteardown of 0\ncall of 1\n"
    relay.logs.drain()
    assert relay.taken() == ""
    relay.logs.finish()
    assert relay.taken() == "teardown of 1\n"

    relay.add("setup\n")
    relay.logs.drain()
    assert relay.taken() == "setup\n"
    relay.add(f"call\n{END_OF_CALL}teardown\n")
    assert not relay.logs.show()
    assert relay.taken() == "call\n"
    assert not relay.logs.show()  # As it comes, while the other rank is in its call.
    assert relay.taken() == "teardown\n"


def test_text_is_left_out_at_the_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_logs, "BACKLOG", 200_000)
    text = "".join(f"{number:09}\n" for number in range(30_000))
    for terminal in (False, True):
        relay = Relay(tmp_path, terminal=terminal)
        relay.add(text)
        relay.logs.finish()
        shown = relay.taken()
        if terminal:
            note, _, rest = shown.partition("\n")
            assert note == f"[\u2026 {len(text) - len(rest)} bytes left out \u2026]"
            assert text.endswith(rest)
            assert len(rest) == CHUNK
        else:
            assert shown == text


def test_files_are_emptied_before_they_grow_and_for_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_logs, "_LONGEST_FILE", 10)
    relay = Relay(tmp_path, terminal=False)
    for text, size in (("short\n", 6), ("longer\n", 0), ("again\n", 6)):
        relay.add(text)
        relay.logs.finish()
        assert relay.taken() == text
        assert relay.path.stat().st_size == size
    relay.logs.close()
    assert relay.taken() == ""
    assert relay.path.stat().st_size == 0
