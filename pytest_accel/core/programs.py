"""Look-up of the programs that the plugin starts."""

from __future__ import annotations

import os
import shutil
import sys


def find_program(name: str) -> str | None:
    """Return the path of the program `name`, or None if it is not installed.

    The folder of the running interpreter is searched before PATH: if its virtual environment is not activated, PATH
    does not include the programs of that environment.
    """
    beside = shutil.which(name, path=os.path.dirname(sys.executable)) if sys.executable else None
    return beside or shutil.which(name)
