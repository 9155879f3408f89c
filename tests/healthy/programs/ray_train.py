"""Ray Train with two CPU workers."""

import os

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

STEPS = int(os.environ.get("STEPS", 12))


def loop(config):
    model = prepare_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(config["steps"]):
        x = torch.randn(16, 8)
        loss = (model(x)[:, 0] - x.sum(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {get_context().get_world_rank()} step {step} loss {loss.item():.4f}")
        report({"step": step, "loss": loss.item()})


def main():
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": STEPS},
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("DEVICES", 2)), use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=os.path.abspath(os.environ.get("OUT", ".")), name="ray-run"),
    )
    result = trainer.fit()
    print(f"finished: {result.metrics}")
    ray.shutdown()


if __name__ == "__main__":
    main()
