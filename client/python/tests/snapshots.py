"""Snapshots of the texts that people read, in files as those of the crate `testing`: one file for each surface, a
section for each case. ``MAINSTAY_TEST_ACCEPT=1`` writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "snapshots"
# Read before the fixtures remove the launcher's variables.
ACCEPT = "MAINSTAY_TEST_ACCEPT" in os.environ


def check(surface: str, case: str, text: str) -> None:
    """Compares a text with its section of ``snapshots/SURFACE.txt``."""
    file, text = FOLDER / f"{surface}.txt", text.rstrip("\n")
    accepted = _sections(file.read_text() if file.exists() else "")
    if ACCEPT:
        accepted[case] = text
        FOLDER.mkdir(exist_ok=True)
        file.write_text("".join(f"=== {case}\n{accepted[case]}\n" for case in sorted(accepted)))
    assert accepted.get(case) == text, f"{file}, {case}: if the new text is right, run with MAINSTAY_TEST_ACCEPT=1"


def warned(stderr: str) -> str:
    """The texts of Mainstay's warnings, in order."""
    return "\n".join(re.findall(r"RuntimeWarning: (.*)", stderr))


def _sections(file: str) -> dict[str, str]:
    parts = (part.partition("\n") for part in f"\n{file}".split("\n=== ")[1:])
    return {case: text.rstrip("\n") for case, _, text in parts}
