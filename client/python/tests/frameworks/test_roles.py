"""The pipeline stage of a rank, read from the real frameworks without a setting in the script."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
from forked_ranks import ForkedRanks

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="not installed: megatron-core")

# The stage is polled. A script that ended at once would end before the first poll. Process groups that are not destroyed
# may abort at the exit of the interpreter ("terminate called without an active exception").
POLLED = """
        import atexit, time
        import torch.distributed as dist
        from mainstay import _role
        def leave():
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        atexit.register(leave)
        while not _role._reported:
            time.sleep(0.02)
"""


def stages(pages: dict) -> list:
    return [(page["claim"]["role"], page["claim"]["stage"]) for _, page in sorted(pages.items())]


@needs_megatron
def test_the_stage_of_megatron_core(forked_from):
    # Its import takes longer than that of PyTorch.
    with contextlib.closing(ForkedRanks(["torch.distributed", "megatron.core.parallel_state"])) as forked_ranks:
        pages, _ = forked_from(forked_ranks)("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        from megatron.core import parallel_state
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
        mine = parallel_state.get_pipeline_model_parallel_rank()
    """ + POLLED + "        assert mine == dist.get_rank() // 2\n", ranks=4)
    assert stages(pages) == [("", 0), ("", 0), ("", 1), ("", 1)]


def test_the_stage_of_a_device_mesh(run_job):
    job = run_job("""
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    """ + POLLED, ranks=4)
    assert stages(job.pages) == [("", 0), ("", 0), ("", 1), ("", 1)]


def test_a_mesh_without_a_pipeline_gives_no_stage(forked):
    pages, _ = forked("""
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        from mainstay import _role
        _role.from_frameworks()
        assert not _role._reported and len(_role.meshes) == 1
    """, ranks=2)
    assert [stage for _, stage in stages(pages)] == [None, None]


def test_the_stage_of_a_mesh_whose_other_dimension_shards_a_model(forked):
    pages, _ = forked("""
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
        net = torch.nn.Linear(8, 8)
        fully_shard(net, mesh=mesh["dp_shard"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(3):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    """ + POLLED + "        assert mesh.get_local_rank('pp') == dist.get_rank() % 2\n", ranks=4)
    assert stages(pages) == [("", 0), ("", 1), ("", 0), ("", 1)]


def test_a_model_that_is_sharded_and_replicated_has_no_stage(forked):
    pages, _ = forked("""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        net = torch.nn.Linear(8, 8)
        fully_shard(net, mesh=mesh)
        net(torch.ones(2, 8)).sum().backward()
        from mainstay import _role
        _role.from_frameworks()
        assert not _role._reported and len(_role.meshes) >= 1
    """, ranks=4)
    assert [stage for _, stage in stages(pages)] == [None] * 4


# Two pipelines of two ranks each, created from groups: ranks 0 and 2, and ranks 1 and 3.
PIPELINE = """
        import torch, torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, SCHEDULE
        dist.init_process_group("gloo")
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group, place = groups[dist.get_rank() % 2], dist.get_rank() // 2
        device = torch.device("cpu")
        def stage(index, count):
            return PipelineStage(torch.nn.Linear(8, 8), index, count, device, group=group)
        def train(schedule, begins, ends):
            for _ in range(3):
                inputs = (torch.ones(4, 8),) if begins else ()
                schedule.step(*inputs, **({"target": torch.ones(4, 8)} if ends else {}))
        def loss(output, target):
            return (output - target).square().mean()
"""


def test_the_stage_of_a_pipeline_of_torch_without_a_mesh(forked):
    pages, _ = forked(PIPELINE.replace("SCHEDULE", "ScheduleGPipe") + """
        train(ScheduleGPipe(stage(place, 2), n_microbatches=2, loss_fn=loss), place == 0, place == 1)
    """ + POLLED, ranks=4)
    assert stages(pages) == [("", 0), ("", 0), ("", 1), ("", 1)]


def test_ranks_with_several_stages_report_their_position(forked):
    pages, _ = forked(PIPELINE.replace("SCHEDULE", "ScheduleInterleaved1F1B") + """
        mine = [stage(place, 4), stage(place + 2, 4)]
        train(ScheduleInterleaved1F1B(mine, n_microbatches=2, loss_fn=loss), place == 0, place == 1)
    """ + POLLED, ranks=4)
    assert stages(pages) == [("", 0), ("", 0), ("", 1), ("", 1)]
