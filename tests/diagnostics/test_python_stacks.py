"""Tests of parsing the stacks that faulthandler writes, and of showing the source lines of their frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.frames import PACKAGE, Folders
from pytest_accel.diagnostics.python_stacks import (
    frames_of_other_threads,
    frames_of_rank,
    relevant,
    stack_text,
    where,
)

CRASH = f"""Fatal Python error: Segmentation fault

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/signal.py", line 82 in sigwait
  File "{PACKAGE}rank/group_state.py", line 46 in _write_on_signal
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f01 (most recent call first):
  File "/home/me/helpers.py", line 31 in crash
  File "/home/me/test_it.py", line 38 in test_crash
  File "/venv/lib/python3.11/site-packages/_pytest/python.py", line 187 in pytest_pyfunc_call
  File "<string>", line 2 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def place(stack: str, folders: Folders = Folders()) -> str | None:  # noqa: B008 - immutable.
    """Return the place in the code of the rank whose stacks are `stack`, or None if no frame is the user's."""
    frame = where(frames_of_rank(stack), folders)
    return None if frame is None else frame.where(folders)


def test_the_users_frame_is_found() -> None:
    stack = """Thread 0x00007f1 (most recent call first):
  File "/opt/lib/python3.12/threading.py", line 655 in wait
  File "/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/helpers.py", line 40 in meet
  File "/home/me/test_it.py", line 12 in test_it
"""
    assert place(stack) == "/home/me/helpers.py:40 in meet"
    assert place(stack, Folders("/home/me")) == "helpers.py:40 in meet"
    assert [frame.function for frame in relevant(frames_of_rank(stack))] == ["wait", "meet", "test_it"]


TEST = '  File "/home/me/tests/test_it.py", line 12 in test_it\n'
HELPER = '  File "/home/me/helpers.py", line 3 in work\n'
LIBRARY = '  File "/opt/lib/python3.12/threading.py", line 655 in wait\n'
THREAD = "Thread 0x00007f2 (most recent call first):\n"
CURRENT = "Current thread 0x00007f1 (most recent call first):\n"


@pytest.mark.parametrize(
    ("stack", "rootdir", "found"),
    [
        (THREAD + HELPER + TEST, "/home/me/tests", "test_it.py:12 in test_it"),
        (THREAD + HELPER + TEST, "/home/you", "/home/me/helpers.py:3 in work"),
        ("", "/home/me", None),
        (THREAD + LIBRARY, "/home/me", None),
        # The place of a rank is that of its main thread, or of the thread that has crashed.
        (f"{THREAD}{HELPER}\n{CURRENT}{TEST}", "/home/me", "tests/test_it.py:12 in test_it"),
        (f"Fatal Python error: Aborted\n\n{CURRENT}{HELPER}\n{THREAD}{TEST}", "/home/me", "helpers.py:3 in work"),
        (
            f'{CURRENT}  File "<frozen os>", line 692 in __len__\n{LIBRARY}  File "<string>", line 2 in <module>\n',
            "",
            None,
        ),
    ],
)
def test_the_place_of_a_rank(stack: str, rootdir: str, found: str | None) -> None:
    assert place(stack, Folders(rootdir)) == found


def test_other_threads_are_told_apart() -> None:
    found = frames_of_other_threads(f"{THREAD}{HELPER}\n{CURRENT}{TEST}")
    assert [[frame.function for frame in frames] for frames in found] == [["work"]]


def test_the_stack_of_a_crash() -> None:
    assert place(CRASH, Folders("/home/me")) == "helpers.py:31 in crash"
    for text in ("_pytest", "flight_recorder", "Extension modules"):
        assert text not in stack_text(CRASH, Folders())


def test_the_threads_of_the_package_are_left_out() -> None:
    assert frames_of_other_threads(CRASH) == []


def test_the_source_lines_are_shown_as_in_a_traceback_of_pytest(tmp_path: Path) -> None:
    test, helper = tmp_path / "test_it.py", tmp_path / "helper.py"
    test.write_text("import helper\n\n\ndef test_it():\n    before = 1\n    helper.wait_for(before)\n    after = 2\n")
    body = "".join(f"        step_{number}()\n" for number in range(9))
    helper.write_text(f"class Helper:\n    def wait_for(self):\n{body}\n\nwait_for = None\n")
    stack = f"""Thread 0x00007f1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5 in barrier
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{helper}", line 9 in wait_for
  File "{test}", line 6 in test_it
"""
    assert stack_text(stack, Folders(str(tmp_path))).splitlines() == [
        "test_it.py:6 in test_it",
        "    helper.wait_for(before)",
        "helper.py:9 in wait_for",
        "    step_6()",
        "torch/distributed/distributed_c10d.py:5 in barrier",
    ]


def test_frames_without_source_show_their_place() -> None:
    stack = 'Thread 0x1 (most recent call first):\n  File "/nowhere/test_it.py", line 3 in test_it\n'
    assert stack_text(stack, Folders("/nowhere")) == "test_it.py:3 in test_it"
    assert stack_text("", Folders()) == ""


def test_a_frame_of_pytest_is_shown_if_there_is_no_other() -> None:
    stack = 'Thread 0x1 (most recent call first):\n  File "/v/site-packages/_pytest/main.py", line 3 in main\n'
    assert stack_text(stack, Folders()).splitlines()[0] == "_pytest/main.py:3 in main"
