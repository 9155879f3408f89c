"""torch.compile on CPU, with graph breaks and recompilations."""

import os

import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", 30))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if x.sum() > 1e6:  # depends on the data: the graph breaks here
            x = x / 2
        return self.second(x)


def main():
    torch.manual_seed(0)
    model = Net()
    fast = torch.compile(model, backend=os.environ.get("BACKEND", "aot_eager"))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        x = torch.randn(4 + step % 3, 16)
        loss = fast(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"step={step} loss={loss.item():.5f}", flush=True)
    print("finished")


if __name__ == "__main__":
    main()
