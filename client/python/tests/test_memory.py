"""Checkpoints in the launcher's memory: a real launcher, real ranks that die during a save, and the steps that are
offered afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import snapshots

numpy = pytest.importorskip("numpy")

PLAIN = """
import os, signal, sys, time
import mainstay
from mainstay import checkpoint, _pool
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""

COMMON = PLAIN + """
import numpy as np
def state(step):
    weights = np.full(700_000, step * 10 + rank, np.float32)
    return {"step": step, "model": {"w": weights, "b": np.arange(7) + step}, "rest": [1, ("x", step)]}
def same(saved, step):
    wanted = state(step)
    return (saved["step"], saved["rest"]) == (step, wanted["rest"]) and all(
        np.array_equal(saved["model"][name], wanted["model"][name]) for name in wanted["model"])
def in_memory():
    return checkpoint._in_memory(checkpoint._home(None))
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a job in the background of the test; ``end()`` waits for it."""
    program = os.environ.get("MAINSTAY_TEST_BIN")
    if not program:
        pytest.skip("MAINSTAY_BIN does not name the program")
    script, runtime, steps = tmp_path / "job.py", tmp_path / "runtime", tmp_path / "steps"

    def begin(code: str, *options: str, ranks: int = 2, common: str = COMMON, **variables):
        script.write_text(textwrap.dedent(common) + textwrap.dedent(code))
        return subprocess.Popen(
            [program, "run", "--no-agent", "--no-warm", f"--nproc-per-node={ranks}", "--fault-timeout=100s",
             f"--log-dir={tmp_path / 'logs'}", f"--runtime-dir={runtime}", f"--checkpoint-dir={steps}", *options,
             "--no-python", sys.executable, str(script)],
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        )  # fmt: skip

    begin.steps, begin.pools = steps, runtime / "pools"
    return begin


def end(job, status=0) -> str:
    said = job.communicate(timeout=300)[0]
    assert job.returncode == status, said
    return said


def manifest(steps, step, rank=0) -> dict:
    return json.loads((steps / f"step-{step:012d}" / f"rank-{rank:05d}" / "manifest.json").read_text())


def test_a_state_is_loaded_into_the_memory_of_another_where_it_fits_and_nowhere_twice(launch):
    end(launch(
        """
        assert checkpoint.save(3, state(3))
        while checkpoint.latest() != 3: time.sleep(0.01)
        into = state(0)
        into["model"]["b"] = into["model"]["b"].astype(np.int32)  # Another type: not written to.
        loaded = checkpoint.load(into=into)
        assert same(loaded, 3) and loaded["model"]["w"] is into["model"]["w"]
        assert loaded["model"]["b"] is not into["model"]["b"] and into["model"]["b"][0] == 0
        both = np.zeros(8)
        assert checkpoint.save(4, {"a": np.full(8, 1.0), "b": np.full(8, 2.0)})
        while checkpoint.latest() != 4: time.sleep(0.01)
        loaded = checkpoint.load(into={"a": both, "b": both})
        assert (loaded["a"] == 1).all() and (loaded["b"] == 2).all() and loaded["a"] is not loaded["b"]
        """,
        ranks=1,
    ))  # fmt: skip


def test_a_program_without_torch_and_numpy_resumes_from_memory_and_imports_neither(launch):
    end(launch(
        """
        for name in ("numpy", "torch"):
            assert name not in sys.modules, name
        saved = checkpoint.load()
        if attempt == 1:
            assert saved == {"step": 3, "words": ["x", (1, None)]}, saved
            assert checkpoint.save(4, saved) and checkpoint.load(4) == saved
        else:
            assert saved is None and checkpoint.save(3, {"step": 3, "words": ["x", (1, None)]})
            while checkpoint.latest() != 3: time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        for name in ("numpy", "torch"):
            assert name not in sys.modules, name
        """,
        ranks=1, common=PLAIN,
    ))  # fmt: skip


def test_torch_tensors_are_loaded_in_place(launch):
    pytest.importorskip("torch")
    end(launch(
        """
        import torch
        model = torch.nn.Linear(64, 64)
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert checkpoint.save(1, {"step": 1, "model": model.state_dict(), "bare": torch.arange(5)})
        while checkpoint.latest() != 1: time.sleep(0.01)
        fresh = torch.nn.Linear(64, 64)
        loaded = checkpoint.load(into={"model": fresh.state_dict()})
        assert loaded["step"] == 1 and torch.equal(loaded["bare"], torch.arange(5))
        for name, tensor in fresh.state_dict().items():
            assert torch.equal(tensor, wanted[name]) and loaded["model"][name].data_ptr() == tensor.data_ptr()
        """,
        ranks=1,
    ))  # fmt: skip


def test_memory_overwritten_by_a_failed_load_is_reported(launch):
    end(launch(
        """
        assert checkpoint.save(1, {"w": np.full(3_000_000, 1.0, np.float32)})
        while in_memory().origin(1) is None: time.sleep(0.01)
        # Damages every copy of it in the second chunk.
        import glob
        for path in glob.glob(os.path.join(os.environ["MAINSTAY_CHECKPOINT_POOL"], "rank-00000", "slot-*.*")):
            if not path.endswith(".json"):
                with open(path, "r+b") as file:
                    file.seek(5 << 20)
                    file.write(b"spoilt")
        import shutil
        shutil.rmtree(os.environ["MAINSTAY_CHECKPOINT_DIR"], ignore_errors=True)
        try:
            loaded = checkpoint.load(into={"w": np.zeros(3_000_000, np.float32)})
        except RuntimeError as error:
            assert "overwritten" in str(error), error
        else:
            raise AssertionError(loaded)
        """,
        "--checkpoint-bandwidth=1",
        ranks=1,
    ))  # fmt: skip


def pools(launch) -> list:
    return [each.name for each in launch.pools.iterdir() if each.is_dir()]


def test_a_save_is_a_copy_and_the_newest_step_is_on_the_disk_when_the_job_is_over(launch):
    said = end(launch(
        """
        assert checkpoint.load() is None and checkpoint.reserve(state(0))
        for step in range(1, 6):
            assert checkpoint.save(step, state(step))
        assert _pool.memory_of_rank(os.environ["MAINSTAY_CHECKPOINT_DIR"], rank).control.slots()
        while checkpoint.latest() != 5: time.sleep(0.01)
        assert same(checkpoint.load(), 5)
        assert in_memory().origin(5) is not None
        """
    ))  # fmt: skip
    # One line names what is protected; there are no other lines about checkpoints.
    rest = "\n".join(line for line in said.splitlines() if " protected: " not in line)
    assert "checkpoint" not in rest.replace(str(launch.steps), ""), said
    for rank in (0, 1):
        told = manifest(launch.steps, 5, rank)
        assert (told["format"], told["rank"], told["world_size"], told["serialisation"]) == (2, rank, 2, "safetensors")
    assert pools(launch) == []
    content = (launch.steps / "step-000000000005/rank-00001/state.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["model.w"]["dtype"] == "F32" and header["__metadata__"]["step"] == "5"
    begin, finish = header["model.w"]["data_offsets"]
    at = 8 + int.from_bytes(content[:8], "little")
    assert at % 4096 == 0
    assert numpy.array_equal(numpy.frombuffer(content[at + begin : at + finish], numpy.float32), numpy.full(700_000, 51))


def test_ranks_that_say_that_they_save_the_same_have_one_root_over_their_tensors(launch):
    def saved(step, save):
        end(launch(f"""
        weights = np.full(1_300_000, 7, np.float32)
        def state(): return {{"w": weights, "random": "x" * (50 + rank)}}
        {save}
        """))
        homes = sorted((launch.steps / f"step-{step:012d}").glob("rank-*/manifest.json"))
        assert len(homes) == 2
        return [json.loads(home.read_text()).get("alike") for home in homes]

    one, other = saved(1, 'assert checkpoint.save(1, state(), alike="dp")')
    assert one == other and one["group"] == "dp", "the rest of the state is a rank's own"
    one, other = saved(2, 'weights[1_000_000] += rank; assert checkpoint.save(2, state(), alike="dp")')
    assert one["root"] != other["root"]
    assert saved(3, "assert checkpoint.save(3, state())") == [None, None], "who does not say so is not compared"


def test_a_step_saved_a_moment_ago_is_found_before_its_checksums_are_taken(launch):
    end(launch(
        """
        assert checkpoint.save(1, state(1)) and checkpoint.latest() == 1
        keeper = _pool.memory_of_rank(os.environ["MAINSTAY_CHECKPOINT_DIR"], rank).control.keeper()
        class Clock:
            monotonic = time.monotonic
            def sleep(seconds):
                # The rank waits for the keeper, which now continues.
                os.kill(keeper, signal.SIGCONT)
                time.sleep(seconds)
        _pool.time = Clock
        os.kill(keeper, signal.SIGSTOP)
        try:
            assert checkpoint.save(2, state(2)) and checkpoint.latest() == 2
        finally:
            os.kill(keeper, signal.SIGCONT)
        """,
        ranks=1,
    ))  # fmt: skip


def test_a_rank_killed_in_the_middle_of_a_save_loses_that_step_only(launch):
    said = end(launch(
        """
        saved = checkpoint.load()
        if attempt == 0:
            assert saved is None
            for step in (1, 2, 3):
                assert checkpoint.save(step, state(step))
            if rank == 0:
                assert checkpoint.save(4, state(4))
                time.sleep(1000)
            def half(self, memory, parts):
                memory.copy([(0, _pool._address_of(parts.header), len(parts.header))], 1)
                os.kill(os.getpid(), signal.SIGKILL)
            _pool.Memory._copy = half
            checkpoint.save(4, state(4))
        assert same(saved, 3), saved["step"]
        assert in_memory().origin(3)[:2] == (os.environ["MAINSTAY_JOB_ID"], 0)
        assert checkpoint.save(4, state(4))
        """,
        "--max-restarts=1",
    ))  # fmt: skip
    assert manifest(launch.steps, 4)["attempt"] == manifest(launch.steps, 4, 1)["attempt"] == 1, said


def test_a_launcher_killed_with_checkpoints_in_memory_only_loses_none(launch):
    waits = """
        saved = checkpoint.load()
        if saved is not None:
            assert same(saved, 2), saved["step"]
            sys.exit(0)
        for step in (1, 2):
            assert checkpoint.save(step, state(step))
        while checkpoint.latest() != 2: time.sleep(0.01)
        open(f"ready.{rank}", "w").close()
        time.sleep(1000)
    """
    job = launch(waits, "--checkpoint-bandwidth=1")
    home = launch.steps.parent
    while not all((home / f"ready.{rank}").exists() for rank in (0, 1)):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    # Either the guardian or the next launcher writes the step.
    end(launch(waits))
    assert manifest(launch.steps, 2)["format"] == 2 and pools(launch) == []


def test_a_flipped_bit_in_memory_is_not_offered_and_the_disk_or_an_older_step_is(launch):
    end(launch(
        """
        for step in (1, 2):
            assert checkpoint.save(step, state(step))
        while checkpoint.latest() != 2: time.sleep(0.01)
        while not os.path.exists(os.path.join(os.environ["MAINSTAY_CHECKPOINT_DIR"], "step-000000000002/rank-00000/manifest.json")):
            time.sleep(0.01)
        copies = in_memory()._steps[2][1]
        with open(copies[0].path, "r+b") as slot:
            slot.seek(100_000); byte = slot.read(1)
            slot.seek(100_000); slot.write(bytes([byte[0] ^ 4]))
        import warnings
        # As after a restart, no process of this attempt has read it.
        checkpoint._attempt = lambda: 7
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert same(checkpoint.load(), 2)
        assert any("chunk" in str(each.message) for each in told), told
        """,
        ranks=1,
    ))  # fmt: skip


def test_without_memory_a_rank_writes_to_the_disk_itself(launch):
    said = end(launch("""
        assert not checkpoint.reserve(state(1))
        assert checkpoint.save(1, state(1)) and same(checkpoint.load(), 1)
    """, "--checkpoint-memory=1M", ranks=1))  # fmt: skip
    lines = [line for line in said.splitlines() if "no memory" in line]
    assert len(lines) == 1, said
    snapshots.check("checkpoint", "no memory on this host", lines[0].partition("mainstay: ")[2].partition("Z ")[2])
    assert manifest(launch.steps, 1)["format"] == 1


def test_a_state_is_loaded_as_it_was_saved(forked):
    forked(
        """
        import pickle, numpy, torch
        from mainstay import _container
        base = torch.arange(24, dtype=torch.float32)
        tied = torch.nn.Parameter(torch.randn(3, 3))
        optimiser = torch.optim.AdamW([tied])
        tied.sum().backward(); optimiser.step()
        state = {
            "a": base[:12].view(3, 4), "b": base[6:], "t": base.view(4, 6).t(), "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 5), "bf": torch.randn(5).bfloat16(), "bool": torch.tensor([True, False]),
            "tied": tied, "again": tied, "half": tied.detach(), "opt": optimiser.state_dict(), 7: {"x": [torch.ones(2), (torch.zeros(1),)]},
            "np": numpy.arange(6).reshape(2, 3), "fortran": numpy.asfortranarray(numpy.ones((2, 3))), "words": "é", "sparse": torch.eye(3).to_sparse(),
            "complex": torch.randn(2, dtype=torch.complex128), "rng": torch.get_rng_state(), "__metadata__": torch.ones(1), "a.b": torch.ones(1),
        }
        split = _container.split(state, {"job": "x"})
        content = bytearray(split.total)
        content[: len(split.header)] = split.header
        import ctypes
        for at, part in split.parts:
            content[at : at + part.bytes] = ctypes.string_at(part.address, part.bytes)
        content[split.rest_at :] = split.rest
        table = _container.layout(bytes(content[: 8 + int.from_bytes(content[:8], "little")]), split.total)
        names = {name for name, *_ in [(each,) for each in table]}
        assert {"tied", "bf", "7.x.0", "opt.state.0.exp_avg", "np", "scalar", "empty"} <= names, names
        how = {name: (kind, more) for kind, name, *more in _container.table_of(split.rest)}
        import functools
        @functools.lru_cache(None)
        def tensor(name):
            dtype, shape, at, length = table[name]
            kind, more = how[name]
            room, address = _container.room(kind, dtype, shape, more[0] if kind == "array" else None)
            ctypes.memmove(address, bytes(content[at : at + length]), length)
            return room
        back = _container.join(split.rest, tensor)
        assert list(back) == list(state)
        for name in ("a", "b", "t", "scalar", "empty", "bf", "bool", "complex", "rng", "half", "__metadata__", "a.b"):
            assert torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype and back[name].stride() == state[name].stride(), name
        assert back["tied"] is back["again"] and isinstance(back["tied"], torch.nn.Parameter)
        assert back["tied"].data_ptr() == back["half"].data_ptr()
        back["a"][0, 0] = 99
        assert back["t"][0, 0] == 99, "views of one storage stay views of one"
        assert torch.equal(back["sparse"].to_dense(), torch.eye(3)) and back["words"] == "é"
        assert numpy.array_equal(back["np"], state["np"]) and back["np"].flags.writeable and back["fortran"].flags.f_contiguous
        assert torch.equal(back["opt"]["state"][0]["exp_avg"], state["opt"]["state"][0]["exp_avg"])
        """
    )
