"""The role of this rank in its job: it is compared with ranks that do the same work.

The script or the environment (``MAINSTAY_ROLE``, ``MAINSTAY_STAGE``) sets it. Otherwise it is read from frameworks:
Megatron-LM's parallel state, DeepSpeed's model parallel unit, and torch's pipelines and meshes with a dimension ``pp``,
``pipe`` or ``pipeline``.
"""

from __future__ import annotations

import os
import sys

from . import _native

_reported = False
_MOST = 2**32 - 2
_PIPELINE = ("pp", "pipe", "pipeline")


def role(name: str = "", *, stage=None) -> None:
    """Sets the role ``name`` and the pipeline stage of this rank. Ranks with the same role and stage are its peers."""
    global _reported
    number = None
    try:
        if stage is not None:
            number = int(stage)
        if not isinstance(name, str) or (number is not None and not 0 <= number <= _MOST):
            raise ValueError
    except Exception:
        import warnings

        warnings.warn("mainstay.role: a role is a text and a stage a whole number from 0; it is left out", RuntimeWarning, 2)
        return
    _reported = True
    _native.tell_role(name, number)


def from_environment() -> None:
    """Reports the role from the environment, if the script has not set one."""
    name, stage = os.environ.get("MAINSTAY_ROLE", ""), os.environ.get("MAINSTAY_STAGE", "")
    if not _reported and (name or stage):
        role(name, stage=int(stage) if stage.isdecimal() else None)


def from_frameworks() -> None:
    """Reports the stage that a framework gave to this rank, if none is set. Called periodically, off the hot path."""
    if _reported or not _native.active():
        return
    for find in (_of_megatron, _of_deepspeed, _of_pipeline, _of_mesh):
        try:
            stage = find()
        except Exception:
            # The release stores it elsewhere, or the group does not exist yet.
            continue
        if stage is not None:
            return role(stage=stage)


def _of_megatron():
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    many = state.get_pipeline_model_parallel_world_size() > 1
    return state.get_pipeline_model_parallel_rank() if many else None


def _of_deepspeed():
    groups = sys.modules.get("deepspeed.utils.groups")
    unit = getattr(groups, "mpu", None)
    if unit is None:
        return None
    for size, rank in (
        ("get_pipe_parallel_world_size", "get_pipe_parallel_rank"),
        ("get_pipeline_model_parallel_world_size", "get_pipeline_model_parallel_rank"),
    ):
        if hasattr(unit, size):
            return getattr(unit, rank)() if getattr(unit, size)() > 1 else None
    return None


# This rank's position in the group of the torch pipeline stage that it created. A rank may have several stages.
pipeline_rank = None


def _of_pipeline():
    return pipeline_rank


def _of_mesh():
    return next((stage for mesh in meshes for stage in _stages(mesh)), None)


meshes: list = []  # torch's device meshes, in the order of creation


def _stages(mesh):
    for index, name in enumerate(mesh.mesh_dim_names or ()):
        if name in _PIPELINE and mesh.size(index) > 1:
            yield mesh.get_local_rank(index)
