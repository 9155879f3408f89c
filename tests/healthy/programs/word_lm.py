"""A recurrent word model on the text of Python's licence, in one process, with a persistent hidden state."""

import math
import os
import time

import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")


class Words(nn.Module):
    def __init__(self, size, width=48):
        super().__init__()
        self.embed = nn.Embedding(size, width)
        # Dropout in a single layer has no effect, and torch warns about it.
        self.recur = nn.LSTM(width, width, num_layers=1, dropout=0.2)
        self.decode = nn.Linear(width, size)

    def forward(self, words, hidden):
        output, hidden = self.recur(self.embed(words), hidden)
        return self.decode(output), hidden


def main():
    text = str(license).split() if "license" in globals() else []
    text = text or open(os.__file__).read().split()
    names = sorted(set(text))
    index = {word: place for place, word in enumerate(names)}
    data = torch.tensor([index[word] for word in text])
    rows = len(data) // 8
    data = data[: rows * 8].view(8, rows).t().contiguous()
    torch.manual_seed(1111)
    model, loss_of = Words(len(names)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    hidden, total, began, best = None, 0.0, time.time(), math.inf
    for step in range(1, STEPS + 1):
        at = (step * 12) % (rows - 13)
        if hidden is not None:
            hidden = tuple(part.detach() for part in hidden)
        output, hidden = model(data[at : at + 12], hidden)
        loss = loss_of(output.flatten(0, 1), data[at + 1 : at + 13].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.item()
        if step % 4 == 0:
            mean = total / 4
            ms = (time.time() - began) * 1000 / 4
            print(f"| epoch {1 + at // rows:3d} | {step:5d}/{STEPS:5d} batches | lr {5.0:02.2f} | ms/batch {ms:5.2f} | loss {mean:5.2f} | ppl {math.exp(mean):8.2f}", flush=True)
            if mean < best:
                best = mean
                torch.save(model, os.path.join(OUT, "model.pt"))
            total, began = 0.0, time.time()
    print("=" * 89)
    print(f"| End of training | test loss {best:5.2f} | test ppl {math.exp(best):8.2f}")
    print("=" * 89)


if __name__ == "__main__":
    main()
