"""The stall of mainstay.checkpoint.save against one copy of the same bytes into pinned memory, and against torch.save."""

import argparse
import tempfile
import time

from report import emit


def seconds(action, synchronize):
    synchronize()
    began = time.monotonic()
    action()
    synchronize()
    return time.monotonic() - began


def measure(torch, save, device, size):
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    name = f"{size / (1 << 30):g} GiB"
    state = torch.empty(size // 4, device=device).uniform_()
    pinned = torch.empty(size // 4, pin_memory=device == "cuda")
    pinned.copy_(state)
    copy = seconds(lambda: pinned.copy_(state, non_blocking=True), synchronize)
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        save.save(1, {"weights": state}, directory=folder)
        stall = seconds(lambda: save.save(2, {"weights": state}, directory=folder), synchronize)
        back = []
        restore = seconds(lambda: back.append(save.load(directory=folder)), synchronize)
        loaded = back[0]["weights"] if isinstance(back[0], dict) else back[0][1]["weights"]
        same = bool((loaded.to(device) == state).all())
        plain = seconds(lambda: torch.save({"weights": state}, f"{folder}/plain.pt"), synchronize)
    seen = f"stall {stall:.3f} s, copy {copy:.3f} s ({stall / copy:.2f}), restore {restore:.3f} s, torch.save {plain:.3f} s"
    # On the CPU a copy is no yardstick: only the digest counts there.
    good = same and (device == "cpu" or stall <= 1.05 * copy)
    emit("checkpoint", f"stall of {name}", "at most 1.05 of the copy, restored alike", seen + f", alike {same}", "pass" if good else "fail", stall)


def main(args):
    try:
        import torch
        import mainstay.checkpoint as save
    except ImportError as error:
        return emit("checkpoint", "torch and mainstay", "they can be imported", error, "not_run")
    if args.device == "cuda" and not torch.cuda.is_available():
        return emit("checkpoint", "CUDA", "torch sees a GPU", "none", "not_run")
    for size in [16 << 20] if args.small else [4 << 30, 20 << 30]:
        measure(torch, save, args.device, size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--part", "--mainstay", "--device", "--nvidia-smi"):
        parser.add_argument(name)
    parser.add_argument("--small", action="store_true")
    main(parser.parse_args())
