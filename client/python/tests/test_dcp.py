"""PyTorch's distributed checkpoints in Mainstay, with the real torch: gloo, other numbers of ranks, kills."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest
from forked_ranks import free_port

pytest.importorskip("torch.distributed.checkpoint")

PRELUDE = """
import os, signal, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor
import mainstay.dcp
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
def full(seed, rows=13, columns=6):
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) + 1000 * seed
def state(seed):
    return {
        "sharded": distribute_tensor(full(seed), mesh, [Shard(0)]),
        "columns": distribute_tensor(full(seed, 5, 9), mesh, [Shard(1)]),
        "same": full(seed, 3, 3),
        "half": full(seed, 4, 4).to(torch.bfloat16),
        "step": seed,
        "note": {"lr": 0.1 * seed},
    }
def assert_is(loaded, seed):
    assert torch.equal(loaded["sharded"].full_tensor(), full(seed)), loaded["sharded"]
    assert torch.equal(loaded["columns"].full_tensor(), full(seed, 5, 9))
    assert torch.equal(loaded["same"], full(seed, 3, 3)) and torch.equal(loaded["half"], full(seed, 4, 4).to(torch.bfloat16))
    assert loaded["step"] == seed and loaded["note"]["lr"] == 0.1 * seed, loaded
"""


class Ranks:
    """Runs a script on this many ranks, as torchrun starts them, and waits."""

    def __init__(self, tmp_path, forked):
        self.tmp_path = tmp_path
        self.forked = forked
        self.directory = tmp_path / "checkpoints"

    def __call__(self, code: str, world: int, check: bool = True, **variables):
        script = self.tmp_path / f"ranks-{len(list(self.tmp_path.glob('ranks-*.py')))}.py"
        script.write_text(PRELUDE + textwrap.dedent(code) + "\ndist.destroy_process_group()\n")
        port = free_port()
        common = {
            **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "MAINSTAY_CHECKPOINT_DIR": str(self.directory), "OMP_NUM_THREADS": "1", **variables,
        }
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        ends = self.forked.run(str(script), environments, str(script.with_suffix(".output")), timeout=180)
        printed = "\n".join(script.with_suffix(f".output.{rank}").read_text() for rank in range(world))
        if check:
            assert ends == [0] * world, printed
        return ends, printed


@pytest.fixture
def ranks(tmp_path, forked_ranks):
    return Ranks(tmp_path, forked_ranks)


SAVE = "dcp.save(state(SEED), storage_writer=mainstay.dcp.Writer(SEED))\n"
LOAD = """
loaded = state(0)
reader = mainstay.dcp.Reader()
dcp.load(loaded, storage_reader=reader)
assert reader.step == SEED, reader.step
assert_is(loaded, SEED)
"""


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_two_ranks_saved_is_loaded_on_any_number(ranks, world):
    ranks(SAVE.replace("SEED", "7") + SAVE.replace("SEED", "8"), 2)
    ranks(LOAD.replace("SEED", "8"), world)


def test_an_asynchronous_save_and_a_checkpoint_id(ranks):
    ranks("""
        future = dcp.async_save(state(9), checkpoint_id="runs/a/step-9", storage_writer=mainstay.dcp.Writer())
        future.result()
        loaded = state(0)
        dcp.load(loaded, checkpoint_id="runs/a/step-9", storage_reader=mainstay.dcp.Reader())
        assert_is(loaded, 9)
    """, 2)


def test_an_fsdp2_model_and_its_optimizer_load_on_more_ranks_as_from_torchs_own_files(ranks):
    model = """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        files = os.environ["MAINSTAY_CHECKPOINT_DIR"] + ".files"
        torch.manual_seed(5 + world)
        model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 3))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        def taken():
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments}
        def flat(tree, path=""):
            if isinstance(tree, dict):
                return {at: leaf for key, value in tree.items() for at, leaf in flat(value, f"{path}/{key}").items()}
            return {path: tree.full_tensor() if isinstance(tree, DTensor) else tree}
    """
    ranks(model + """
        model(torch.ones(4, 7)).square().sum().backward()
        optimizer.step()
        dcp.save(taken(), storage_writer=mainstay.dcp.Writer(1))
        dcp.save(taken(), checkpoint_id=files)
    """, 2)
    ranks(model + """
        ours, theirs = taken(), taken()
        dcp.load(ours, storage_reader=mainstay.dcp.Reader())
        set_state_dict(model, optimizer, model_state_dict=ours["model"], optim_state_dict=ours["optimizer"])
        ours = flat(taken())
        dcp.load(theirs, checkpoint_id=files)
        theirs = flat(theirs)
        tensors = [at for at, leaf in ours.items() if isinstance(leaf, torch.Tensor)]
        assert len(tensors) >= 4 + 4 * 3 and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[at], theirs[at]) for at in tensors)
        assert any(ours[at].abs().sum() > 0 for at in tensors if "exp_avg" in at)
    """, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_save_leaves_the_older_step(ranks, victim):
    ranks(SAVE.replace("SEED", "7"), 2)
    codes, said = ranks(f"""
        import mainstay._disk as disk
        plain, at = disk.do, [0]
        def do(operation, *arguments, **named):
            at[0] += 1
            if rank == {victim} and at[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(operation, *arguments, **named)
        disk.do = do
        dcp.save(state(8), storage_writer=mainstay.dcp.Writer(8))
    """, 2, check=False)
    assert codes[victim] == -signal.SIGKILL, said
    ranks(LOAD.replace("SEED", "7"), 2)


def test_a_flipped_bit_is_reported_and_all_ranks_load_the_older_step(ranks):
    ranks(SAVE.replace("SEED", "7") + SAVE.replace("SEED", "8"), 2)
    (state,) = (ranks.directory / "step-000000000008/rank-00001").glob("state*")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 4
    state.write_bytes(content)
    _, said = ranks(LOAD.replace("SEED", "7"), 2)
    assert any("step 8" in line and "rank 1" in line for line in said.splitlines()), said
    codes, said = ranks("""
        loaded = state(0)
        dcp.load(loaded, storage_reader=mainstay.dcp.Reader(8))
    """, 2, check=False)
    assert 0 not in codes and "Damaged: " in said and "rank 1" in said, said


def test_what_cannot_be_written_is_raised(ranks):
    ranks.directory.parent.mkdir(exist_ok=True)
    ranks.directory.write_text("a file where the directory should be")
    codes, said = ranks(SAVE.replace("SEED", "7"), 2, check=False)
    assert 0 not in codes and "checkpoints" in said, said


def test_a_step_in_memory_is_loaded_while_the_file_system_does_not_answer(run_job, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    code = PRELUDE + f"""
import mainstay._disk
dcp.save(state(3), storage_writer=mainstay.dcp.Writer(3))
mainstay._disk._PATIENCE_S = 0.05
try:
    # Opening it waits for a writer, as opening a file of a silent file system waits for its server.
    mainstay._disk.ask(lambda: open({str(tmp_path / "fifo")!r}, "rb").close())
except mainstay._disk.Silent:
    pass
loaded = state(0)
reader = mainstay.dcp.Reader()
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    dcp.load(loaded, storage_reader=reader)
assert [each.category for each in warned] == [RuntimeWarning], warned
assert reader.step == 3, reader.step
assert_is(loaded, 3)
dist.destroy_process_group()
"""
    run_job(code, ranks=2, MAINSTAY_CHECKPOINT_DIR=tmp_path / "checkpoints")


def test_a_load_without_any_step_is_reported(ranks):
    codes, said = ranks("dcp.load(state(0), storage_reader=mainstay.dcp.Reader())", 2, check=False)
    assert 0 not in codes and "FileNotFoundError: mainstay.dcp.Reader: " in said, said


def test_under_the_launcher_a_step_goes_through_memory(run_job, tmp_path):
    code = PRELUDE + """
import mainstay._pool
for step in (1, 2):
    dcp.save(state(step), storage_writer=mainstay.dcp.Writer(step))
    loaded = state(0)
    reader = mainstay.dcp.Reader()
    dcp.load(loaded, storage_reader=reader)
    assert reader.step == step, reader.step
    assert_is(loaded, step)
assert mainstay._pool.memory_of_rank(os.environ["MAINSTAY_CHECKPOINT_DIR"], rank) is not None
dist.destroy_process_group()
"""
    run_job(code, ranks=2, MAINSTAY_CHECKPOINT_DIR=tmp_path / "checkpoints")
