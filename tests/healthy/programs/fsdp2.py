"""A transformer block sharded by FSDP2 on CPU, with a distributed checkpoint that is saved and restored."""

import logging
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ.get("STEPS", 30))
OUT = os.environ.get("OUT", ".")


def main():
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format="[%(asctime)s][%(levelname)s][%(name)s] %(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = logging.getLogger("fsdp2")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = os.path.join(OUT, "fsdp2-checkpoint")
    for step in range(1, STEPS + 1):
        batch = torch.randn(4, 12, 32)
        loss = (model(batch) - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0:
            log.info("step: %d  loss: %.4f  grad_norm: %.4f", step, loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        if step == STEPS // 2:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
            log.info("saved %s", path)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    log.info("rank %d: restored, training finished", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
