"""DeepSpeed's ZeRO stage 1 on CPU over gloo."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", 20))
OUT = os.environ.get("OUT", ".")


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(os.environ.get("STAGE", 1))},
        "steps_per_print": 5,
        "wall_clock_breakdown": bool(os.environ.get("CLOCK")),
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=config, dist_init_required=False
    )
    for step in range(STEPS):
        x = torch.randn(4, 16)
        loss = (engine(x)[:, 0] - x.sum(1)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 4 == 0:
            print(f"step={step}, loss={loss.item():.4f}", flush=True)
    engine.save_checkpoint(OUT, tag="deepspeed")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
