"""Compares the stall of mainstay.checkpoint.save with one copy of the same bytes into pinned memory and with
torch.save.

When run by accept.py, it starts itself as the only rank of a job, so that the launcher provides the memory as in real
training.
"""

import os
import subprocess
import sys
import tempfile
import time

from report import emit, guarded, parse
from training import finish

GIB = 1 << 30
PIECE = 1 << 30  # the buffer of the reference copy, which is used repeatedly to save memory
SLOTS = 3


def seconds(action, synchronize):
    synchronize()
    began = time.monotonic()
    action()
    synchronize()
    return time.monotonic() - began


def one_copy(torch, state, device, synchronize):
    """Seconds to copy all bytes of the state into pinned memory, with one asynchronous copy after another."""
    words = min(PIECE // 4, state.numel())
    pinned = torch.empty(words, pin_memory=device == "cuda")
    pinned.copy_(state[:words])

    def copy():
        for begin in range(0, state.numel(), words):
            part = state[begin:begin + words]
            pinned[:part.numel()].copy_(part, non_blocking=True)

    return seconds(copy, synchronize)


def measure(torch, save, device, size, folder):
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    name = f"{size / GIB:g} GiB"
    state = {"weights": torch.empty(size // 4, device=device).uniform_()}

    def saved(step):
        took = seconds(lambda: save.save(step, state), synchronize)
        # As in training, where a save is sealed long before the next one. Otherwise the next one waits for memory.
        end = time.monotonic() + 60
        while save.latest() != step:
            if time.monotonic() > end:
                raise RuntimeError(f"step {step} was not sealed within 60 s")
            time.sleep(0.01)
        return took

    # Every slot is used once before the measurement, because its pages are pinned at first use.
    first = sum(saved(step) for step in range(1, SLOTS + 1))
    copy = one_copy(torch, state["weights"], device, synchronize)
    stalls = sorted(saved(SLOTS + turn) for turn in (1, 2, 3))
    seen = f"stall {stalls[1]:.3f} s, copy {copy:.3f} s ({stalls[1] / copy:.2f}), first {SLOTS} saves {first:.1f} s"
    # On the CPU, a copy is not a valid reference.
    emit("checkpoint", f"stall of {name}", "at most 1.05 of the copy", seen,
         "pass" if device == "cpu" or stalls[1] <= 1.05 * copy else "fail", stalls[1])

    kept, state["weights"] = state["weights"], torch.zeros_like(state["weights"])
    restore = seconds(lambda: save.load(into=state), synchronize)
    same = bool(torch.equal(kept, state["weights"]))
    emit("checkpoint", f"restore of {name}", "alike and in place, at most 1.5 of the copy", f"{restore:.3f} s ({restore / copy:.2f}), alike {same}",
         "pass" if same and (device == "cpu" or restore <= 1.5 * copy) else "fail", restore)
    return state, synchronize


def beside(torch, state, synchronize, size, folder):
    """Measures PyTorch's own savers in the same folder."""
    plain = seconds(lambda: torch.save(state, os.path.join(folder, "plain.pt")), synchronize)
    emit("checkpoint", f"torch.save of {size / GIB:g} GiB", "for comparison", f"{plain:.3f} s", "pass", plain)
    import torch.distributed.checkpoint as dcp

    began = time.monotonic()
    future = dcp.async_save(state, checkpoint_id=os.path.join(folder, "dcp"))
    stall = time.monotonic() - began
    future.result()
    emit("checkpoint", f"DCP async_save of {size / GIB:g} GiB", "for comparison",
         f"stall {stall:.3f} s, done after {time.monotonic() - began:.3f} s", "pass", stall)


def digest(torch, state, synchronize, device):
    """Compares the time of a parameter digest with that of reading the same bytes once."""
    import mainstay

    weights, times = state["weights"], []
    host = int(mainstay.digest([weights.cpu()]))
    alike = int(mainstay.digest([weights])) == host
    for action in (lambda: weights.sum(), lambda: int(mainstay.digest([weights]))):
        action()
        times.append(min(seconds(action, synchronize) for _ in range(3)))
    share = times[0] / times[1]
    emit("checkpoint", "digest on the device", "as on the host, at 80 % of the speed of reading",
         f"{weights.nbytes / times[1] / 1e9:.0f} GB/s, {100 * share:.0f} % of reading, alike {alike}",
         "pass" if alike and (device == "cpu" or share >= 0.8) else "fail", times[1])


def rank(args):
    """The program of the rank: measures the size in ACCEPT_SIZE."""
    import torch

    import mainstay.checkpoint as save

    size, folder = int(os.environ["ACCEPT_SIZE"]), os.environ["ACCEPT_FOLDER"]
    with guarded("checkpoint", f"{size / GIB:g} GiB"):
        state, synchronize = measure(torch, save, args.device, size, folder)
        if size <= 4 * GIB:
            with guarded("checkpoint", "digest on the device"):
                digest(torch, state, synchronize, args.device)
            with guarded("checkpoint", "PyTorch's savers"):
                beside(torch, state, synchronize, size, folder)


def room(size, folder):
    """The reason why a state of this size does not fit on this host; None if it does."""
    memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in open("/proc/meminfo")}["MemAvailable"]
    # In a container, the host's memory may be limited.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path) as file:
                limit = file.read().strip()
            memory = min(memory, int(limit)) if limit.isdigit() else memory
    free = lambda path: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    slots = int(1.02 * SLOTS * size)
    needs = [("memory", memory, slots + PIECE + (4 << 30)), ("/dev/shm", free("/dev/shm"), slots), (folder, free(folder), 3 * size)]
    for name, has, wants in needs:
        if size >= GIB and has < wants:
            return f"{name} has {has / GIB:.1f} GiB free; {wants / GIB:.1f} GiB are needed"
    return None


def main(args):
    try:
        import torch
        import mainstay.checkpoint as _save  # noqa: F401 (the rank needs it)
    except ImportError as error:
        return emit("checkpoint", "torch and mainstay", "they can be imported", error, "not_run")
    if args.device == "cuda" and not torch.cuda.is_available():
        return emit("checkpoint", "CUDA", "torch sees a GPU", "none", "not_run")
    # Leaves a stopped job some seconds to exit, because its output is still needed.
    until = time.monotonic() + args.limit - 15
    for size in [16 << 20] if args.small else [4 * GIB, 20 * GIB]:
        with guarded("checkpoint", f"{size / GIB:g} GiB"), tempfile.TemporaryDirectory(prefix="ms-") as folder:
            fits, left = room(size, folder), until - time.monotonic()
            if fits or left < 20:
                emit("checkpoint", f"stall of {size / GIB:g} GiB", "it can be measured", fits or "no time is left", "not_run")
                continue
            job(args, size, folder, left)


def job(args, size, folder, limit):
    # Limits disk writes: the disk is not measured, and a full one would fail the measurement.
    command = [args.mainstay, "run", "--no-agent", "--no-warm", "--max-restarts", "0", "--log-dir", os.path.join(folder, "logs"),
               "--checkpoint-dir", os.path.join(folder, "steps"), "--checkpoint-slots", str(SLOTS), "--checkpoint-keep", "1",
               "--checkpoint-memory", f"{int(1.02 * SLOTS * size) // (1 << 20) + 64}M", "--checkpoint-bandwidth", "50M",
               os.path.abspath(__file__), "--part", "checkpoint", "--mainstay", args.mainstay, "--device", args.device]
    environment = dict(os.environ, PYTHON_EXEC=sys.executable, ACCEPT_SIZE=str(size), ACCEPT_FOLDER=folder)
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, over = finish(child, limit)
    found = 0
    for line in out.decode(errors="replace").splitlines():
        begin = line.find("CHECK {")
        if begin >= 0:
            print(line[begin:], flush=True)
            found += 1
    if child.returncode != 0 or not found:
        ended = f"status {child.returncode}" if over else f"not over after {limit:.0f} s"
        emit("checkpoint", f"the job of {size / GIB:g} GiB", "status 0", f"{ended}: {out.decode(errors='replace')[-600:]}", "fail")


if __name__ == "__main__":
    parsed = parse()
    with guarded("checkpoint", "the part itself"):
        rank(parsed) if "ACCEPT_SIZE" in os.environ else main(parsed)
