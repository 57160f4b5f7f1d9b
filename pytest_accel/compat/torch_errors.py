"""Explanations of frequent mistakes in the use of `torch.distributed`, found by their errors without importing torch.

torch raises ValueError and RuntimeError for them, so they can be recognized only by the texts of the errors.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from traceback import walk_tb

from pytest_accel.core import launcher_env
from pytest_accel.messages.serialization import exception_text

MODULES = re.compile(r"torch(\.|$)")
"""The names of torch's modules, whose frames do not help with an error that has an explanation."""
_NOT_INITIALIZED = "Default process group has not been initialized"
_NO_VARIABLE = re.compile(
    r"Error initializing torch\.distributed using env:// rendezvous: environment variable \w+ expected, but not set"
    r"|LOCAL_RANK is not in the environment"
)
_TWICE = "trying to initialize the default process group twice"
_CONNECTION_LOST = re.compile(r"Connection reset by peer|Broken pipe|connection closed", re.IGNORECASE)
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that torchrun sets in each process, and this plugin in each rank of a distributed test."""
_PORT_IN_USE = re.compile(r"server socket has failed to listen.*?address already in use", re.DOTALL | re.IGNORECASE)
_HELD_PORT = "init_process_group with env:// uses a port that is held for this test; the fixture free_port has another"
_NO_HELD_PORT = "with @pytest.mark.distributed, init_process_group with env:// uses a port that is held for the test"
_FREE_PORT = "the fixture free_port has a port that no other test uses"


def explain(error: BaseException, *, grouped: bool, init: bool = False, about_marks: str | None = None) -> str | None:
    """Return an explanation of `error` or of one of its causes; None if it is no known mistake.

    `grouped` is True if the test has ``@pytest.mark.distributed``, and `init` if its ranks have a default group. A test
    without the mark has no explanation for a missing group in one of several processes of a launcher. An assertion
    about such a text is a failure of the test itself: it has no explanation. `about_marks` takes the place of a text on
    the missing mark, which would be wrong for a test with a mark of the project.
    """
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen and not isinstance(found, AssertionError):
        seen.add(id(found))  # The causes are a cycle after `raise error from error`.
        text = exception_text(found)
        if not grouped and isinstance(found, KeyError) and _is_of_environment(found):
            return about_marks or (
                f"{found.args[0]} is set in the ranks of a test with @pytest.mark.distributed, and not where pytest "
                "collects its file or runs other tests; read it in the test or in a fixture"
            )
        has_no_group = text.startswith(_NOT_INITIALIZED) or _NO_VARIABLE.match(text)
        if has_no_group and not grouped and launcher_env.find_here() is None:
            return about_marks or "this test has no @pytest.mark.distributed, so it ran in one process"
        if init and text.startswith(_TWICE):
            return "the default group exists already: leave this call out, or use @pytest.mark.distributed(init=False)"
        if type(found).__name__ == "DistNetworkError" and _CONNECTION_LOST.search(text):
            return (
                "torch's store ends the connection of a rank that sends a value of more than 8 MiB, or a key of more "
                "than about 8,000 bytes"
            )
        if _PORT_IN_USE.search(text):
            return _HELD_PORT if grouped else _NO_HELD_PORT
        if grouped and isinstance(found, OSError) and found.errno == errno.EADDRINUSE:
            return _FREE_PORT
        found = found.__cause__
    return None


def _is_of_environment(error: KeyError) -> bool:
    """Return whether `error` was raised by `os.environ` for a variable that only ranks have."""
    raised_by = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    return raised_by[-1:] == ["os"] and error.args[0] in _RANK_VARIABLES


def add_hint(error: BaseException, hint: str) -> None:
    """Add `hint` to the notes of `error` (PEP 678), which pytest shows below its text."""
    with suppress(AttributeError, TypeError):  # The exception's type may not allow it.
        notes = list(getattr(error, "__notes__", ()))
        if hint not in notes:  # pytest raises the exception of a fixture again in each test that needs it.
            vars(error)["__notes__"] = [*notes, hint]
