"""A trainer with a logger in torchtitan's style: dated, coloured lines, periodic metrics, DTensor-parallel layers."""

import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = int(os.environ.get("STEPS", 30))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main():
    logging.basicConfig(level="INFO", format="[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s")
    log = logging.getLogger("root")
    log.info("Starting job: a small model")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    log.warning("ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = %s will be overridden to 3 based on job config", os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    log.info("Building 1-D device mesh with ['tp'], [%d]", world)
    torch.manual_seed(0)
    model = Feed()
    if os.environ.get("REPLICATE"):
        replicate(model)
    elif world > 1:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    log.warning("Peak flops undefined for: CPU, fallback to A100")
    log.info("CPU memory usage for model: %.2fGiB(%.2f%%)", 0.01, 0.03)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    log.info("Training starts at step 1, with local batch size 8, global batch size %d, sequence length 2048, total steps %d", 8 * world, STEPS)
    began = time.time()
    for step in range(1, STEPS + 1):
        x = torch.randn(8, 32)
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0 or step == 1:
            speed = step * 8 / (time.time() - began)
            log.info("\033[31mstep: %2d  \033[32mloss: %7.4f  \033[33mmemory: %5.2fGiB(%.2f%%)  \033[34mtps: %d  \033[36mtflops: %.2f  \033[35mmfu: %.2f%%\033[39m", step, loss.item(), 0.01, 0.03, speed, 0.0, 0.0)
    log.info("Training completed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
