"""Fixtures for all tests: real interpreters, real pages, and an environment without variables of another launcher.

The tests run against the installed wheel, never against the source tree next to them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import snapshots  # noqa: F401

SOURCE = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != SOURCE]

LAUNCHER_VARIABLES = (
    "MAINSTAY_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHONWARNINGS", "PYTHONPATH",
)
if os.environ.get("MAINSTAY_BIN"):
    os.environ["MAINSTAY_TEST_BIN"] = os.environ["MAINSTAY_BIN"]
for _name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES) and name != "MAINSTAY_TEST_BIN"]:
    del os.environ[_name]

import pytest  # noqa: E402
from forked_ranks import ForkedRanks, free_port  # noqa: E402

from mainstay import _native  # noqa: E402


class Page:
    """A heartbeat page as a launcher creates it, and its content as an agent reads it."""

    def __init__(self, path: Path, rank: int = 3, world_size: int = 4):
        self.path = path
        _native._testing_format_page(path, now=time.monotonic_ns(), job="job-1", rank=rank, world_size=world_size)

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
    """Runs a script in a new interpreter and returns the finished process with its output as text."""

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


# Imported once for all ranks that are forked.
FORKED_WITH = (
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.device_mesh", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor",
)


@pytest.fixture(scope="session")
def forked_ranks():
    """The process that has imported PyTorch, and from which ranks are forked."""
    pytest.importorskip("torch")
    ranks = ForkedRanks(FORKED_WITH)
    yield ranks
    ranks.close()


@pytest.fixture
def forked_from(tmp_path):
    """A function: the process from which ranks are forked, to the function that runs a script on such ranks.

    Each rank has a heartbeat page and is watched as in a warm start. The result is the pages by rank, and the output of
    all ranks.
    """

    def runs_on(forked_ranks: ForkedRanks):
        def run(code: str, ranks: int = 1, page=None, **variables) -> tuple[dict, str]:
            script = tmp_path / f"forked-{time.monotonic_ns()}.py"
            script.write_text(textwrap.dedent(code))
            common = {
                **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                **{name: str(value) for name, value in variables.items()},
            }
            pages = [page] if page else [Page(script.with_suffix(f".{rank}.page"), rank, ranks) for rank in range(ranks)]
            environments = [
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "MAINSTAY_PAGE": str(pages[rank].path)}
                for rank in range(ranks)
            ]
            ends = forked_ranks.run(str(script), environments, str(script.with_suffix(".output")), timeout=180)
            printed = "".join(script.with_suffix(f".output.{rank}").read_text() for rank in range(ranks))
            assert ends == [0] * ranks, printed
            return {rank: page.read() for rank, page in enumerate(pages)}, printed

        return run

    return runs_on


@pytest.fixture
def forked(forked_from, forked_ranks):
    """Runs a script on ranks that are forked with PyTorch imported."""
    return forked_from(forked_ranks)


class Job:
    """A finished ``mainstay run``: its exit status, its output, and the pages of its ranks."""

    def __init__(self, done, runtime_dir: Path):
        self.done = done
        self.pages = {
            int(path.name.split(".")[0].removeprefix("rank-")): _native._testing_read_page(path)
            for path in sorted(runtime_dir.glob("*/rank-*.attempt-*.page"))
        }


@pytest.fixture
def run_job(tmp_path):
    """Runs a script under the real launcher, the program in MAINSTAY_BIN, and waits for its end."""
    program = os.environ.get("MAINSTAY_TEST_BIN")
    if not program:
        pytest.skip("MAINSTAY_BIN does not name the program")

    def run(code: str, ranks: int = 2, check: bool = True, **variables) -> Job:
        script = tmp_path / f"job-{time.monotonic_ns()}.py"
        script.write_text(textwrap.dedent(code))
        # It contains sockets, whose paths must be short. The path of pytest's folder may be too long.
        runtime_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rt-")))
        done = subprocess.run(
            [program, "run", "--no-agent", f"--nproc-per-node={ranks}", "--max-restarts=0",
             f"--log-dir={tmp_path / 'logs'}", f"--runtime-dir={runtime_dir}", "--no-python",
             sys.executable, str(script)],
            cwd=tmp_path, text=True, capture_output=True, timeout=300,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return Job(done, runtime_dir)

    with contextlib.ExitStack() as stack:
        yield run
