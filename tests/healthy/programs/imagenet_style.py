"""A residual network on random images: meters, top-1 and top-5, a checkpoint each epoch, resume."""

import argparse
import os
import shutil
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", 30))
OUT = os.environ.get("OUT", ".")


class Meter:
    """A value and its mean."""

    def __init__(self, name, form):
        self.name, self.form, self.value, self.sum, self.count = name, form, 0.0, 0.0, 0

    def update(self, value, n=1):
        self.value, self.sum, self.count = value, self.sum + value * n, self.count + n

    def __str__(self):
        return f"{self.name} {self.value:{self.form}} ({self.sum / max(1, self.count):{self.form}})"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


def train(rank, world, arguments):
    if world > 1 or "RANK" in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
        warnings.warn(
            "You have chosen to seed training. This turns on deterministic algorithms, which can slow down your "
            "training considerably! You may see unexpected behavior when restarting from checkpoints."
        )
    print(f"Use CPU for training: process {rank} of {world}")
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 20))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    else:
        print("using CPU, this will be slow")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    start = 0
    if arguments.resume and os.path.isfile(arguments.resume):
        print(f"=> loading checkpoint '{arguments.resume}'")
        state = torch.load(arguments.resume, weights_only=True)
        start = state["epoch"]
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"=> loaded checkpoint '{arguments.resume}' (epoch {start})")
    elif arguments.resume:
        print(f"=> no checkpoint found at '{arguments.resume}'")
    images = TensorDataset(torch.randn(320, 3, 32, 32), torch.randint(0, 20, (320,)))
    sampler = DistributedSampler(images) if dist.is_initialized() else None
    loader = DataLoader(images, batch_size=16, sampler=sampler, shuffle=sampler is None, pin_memory=True)
    loss_of = nn.CrossEntropyLoss()
    done, epoch = 0, start
    while done < STEPS:
        meters = [Meter("Time", "6.3f"), Meter("Data", "6.3f"), Meter("Loss", ".4e"), Meter("Acc@1", "6.2f"), Meter("Acc@5", "6.2f")]
        end = time.time()
        for number, (image, target) in enumerate(loader):
            meters[1].update(time.time() - end)
            output = model(image)
            loss = loss_of(output, target)
            top = output.topk(5, 1).indices == target[:, None]
            meters[2].update(loss.item(), len(image))
            meters[3].update(100.0 * top[:, :1].any(1).float().mean().item(), len(image))
            meters[4].update(100.0 * top.any(1).float().mean().item(), len(image))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meters[0].update(time.time() - end)
            end = time.time()
            if number % 4 == 0:
                print(f"Epoch: [{epoch}][{number:>3}/{len(loader)}]\t" + "\t".join(map(str, meters)), flush=True)
            done += 1
            if done >= STEPS:
                break
        epoch += 1
        print(f" *   {meters[3]} {meters[4]}")
        if rank == 0:
            path = os.path.join(OUT, "checkpoint.pth.tar")
            torch.save({"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            shutil.copyfile(path, os.path.join(OUT, "model_best.pth.tar"))
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--resume", default="")
    parser.add_argument("--spawn", type=int, default=0, help="start so many processes instead of a launcher")
    arguments = parser.parse_args()
    if arguments.spawn:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", os.environ.get("PORT", "29611"))
        mp.spawn(train, args=(arguments.spawn, arguments), nprocs=arguments.spawn)
    else:
        train(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), arguments)


if __name__ == "__main__":
    main()
