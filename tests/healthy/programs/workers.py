"""Many DataLoader workers over an iterable data set. Some records are broken and are skipped."""

import logging
import os
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

STEPS = int(os.environ.get("STEPS", 40))


class Stream(IterableDataset):
    def __len__(self):
        return 100  # too few: the loader complains of each batch beyond

    def __iter__(self):
        info = get_worker_info()
        number = info.id if info else 0
        torch.manual_seed(number)
        for count in range(100000):
            try:
                if count % 97 == 13:
                    raise ValueError(f"record {count} of shard {number} is truncated")
                yield torch.randn(6)
            except ValueError as error:
                logging.getLogger("data").warning("skipping a record: %s", error, exc_info=bool(os.environ.get("TRACE")))


def main():
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(processName)s %(levelname)s %(message)s")
    workers = int(os.environ.get("WORKERS", 3))
    loader = iter(DataLoader(Stream(), batch_size=8, num_workers=workers, persistent_workers=workers > 0, timeout=60 if workers else 0))
    model = nn.Linear(6, 1)
    optimizer = torch.optim.RMSprop(model.parameters())
    for step in range(1, STEPS + 1):
        x = next(loader)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            logging.info("step %d/%d loss=%.4f", step, STEPS, loss.item())
    warnings.warn("the loader is dropped before its end", RuntimeWarning, stacklevel=1)


if __name__ == "__main__":
    main()
