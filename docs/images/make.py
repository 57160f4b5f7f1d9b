"""Make examples.svg, the terminal picture of README.md, from a real run: `python docs/images/make.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOMEWHERE = "/src/pytest-accel"
"""What a reader sees in place of this checkout's path."""
COLUMNS = 100
COMMAND = ["pytest", "examples", "examples/failing", "-v", "--accel", "none"]

WIDTH, HEIGHT, MARGIN = 8.43, 18, 16
"""Of a character of 14 px, and around the text, in pixels."""
COLOURS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea"}
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
PLAIN, GREY, BACKGROUND = "#e6edf3", "#8b949e", "#0d1117"


def run() -> str:
    """Return what the command writes to a terminal, with its colours. Only this plugin and pytest's own take part."""
    # Options on the command line would be in the command that runs a failed test again.
    plugin = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_accel.plugin"}
    environment = {**os.environ, **plugin, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    command = [sys.executable, "-m", *COMMAND]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 1:
        raise SystemExit(f"one test was to fail, but the exit status is {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.replace(str(ROOT), SOMEWHERE).replace(sys.executable, f"{SOMEWHERE}/.venv/bin/python")


def characters(line: str) -> list[tuple[str, str]]:
    """Return each character of a line with its CSS, after the SGR codes of ECMA-48 that pytest and Pygments use."""
    found, colour, bold = [], PLAIN, False
    for codes, text in re.findall(r"(?:\x1b\[([\d;]*)m)?([^\x1b]*)", line):
        for code in map(int, filter(None, codes.split(";"))):
            if code in (0, 39):
                colour, bold = PLAIN, bold and code == 39
            elif code == 1:
                bold = True
            elif code == 90:
                colour = GREY
            elif code % 60 in COLOURS:
                colour = COLOURS[code % 60]
        found += [(character, f"fill:{colour}{';font-weight:bold' if bold else ''}") for character in text]
    return found


def rows(output: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the rows of a terminal that shows the output: a line that is too long goes on in the next row."""
    for line in [f"$ {' '.join(COMMAND)}", *output.rstrip("\n").splitlines()]:
        found = characters(line)
        for start in range(0, max(1, len(found)), COLUMNS):
            yield found[start : start + COLUMNS]


def picture(output: str) -> str:
    """Return the picture of a terminal with the output, as SVG."""
    lines = list(rows(output))
    width, height = 2 * MARGIN + WIDTH * COLUMNS, 2 * MARGIN + HEIGHT * len(lines)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">',
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        f'<g font-family="{FONTS}" font-size="14">',
    ]
    for number, line in enumerate(lines):
        end = 0
        for style, group in groupby(line, key=lambda character: character[1]):
            piece = "".join(character for character, _ in group)
            start, end = end, end + len(piece)
            start += len(piece) - len(piece.lstrip())
            text = escape(piece.strip()).replace(" ", "\N{NO-BREAK SPACE}")
            # The length is given for each piece, so that a font of another width keeps the columns.
            place = f'x="{MARGIN + WIDTH * start:.1f}" y="{MARGIN + HEIGHT * (number + 0.75):.1f}"'
            length = f'textLength="{WIDTH * len(piece.strip()):.1f}" lengthAdjust="spacingAndGlyphs"'
            if text:
                svg.append(f'<text {place} {length} style="{style}">{text}</text>')
    return "\n".join([*svg, "</g>", "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("examples.svg").write_text(picture(run()), encoding="utf-8")
