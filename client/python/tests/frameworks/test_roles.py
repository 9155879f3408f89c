"""The stage of a pipeline that a rank has, found where the real frameworks keep it, without a word from the script."""

from __future__ import annotations

import importlib.util

import pytest

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="not installed: megatron-core")

# The stage is looked for now and then; a script that ended at once would be gone before.
TOLD = """
        import time
        from mainstay import _role
        while not _role._told:
            time.sleep(0.02)
"""


def stages(job) -> list:
    return [(page["claim"]["role"], page["claim"]["stage"]) for _, page in sorted(job.pages.items())]


@needs_megatron
def test_the_stage_of_megatron_core(run_job):
    job = run_job("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        from megatron.core import parallel_state
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
        mine = parallel_state.get_pipeline_model_parallel_rank()
    """ + TOLD + "        assert mine == dist.get_rank() // 2\n", ranks=4)
    assert stages(job) == [("", 0), ("", 0), ("", 1), ("", 1)]


def test_the_stage_of_a_device_mesh(run_job):
    job = run_job("""
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    """ + TOLD, ranks=4)
    assert stages(job) == [("", 0), ("", 0), ("", 1), ("", 1)]


def test_a_mesh_without_a_pipeline_gives_no_stage(run_job):
    job = run_job("""
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        from mainstay import _role
        _role.from_frameworks()
        assert not _role._told and len(_role.meshes) == 1
    """, ranks=2)
    assert [stage for _, stage in stages(job)] == [None, None]
