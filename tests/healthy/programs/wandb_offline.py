"""A loop that logs to Weights & Biases, offline."""

import os

import torch
import wandb
from torch import nn

STEPS = int(os.environ.get("STEPS", 40))


def main():
    run = wandb.init(project="healthy", mode="offline", dir=os.environ.get("OUT", "."), config={"lr": 0.01, "steps": STEPS})
    model = nn.Linear(10, 1)
    wandb.watch(model, log="gradients", log_freq=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(16, 10)
        loss = (model(x)[:, 0] - x.mean(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()}, step=step)
        if step == 20:
            # wandb refuses a step lower than the last one with a warning.
            run.log({"late": 1.0}, step=3)
        if step % 5 == 0:
            print(f"[{step}/{STEPS}] loss={loss.item():.4f}", flush=True)
    run.finish()


if __name__ == "__main__":
    main()
