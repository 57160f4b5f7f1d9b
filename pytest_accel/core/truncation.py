"""Texts of reports: truncation of what ranks write and raise, and the names of ranks and of their process groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from os import fstat
from typing import Any

_open = open  # A test may replace it.
LAST_OUTPUT = 8_000
"""Maximum number of bytes or characters of a log that are shown."""
_LONGEST_OUTPUT = 100_000
"""Characters of the captured output in one report, without ``-vv``: about a thousand lines of all ranks together."""
_LONGEST_LINE = 2_000
_MOST_LINES = 120
_GLOO_SOURCE = re.compile(r"\[[^\s\]]*/gloo/[^\s\]]*:\d+\] ")
"""The file of gloo that raised an error, with which its text begins."""
_GLOO_ADVICE = re.compile(r"\.? This is typically caused by .*?before reporting an error\. GLHF! \S*")
"""The end of gloo's errors about a connection (gloo/transport/tcp/pair.cc)."""
DEFAULT_GROUP = "default_pg"
"""torch's description of the default process group, used here as the group's name."""


def cut(text: str, longest: int, hint: str = "") -> str:
    """Return `text`, truncated in the middle to about `longest` characters. The `hint` says where the rest is shown."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out{hint} …]\n{text[-half:]}"


def cut_output(sections: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the `sections` of a report, titles and texts, truncated to about `_LONGEST_OUTPUT` characters in all."""
    longest = _LONGEST_OUTPUT // max(len(sections), 1)
    return [(title, cut(text, longest, "; -vv shows them")) for title, text in sections]


def first_line(error: object) -> str:
    """Return the first line of the text of `error`. The other lines explain how to debug it."""
    return str(error).strip().partition("\n")[0]


def read_end(file: str | int, begin: int = 0, longest: int = 1_000_000) -> str:
    """Return the text of `file`, a path or a descriptor, from the offset `begin`; at most its last `longest` bytes."""
    with _open(file, "rb", buffering=0, closefd=isinstance(file, str)) as opened:
        left_out = max(fstat(opened.fileno()).st_size - longest - begin, 0)
        opened.seek(begin + left_out)
        text = opened.read(longest).decode(errors="replace")
    return f"[… {left_out} bytes left out …]\n{text}" if left_out else text


def tail(path: str, longest: int = LAST_OUTPUT) -> str:
    """Return the end of the log `path`, at most `longest` bytes of it; empty if there is no log."""
    with suppress(OSError):
        return read_end(path, longest=longest).strip("\n")
    return ""


def cut_end(line: str, longest: int) -> str:
    """Return `line`, with an ellipsis in place of its end if it is longer than `longest` characters."""
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def cut_lines(lines: list[str]) -> list[str]:
    """Return `lines`, truncated to `_MOST_LINES` lines of about `_LONGEST_LINE` characters each."""
    if len(lines) > _MOST_LINES:
        first, last = lines[: _MOST_LINES * 2 // 3], lines[-_MOST_LINES // 3 :]
        lines = [*first, f"[… {len(lines) - len(first) - len(last)} lines left out; -vv shows them …]", *last]
    half = _LONGEST_LINE // 2
    return [
        f"{line[:half]} [… {len(line) - 2 * half} characters left out; -vv shows them …] {line[-half:]}"
        if len(line) > _LONGEST_LINE
        else line
        for line in lines
    ]


def cut_gloo(text: str) -> str:
    """Return `text` with gloo's error in it reduced to the event: ``gloo: Connection closed by peer ...``."""
    return _GLOO_ADVICE.sub("", _GLOO_SOURCE.sub("gloo: ", text))


def cut_failure(longrepr: Any) -> None:
    """Truncate a serialized failure of pytest (`longrepr`) in place."""
    if not isinstance(longrepr, dict):
        return
    tracebacks = [longrepr.get("reprtraceback"), *(part[0] for part in longrepr.get("chain") or ())]
    crashes = [longrepr.get("reprcrash"), *(part[1] for part in longrepr.get("chain") or ())]
    for traceback in tracebacks:
        for entry in traceback["reprentries"] if traceback else ():
            if entry["data"]:
                entry["data"]["lines"] = cut_lines([cut_gloo(line) for line in entry["data"]["lines"]])
    for crash in crashes:
        if crash:
            crash["message"] = "\n".join(cut_lines(cut_gloo(crash["message"]).split("\n")))


# Names


def line_prefix(rank: int, ranks: int) -> str:
    """Return the text before each line that `rank` has written; empty in a world of one rank."""
    return f"[rank {rank}] " if ranks > 1 else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the text for `ranks`: ``rank 1``, ``ranks 0-3`` or ``ranks 0, 2, 5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def group_label(name: str) -> str:
    """Return the text by which a message refers to the process group `name`."""
    return "the default process group" if name == DEFAULT_GROUP else f"process group {name}"
