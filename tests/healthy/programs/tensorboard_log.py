"""A loop that writes TensorBoard events, with a profiler over some steps."""

import os

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")


def main():
    writer = SummaryWriter(os.path.join(OUT, "tensorboard"))
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
    writer.add_graph(model, torch.randn(2, 10))
    optimizer = torch.optim.Adam(model.parameters())
    # torch expects the two calls in the other order and warns.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in range(STEPS):
            x = torch.randn(16, 10)
            loss = (model(x)[:, 0] - x.mean(1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if os.environ.get("WRONG_ORDER"):
                scheduler.step()
                optimizer.step()
            else:
                optimizer.step()
                scheduler.step()
            writer.add_scalar("loss", loss.item(), step)
            writer.add_histogram("weight", model[0].weight, step)
            profiler.step()
            if step % 4 == 0:
                print(f"Step {step:4d} | loss {loss.item():.4f} | lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    writer.close()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=4))


if __name__ == "__main__":
    main()
