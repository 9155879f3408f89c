"""Jobs whose ranks share a device, fail and are restarted. PyTorch jobs also run under torchrun for comparison."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from report import emit, guarded, parse

HERE = os.path.dirname(os.path.abspath(__file__))


class Job:
    """A finished job: its exit status, its marks and its output."""

    def __init__(self, command, script, variables, limit, folder):
        mark = os.path.join(folder, "mark")
        environment = dict(os.environ, PYTHON_EXEC=sys.executable, ACCEPT_MARK=mark, **variables)
        self.began = time.monotonic()
        child = subprocess.Popen([*command, os.path.join(HERE, script)], env=environment, cwd=folder, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, over = finish(child, limit)
        self.status = child.returncode if over else f"not over after {limit:.0f} s"
        self.seconds = time.monotonic() - self.began
        self.said = out.decode(errors="replace")
        self.marks = [json.loads(line) for line in open(mark)] if os.path.exists(mark) else []

    def of(self, word):
        return [mark for mark in self.marks if mark["word"] == word]

    def to_next_step(self):
        """Seconds from the failure to the next first step; None if either is missing."""
        failed = self.of("failed")
        steps = [mark["time"] for mark in self.of("step") if failed and mark["time"] > failed[0]["time"]]
        return steps[0] - failed[0]["time"] if steps else None

    def pids(self, rank):
        """The process ids of a rank, by attempt."""
        return [mark["pid"] for mark in self.of("began") if mark["rank"] == str(rank)]

    def told(self):
        seconds = self.to_next_step()
        if seconds is None:
            errors = [line for line in self.said.splitlines() if re.search(r"\w(Error|Exception)\b.*: ", line)]
            return f"status {self.status}, no next step: {' / '.join(errors[-3:])[-600:]} … {self.said[-300:]}"
        return f"status {self.status}, next step after {seconds:.2f} s"

    def decided(self):
        """The launcher's own lines: what it saw and did."""
        return " / ".join(line for line in self.said.splitlines() if line.startswith("mainstay: "))[-2000:]

    def good(self):
        return self.status == 0 and self.to_next_step() is not None


def finish(child, limit):
    """The output of a job, and whether it ended in time. A job that did not is asked to stop, so that the launcher also
    ends its ranks."""
    try:
        return child.communicate(timeout=limit)[0], True
    except subprocess.TimeoutExpired:
        return stop(child), False
    except BaseException:
        stop(child)
        raise


def stop(child):
    child.terminate()
    try:
        return child.communicate(timeout=8)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()[0]


class Bench:
    """The common settings of the jobs of a part: the device, the program and the remaining time."""

    def __init__(self, part, args):
        self.part, self.args, self.until = part, args, time.monotonic() + args.limit - 12

    def left(self):
        return self.until - time.monotonic()

    def check(self, name, expected, command, variables, judge, script="rank.py"):
        """Runs a job if there is time for it. `judge` returns (seen, verdict)."""
        if self.left() < 10:
            return emit(self.part, name, expected, "no time is left in this part", "not_run")
        variables = dict(variables, ACCEPT_DEVICE=self.args.device)
        with guarded(self.part, name), tempfile.TemporaryDirectory(prefix="ms-") as folder:
            # A small run is a test, on a machine that may be busy with others.
            limit = 300.0 if self.args.small else 60.0
            job = Job(command(folder), script, variables, min(limit, self.left()), folder)
            seen, verdict = judge(job)
            emit(self.part, name, expected, seen, verdict, job.seconds)
            return job

    def restarted(self, name, command, fault, **more):
        return self.check(name, "status 0 and a next step", command, dict(ACCEPT_FAULT=fault, **more),
                          lambda job: (job.told(), "pass" if job.good() else "fail"))

    def ours(self, ranks, *options):
        return lambda folder: [self.args.mainstay, "run", "--no-agent", "--nproc-per-node", str(ranks),
                               "--log-dir", os.path.join(folder, "logs"), *options]


def torchrun(ranks):
    return lambda folder: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", f"--nproc-per-node={ranks}"]


def used(device):
    """Bytes in use on the device, measured by a separate process; None on the CPU."""
    if device == "cpu":
        return None
    code = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)


def left_behind(part, device, before):
    """Checks that no memory of the device is left in use. A driver frees the memory of a killed process with a short
    delay."""
    if device == "cpu":
        return
    with guarded(part, "GPU memory left behind"):
        for _ in range(5):
            after = used(device)
            if abs(after - before) < 64 << 20:
                break
        emit(part, "GPU memory left behind", f"{before} within 64 MiB", after, "pass" if abs(after - before) < 64 << 20 else "fail")


def stayed(job):
    """Checks that both ranks kept their processes and that their data on the device is still readable."""
    same = all(len(job.pids(rank)) == 2 and len(set(job.pids(rank))) == 1 for rank in (0, 1))
    kept = all(mark["kept"] == 1024 for mark in job.of("began"))
    return f"{job.told()}, same processes: {same}, tensors kept: {kept}", "pass" if job.good() and same and kept else "fail"


def context_lost(job):
    """Checks that the failed rank has a new process and the other one its old process."""
    processes = [len(set(job.pids(rank))) for rank in (0, 1)]
    seen = f"{job.told()}, processes of ranks 0 and 1: {processes}"
    if job.good() and processes == [1, 2]:
        return seen, "pass"
    return f"{seen}; {job.decided()}", "fail"


def forked(part, job):
    """Checks that a rank that was forked from the template inherited nothing from the driver."""
    name, expected = "warm fork before any context", "nothing of the driver in a forked rank"
    again = [mark for mark in (job.of("began") if job else []) if mark["forked"]]
    if not again:
        return emit(part, name, expected, "no rank was forked: the template was not ready", "not_run")
    held = sorted({path for mark in again for path in mark["inherited"]})
    emit(part, name, expected, held or f"nothing in {len(again)} forked ranks", "fail" if held else "pass")


def pytorch(part, args):
    """The torch module, if it is installed and sees the device."""
    try:
        import torch

        import mainstay  # noqa: F401 (the ranks need it)
    except ImportError as error:
        return emit(part, "torch and mainstay", "they can be imported", error, "not_run")
    if args.device == "cuda" and not torch.cuda.is_available():
        return emit(part, "CUDA", "torch sees a GPU", "none", "not_run")
    return torch


def training(args):
    torch = pytorch("training", args)
    if torch is None:
        return
    bench = Bench("training", args)
    before = used(args.device)
    warm = bench.restarted("sigkill, two ranks, gloo", bench.ours(2), "sigkill", ACCEPT_PAUSE="0" if args.small else "0.3")
    forked("training", warm)
    bench.check("exception, in process", "the same processes, and their tensors", bench.ours(2),
                dict(ACCEPT_FAULT="exception", ACCEPT_STAY="1"), stayed)
    if not args.small:
        bench.restarted("sigkill, two ranks, gloo, by torchrun", torchrun(2), "sigkill")
    bench.restarted("exception, two ranks, gloo", bench.ours(2), "exception")
    if args.device == "cuda":
        bench.restarted("sigkill, one rank, NCCL", bench.ours(1), "sigkill", ACCEPT_BACKEND="nccl")
        bench.check("exception in process, one rank, NCCL", "status 0 and a next step", bench.ours(1),
                    dict(ACCEPT_FAULT="exception", ACCEPT_STAY="1", ACCEPT_BACKEND="nccl"), lambda job: (job.told(), "pass" if job.good() else "fail"))
        bench.check("two ranks of one GPU, NCCL", "status 0, where NCCL allows it", bench.ours(2, "--max-restarts", "0"),
                    dict(ACCEPT_FAULT="none", ACCEPT_BACKEND="nccl"), shared_card)
        bench.restarted("exception, two ranks, gloo, by torchrun", torchrun(2), "exception")
    left_behind("training", args.device, before)


def shared_card(job):
    if "Duplicate GPU" in job.said:
        return "NCCL refuses two ranks on one GPU", "not_run"
    return f"status {job.status}: {job.said[-300:]}", "pass" if job.status == 0 else "fail"


def faults(args):
    """Faults on the device itself."""
    torch = pytorch("faults", args)
    if torch is None:
        return
    bench = Bench("faults", args)
    before = used(args.device)
    lost = "the failed rank is new, the other stays in its process"
    for fault, name in (("illegal", "illegal access"), ("assert", "device-side assert")):
        bench.check(f"{name}, in process", lost, bench.ours(2), dict(ACCEPT_FAULT=fault, ACCEPT_STAY="1"), context_lost)
    hang(bench, args)
    ends = "the job ends at the second time, and the reason is named"
    bench.check("CUDA out of memory", ends, bench.ours(2), dict(ACCEPT_FAULT="oom"), out_of_memory)
    if args.device == "cuda":
        with hog(), Watching(args) as agent:
            command = lambda folder: [args.mainstay, "run", "--socket", agent, "--nproc-per-node", "1", "--log-dir", os.path.join(folder, "logs"),
                                      "--ready-within", "5s"]
            bench.check("memory that another process took", "the job ends, and memory or the other process is named", command, dict(ACCEPT_FAULT="hog"), out_of_memory)
    left_behind("faults", args.device, before)


def hang(bench, args):
    """A kernel that never ends: the process of its rank waits in the driver."""
    name, expected = "a kernel that never ends", "a hang is reported, status 0 and a next step"
    options = ("--hang-limit", "step=4s" if args.small else "step=10s")

    def judge(job):
        found = re.search(r"[^\n]*\bhang[^\n]*", job.said)
        told = found.group()[:300] if found else "no line about a hang"
        return f"{job.told()}; {told}", "pass" if job.good() and found else "fail"

    if args.device == "cpu":
        bench.check(name, expected, bench.ours(2, *options), dict(ACCEPT_FAULT="hang"), judge)
        return
    # With an agent, the verdict includes the GPU's utilization, clocks and power of the last minute.
    with Watching(args) as agent:
        evidence = []

        def command(folder):
            evidence.append(os.path.join(folder, "logs"))
            return [args.mainstay, "run", "--socket", agent, "--nproc-per-node", "2", "--log-dir", evidence[0], *options]

        def with_evidence(job):
            run = next(entry.path for entry in os.scandir(evidence[0]) if entry.is_dir() and not entry.name.startswith("."))
            told = subprocess.run([args.mainstay, "explain", run, "--all"], capture_output=True, text=True, timeout=20).stdout
            lines = [line.strip() for line in told.splitlines() if re.search(r"MHz|\bW\b|clock", line)]
            emit("faults", "clocks and power in the verdict on the hang", "explain shows them", lines[:4] or told[-400:], "pass" if lines else "fail")
            return judge(job)

        bench.check(name, expected, command, dict(ACCEPT_FAULT="hang"), with_evidence)


class Watching:
    """An agent that reads the GPUs while a job runs."""

    def __init__(self, args):
        from readings import Agent

        self.agent = Agent(args.mainstay)

    def __enter__(self):
        self.agent.gpus()
        return self.agent.socket

    def __exit__(self, *_):
        self.agent.__exit__()


class hog:
    """A separate process that uses a third of the device's memory."""

    def __enter__(self):
        code = ("import sys, torch; held = torch.empty(torch.cuda.mem_get_info()[1] // 3, dtype=torch.uint8, device='cuda')"
                "; print('held', flush=True); sys.stdin.read()")
        self.child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.child.stdout.readline()

    def __exit__(self, *_):
        self.child.stdin.close()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.send_signal(signal.SIGKILL)
            self.child.wait()


def out_of_memory(job):
    said = [line for line in job.said.splitlines() if line.startswith("mainstay") and re.search("memory|process", line)]
    good = isinstance(job.status, int) and job.status != 0 and said
    return f"status {job.status}: {(said or [job.said[-400:]])[-1]}", "pass" if good else "fail"


def jax(args):
    try:
        import jax as framework
        import mainstay.jax as _client  # noqa: F401 (a bare import would hide the function `mainstay`)
    except ImportError as error:
        return emit("jax", "jax and mainstay", "they can be imported", error, "not_run")
    bench = Bench("jax", args)
    # By default each process takes three quarters of the device's memory, which this one and the rank share.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    with guarded("jax", "devices"):
        good = args.device == "cpu" or framework.default_backend() == "gpu"
        emit("jax", "devices", args.device, framework.devices(), "pass" if good else "not_run")
        if not good:
            return
    bench.check("sigkill, one process", "status 0 and a next step", bench.ours(1), {},
                lambda job: (job.told(), "pass" if job.good() else "fail"), script="jax_rank.py")


if __name__ == "__main__":
    parsed = parse()
    with guarded(parsed.part, "the part itself"):
        {"training": training, "faults": faults, "jax": jax}[parsed.part](parsed)
