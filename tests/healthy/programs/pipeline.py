"""Two pipeline stages that send activations and gradients to each other by hand, with logging at DEBUG."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn

STEPS = int(os.environ.get("STEPS", 30))


def main():
    logging.basicConfig(level="DEBUG", format="%(asctime)s,%(msecs)03d [%(process)d] %(levelname)s: %(message)s")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = logging.getLogger(f"stage{rank}")
    stage = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        x = torch.randn(4, 16)
        if rank > 0:
            dist.recv(x, rank - 1)
        x.requires_grad_()
        y = stage(x)
        if rank < world - 1:
            dist.send(y.detach(), rank + 1)
            grad = torch.empty_like(y)
            dist.recv(grad, rank + 1)
            optimizer.zero_grad()
            y.backward(grad)
        else:
            optimizer.zero_grad()
            loss = y.pow(2).mean()
            loss.backward()
            if step % 3 == 0:
                log.info("step %d loss %.4f", step, loss.item())
        if rank > 0:
            dist.send(x.grad, rank - 1)
        optimizer.step()
        if step % 10 == 0:
            log.debug("stage %d of %d finished step %d", rank, world, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
