"""A custom training loop under accelerate: its logger, a log without trackers, save_state and load_state."""

import logging
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")


def main():
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=os.environ.get("PRECISION", "no"))
    log = get_logger(__name__)
    log.info(accelerator.state, main_process_only=False)
    set_seed(5)
    x = torch.randn(512, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    log.info("***** Running training *****")
    log.info("  Num examples = %d", len(x))
    log.info("  Total optimization steps = %d", STEPS)
    bar, done = tqdm(total=STEPS, disable=not accelerator.is_local_main_process or bool(os.environ.get("NO_BAR"))), 0
    while done < STEPS:
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), target)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                bar.update(1)
                if done % 10 == 0:
                    log.info("step %d loss %.4f", done, accelerator.gather(loss.detach().reshape(1)).mean().item())
            if done >= STEPS:
                break
    accelerator.save_state(os.path.join(OUT, "accelerate-state"))
    accelerator.load_state(os.path.join(OUT, "accelerate-state"))
    accelerator.wait_for_everyone()
    log.info("Training finished", main_process_only=False)
    accelerator.end_training()


if __name__ == "__main__":
    main()
