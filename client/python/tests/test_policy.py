"""The classes of a recovery policy: typed, documented, and what the examples use."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from mainstay import policy

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/howto/policy.md").read_text()
REFERENCE = (ROOT / "docs/reference/policy-file.md").read_text()


def examples():
    """The scripts of the guide, without the indentation of a list."""
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
    return ["\n".join(line[len(indent):] for line in text.split("\n")) for indent, text in blocks]


def paths(of, prefix=""):
    """The paths of all fields of a class, as the reference writes them."""
    hints = typing.get_type_hints(of)
    for field in dataclasses.fields(of):
        hint = hints[field.name]
        item = (typing.get_args(hint) or (None,))[0]
        if dataclasses.is_dataclass(hint) and f"{prefix}{field.name}" != "past[].cause":
            yield from paths(hint, f"{prefix}{field.name}.")
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(item):
            yield from paths(item, f"{prefix}{field.name}[].")
        else:
            yield f"{prefix}{field.name}"


def test_the_reference_has_every_field():
    table = REFERENCE[REFERENCE.index("| field of `case` |"):]
    documented = re.findall(r"^\| `([^`]+)` \|", table[: table.index("\n\n")], re.MULTILINE)
    assert documented == list(paths(policy.Case))


def test_the_reference_has_every_action():
    missing = [action for action in typing.get_args(policy.Action) if f"`{action}`" not in REFERENCE]
    assert missing == []


def test_a_policy_cannot_change_the_case():
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.Cause("signal", signal=9).signal = 15
    assert policy.Cause("signal", signal=9) == policy.Cause("signal", signal=9)


def test_the_examples_and_the_template_have_the_right_types(tmp_path):
    pytest.importorskip("mypy")
    scripts = [*examples(), (ROOT / "agent/cli/src/policy/template.py").read_text()]
    assert len(scripts) == 5
    # Of a file among the installed packages mypy reports no errors.
    scripts.append(Path(policy.__file__).read_text())
    for number, text in enumerate(scripts):
        (tmp_path / f"policy_{number}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
         *sorted(map(str, tmp_path.glob("*.py")))],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_a_wrong_action(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "wrong.py"
    script.write_text("from mainstay.policy import Decision\nDecision('reboot')\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(script)],
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "[arg-type]" in done.stdout, done.stdout + done.stderr
