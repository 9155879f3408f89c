"""A small convolutional network on synthetic digits, data-parallel over gloo, with DataLoader workers."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = int(os.environ.get("STEPS", 40))
WORKERS = int(os.environ.get("WORKERS", 1))
OUT = os.environ.get("OUT", ".")


class Digits(Dataset):
    """Ten noisy patterns."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        label = index % 10
        image = torch.zeros(1, 28, 28)
        image[0, label * 2 : label * 2 + 8, 4:24] = 1.0
        return image + 0.3 * torch.randn(1, 28, 28), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=3)
        self.full = nn.Linear(8 * 64, 10)

    def forward(self, x):
        return F.log_softmax(self.full(F.relu(self.conv(x)).flatten(1)), dim=1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    model = DistributedDataParallel(Net(), find_unused_parameters=bool(os.environ.get("FIND_UNUSED")))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    sampler = DistributedSampler(Digits(), num_replicas=world, rank=rank)
    loader = DataLoader(Digits(), batch_size=16, sampler=sampler, num_workers=WORKERS)
    done, epoch, began = 0, 0, time.time()
    while done < STEPS:
        epoch += 1
        sampler.set_epoch(epoch)
        for batch, (image, label) in enumerate(loader):
            if done == STEPS:
                break
            optimizer.zero_grad()
            loss = F.nll_loss(model(image), label)
            loss.backward()
            optimizer.step()
            done += 1
            if rank == 0 and batch % 5 == 0:
                share = 100.0 * batch / len(loader)
                print(f"Train Epoch: {epoch} [{batch * 16}/{640 // world} ({share:.0f}%)]\tLoss: {loss.item():.6f}", flush=True)
        scheduler.step()
        correct = torch.tensor([(model(image).argmax(1) == label).sum(), len(label)])
        dist.all_reduce(correct)
        if rank == 0:
            print(f"\nTest set: Accuracy: {correct[0]}/{correct[1]} ({100.0 * correct[0] / correct[1]:.0f}%)\n", flush=True)
            torch.save(model.module.state_dict(), os.path.join(OUT, "mnist_cnn.pt"))
    if rank == 0:
        print(f"Training took {time.time() - began:.2f} s")
    dist.barrier()
    if not os.environ.get("LEAVE_GROUP"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
