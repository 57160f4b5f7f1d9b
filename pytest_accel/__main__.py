"""``python -m pytest_accel``: commands that need no pytest session."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from pytest_accel import features


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, else ``info``; return the exit status.

    Raise SystemExit with status 2 for wrong arguments.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and not given[0].startswith("-") else "info"
    if name not in features.commands():
        allowed = ", ".join(features.commands())
        argparse.ArgumentParser("python -m pytest_accel").error(f"no command {name!r}; allowed are {allowed}")
    return int(features.command(name)(given))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Exit silently if the reader of a pipe closes it (``| head``).
    sys.exit(main())
