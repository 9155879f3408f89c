"""Checkpoints by torch.save, torch.distributed.checkpoint (synchronous and asynchronous) and safetensors."""

import logging
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", 30))
OUT = os.environ.get("OUT", ".")


def main():
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format="%(asctime)s [%(levelname)s] %(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    # Saves run during training. They need their own group, or the collectives of both mix.
    savers = dist.new_group(backend="gloo")
    saving = None
    for step in range(1, STEPS + 1):
        x = torch.randn(8, 32)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            if saving is not None:
                saving.result()
            state = {"model": model.module.state_dict(), "step": torch.tensor(step)}
            place = os.path.join(OUT, f"step_{step}")
            logging.info("Saving checkpoint at step %d", step)
            saving = dcp.async_save(state, checkpoint_id=place, process_group=savers)
            if rank == 0:
                torch.save({**state, "optimizer": optimizer.state_dict()}, os.path.join(OUT, "last.pt"))
                save_file(model.module.state_dict(), os.path.join(OUT, "model.safetensors"))
        if rank == 0 and step % 3 == 0:
            logging.info("step %d/%d loss %.4f", step, STEPS, loss.item())
    if saving is not None:
        saving.result()
    dist.barrier()
    if rank == 0:
        state = load_file(os.path.join(OUT, "model.safetensors"))
        state.pop("2.bias")
        keys = model.module.load_state_dict(state, strict=False)
        logging.warning("Loaded with %s", keys)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
