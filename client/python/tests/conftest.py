"""What every test here stands on: real interpreters, real pages, and an environment without traces of another launcher.

The tests run against the installed wheel, never against the source tree beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != SOURCE]

LAUNCHER_VARIABLES = (
    "MAINSTAY_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHONWARNINGS", "PYTHONPATH",
)
for _name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
    del os.environ[_name]

import pytest  # noqa: E402

from mainstay import _native  # noqa: E402


class Page:
    """A heartbeat page as a launcher makes it, and what an agent would read in it."""

    def __init__(self, path: Path):
        self.path = path
        _native._testing_format_page(path, now=time.monotonic_ns(), job="job-1", rank=3, world_size=4)

    def read(self) -> dict:
        return _native._testing_read_page(self.path)

    @property
    def note(self):
        return self.read()["exit_note"]


@pytest.fixture
def page(tmp_path) -> Page:
    return Page(tmp_path / "rank-3.page")


@pytest.fixture
def python(tmp_path):
    """Runs a script in a fresh interpreter and returns the finished process, output as text."""

    def run(code: str, *options: str, page=None, interpreter: str = sys.executable, check=True, **variables):
        script = tmp_path / f"script-{time.monotonic_ns()}.py"
        script.write_text(textwrap.dedent(code))
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        if page is not None:
            environment["MAINSTAY_PAGE"] = str(page.path)
        done = subprocess.run(
            [interpreter, *options, str(script)], cwd=tmp_path, env=environment, text=True, capture_output=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
