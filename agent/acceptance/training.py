"""Jobs of ranks on one device that fail and are restarted, beside torchrun where the framework is PyTorch."""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from report import emit

HERE = os.path.dirname(os.path.abspath(__file__))
# Faults that no restart repairs by rule end the job: an exception at the same step, an allocation too large.
FAULTS = ("sigkill", "exception", "assert", "oom")


def job(launcher, script, variables, limit):
    """Exit status, whether it was abandoned, and the seconds from the failure to the next first step."""
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        mark = os.path.join(folder, "mark")
        environment = dict(os.environ, PYTHON_EXEC=sys.executable, ACCEPT_MARK=mark, **variables)
        try:
            done = subprocess.run([*launcher(folder), os.path.join(HERE, script)], env=environment, cwd=folder, timeout=limit,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            return None, None, f"not over after {limit} s"
        lines = [line.split() for line in open(mark)] if os.path.exists(mark) else []
        failed = [float(when) for word, when in lines if word == "failed"]
        steps = [float(when) for word, when in lines if word == "step" and failed and float(when) > failed[0]]
        return done.returncode, steps[0] - failed[0] if steps else None, done.stdout.decode(errors="replace")[-600:]


def mainstay(args, ranks):
    return lambda folder: [args.mainstay, "run", "--no-agent", "--nproc-per-node", str(ranks), "--log-dir", os.path.join(folder, "logs")]


def torchrun(ranks):
    return lambda folder: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", f"--nproc-per-node={ranks}"]


def used(device):
    """Bytes in use on the device; nothing on the CPU."""
    if device == "cpu":
        return None
    code = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)


def restart(part, name, launcher, script, variables, limit=60):
    began = time.monotonic()
    status, seconds, said = job(launcher, script, variables, limit)
    seen = f"status {status}, next step after {seconds:.2f} s" if seconds is not None else f"status {status}, no next step: {said}"
    emit(part, name, "status 0 and a next step", seen, "pass" if status == 0 and seconds is not None else "fail", time.monotonic() - began)


def training(args):
    try:
        import torch
    except ImportError as error:
        return emit("training", "torch", "it can be imported", error, "not_run")
    if args.device == "cuda" and not torch.cuda.is_available():
        return emit("training", "CUDA", "torch sees a GPU", "none", "not_run")
    before = used(args.device)
    variables = lambda fault, **more: dict(ACCEPT_DEVICE=args.device, ACCEPT_FAULT=fault, **more)
    for fault in FAULTS[:2] if args.small else FAULTS:
        restart("training", f"{fault}, two ranks, gloo", mainstay(args, 2), "rank.py", variables(fault))
        if not args.small:
            restart("training", f"{fault}, two ranks, gloo, by torchrun", torchrun(2), "rank.py", variables(fault))
    if args.device == "cuda":
        restart("training", "sigkill, one rank, NCCL", mainstay(args, 1), "rank.py", variables("sigkill", ACCEPT_BACKEND="nccl"))
        after = used(args.device)
        emit("training", "GPU memory left behind", f"{before} within 64 MiB", after, "pass" if abs(after - before) < 64 << 20 else "fail")


def jax(args):
    try:
        import jax as framework
        import mainstay.jax as _client  # noqa: F401 (a bare import would hide the function `mainstay`)
    except ImportError as error:
        return emit("jax", "jax and mainstay", "they can be imported", error, "not_run")
    emit("jax", "devices", args.device, framework.devices(), "pass" if args.device == "cpu" or framework.default_backend() == "gpu" else "fail")
    more = {"JAX_PLATFORMS": "cpu"} if args.device == "cpu" else {}
    restart("jax", "sigkill, one process", mainstay(args, 1), "jax_rank.py", more, 50)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--part", "--mainstay", "--device", "--nvidia-smi"):
        parser.add_argument(name)
    parser.add_argument("--small", action="store_true")
    parsed = parser.parse_args()
    {"training": training, "jax": jax}[parsed.part](parsed)
