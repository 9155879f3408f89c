"""Runs the programs in this folder in many ways and stores the complete output of each run that succeeded.

    python make.py --python VENV/bin/python --mainstay PATH [--only WORD] [--again] [--list]

A run is one program with one launcher and one set of noisy settings. Paths, host name and addresses of the machine are
replaced by neutral ones; nothing else is changed. A run that fails, takes longer than 120 s or prints more than 40 kB
is reported and not stored.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
MOST_BYTES = 40_000
LIMIT_SECONDS = 120

# Noise that a user enables through the environment.
SETTINGS = {
    "plain": {},
    # Not DETAIL: with TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP over gloo in torch 2.8 dies with SIGSEGV.
    "debug": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1"},
    "detail": {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"},
    "info": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO", "GLOO_LOG_LEVEL": "DEBUG", "TORCH_SHOW_CPP_STACKTRACES": "1"},
    "warn": {"PYTHONWARNINGS": "always", "LEVEL": "DEBUG"},
    "dev": {"PYTHONDEVMODE": "1", "PYTHONUNBUFFERED": "1"},
    "default": {"PYTHONWARNINGS": "default", "PYTHONASYNCIODEBUG": "1", "OMP_NUM_THREADS": ""},
    "logs": {"TORCH_LOGS": "c10d,ddp,fsdp", "TORCH_CPP_LOG_LEVEL": "WARNING", "LEVEL": "DEBUG"},
    "dynamo": {"TORCH_LOGS": "graph_breaks,recompiles,dynamo", "TORCHDYNAMO_VERBOSE": "1"},
    "tokens": {"TOKENIZERS_PARALLELISM": "", "WORKERS": "2"},
    "hf": {"TRANSFORMERS_VERBOSITY": "debug", "HF_LEVEL": "debug", "ACCELERATE_LOG_LEVEL": "DEBUG", "NO_BAR": "1"},
    "jax": {"JAX_LOG_COMPILES": "1", "TF_CPP_MIN_LOG_LEVEL": "0", "DOUBLE": "1", "STEPS": "12"},
    # As warn, for programs whose output at DEBUG is very long.
    "always": {"PYTHONWARNINGS": "always"},
}

# For each program: launchers, settings, and extras (each a name with its environment or arguments).
MATRIX = {
    "mnist_ddp": (["mainstay2", "torchrun2", "tee2", "srun2", "rank1", "mainstay4", "stamped2", "mpi3"], ["plain", "debug", "info", "warn", "dev", "logs"], [("", {}), ("unused", {"FIND_UNUSED": "1"}), ("leave", {"LEAVE_GROUP": "1", "WORKERS": "2"})]),
    "imagenet_style": (["python1", "mainstay2", "torchrun2", "srun2", "stamped1"], ["plain", "debug", "warn", "dev"], [("", {}), ("seeded", {"ARGS": "--seed 7"}), ("spawn", {"ARGS": "--spawn 2"}), ("resumed", {"ARGS": "--resume checkpoint.pth.tar", "TWICE": "1"}), ("absent", {"ARGS": "--resume nosuch.pth.tar"})]),
    "word_lm": (["python1", "mainstay1", "stamped1", "mainstay2", "srun2", "mpi2"], ["plain", "warn", "dev", "default", "info"], [("", {})]),
    "fsdp2": (["mainstay2", "torchrun2", "tee2", "srun4"], ["plain", "info", "warn", "logs"], [("", {})]),
    "gpt": (["python1", "mainstay2", "torchrun2", "tee2", "srun2", "stamped2", "mainstay4"], ["plain", "debug", "info", "warn"], [("", {}), ("resumed", {"TWICE": "1"}), ("unused", {"FIND_UNUSED": "1"})]),
    "lightning_fit": (["python1", "mainstay2", "torchrun2", "stamped1"], ["plain", "warn", "debug"], [("", {}), ("unused", {"UNUSED": "1", "NO_BAR": "1"}), ("resumed", {"RESUME": "last", "TWICE": "1"}), ("profiled", {"PROFILER": "simple", "ANOMALY": "1", "SHUFFLED": "1", "PRECISION": "bf16-mixed"})]),
    "hf_trainer": (["python1", "mainstay2", "torchrun2", "srun2"], ["plain", "tokens", "hf", "warn", "debug"], [("", {}), ("resumed", {"TWICE": "1"}), ("unused", {"FIND_UNUSED": "1"}), ("recompute", {"RECOMPUTE": "1", "REPORT": "tensorboard"})]),
    "accelerate_loop": (["python1", "mainstay2", "accelerate2", "tee2"], ["plain", "warn", "debug", "hf"], [("", {}), ("bf16", {"PRECISION": "bf16"})]),
    "jax_train": (["python1", "mainstay1", "stamped1", "mainstay2"], ["plain", "jax", "always", "dev"], [("", {})]),
    "flax_train": (["python1", "mainstay1", "stamped1"], ["plain", "jax", "dev", "always"], [("", {}), ("resumed", {"TWICE": "1"})]),
    "wandb_offline": (["python1", "mainstay1", "stamped1"], ["plain", "warn", "dev"], [("", {})]),
    "tensorboard_log": (["python1", "mainstay1"], ["plain", "warn", "dev"], [("", {}), ("order", {"WRONG_ORDER": "1"})]),
    "workers": (["python1", "mainstay1", "mainstay2", "stamped1"], ["plain", "warn", "dev", "default"], [("", {}), ("trace", {"TRACE": "1"}), ("none", {"WORKERS": "0"})]),
    "compiled": (["python1", "mainstay1", "mainstay2"], ["plain", "dynamo", "warn"], [("", {}), ("eager", {"BACKEND": "eager"})]),
    "dcp_async": (["mainstay2", "torchrun2", "tee2", "srun3"], ["plain", "debug", "warn"], [("", {})]),
    "retrying": (["python1", "mainstay1", "mainstay2", "srun2", "stamped1", "mpi2"], ["plain", "warn", "dev", "default", "debug"], [("", {}), ("captured", {"CAPTURE": "1", "SEED": "4"}), ("info", {"LEVEL": "INFO", "SEED": "5"})]),
    "megatron_gpt": (["mainstay2", "torchrun2", "srun1"], ["plain", "debug", "warn"], [("", {})]),
    "deepspeed_zero": (["mainstay2", "torchrun2", "srun2"], ["plain", "debug", "warn"], [("", {}), ("stage2", {"STAGE": "2", "CLOCK": "1"})]),
    "ray_train": (["python1"], ["plain", "warn", "debug"], [("", {})]),
    "pipeline": (["mainstay2", "torchrun3", "srun2", "stamped2"], ["plain", "detail", "info"], [("", {})]),
    "titan_style": (["mainstay2", "torchrun2", "tee2", "stamped2"], ["plain", "debug", "warn"], [("", {}), ("replicate", {"REPLICATE": "1"})]),
    "shards_numpy": (["python1", "mainstay2", "srun2", "stamped1", "mpi3", "rank1"], ["plain", "warn", "dev", "default"], [("", {}), ("trace", {"TRACE": "1"})]),
    "tokens_numpy": (["python1", "mainstay1", "stamped1", "srun2"], ["plain", "warn", "dev", "tokens"], [("", {}), ("threads", {"RAYON_NUM_THREADS": "2"})]),
    "numpy_json": (["python1", "mainstay2", "srun2", "stamped1", "mpi3", "mainstay4"], ["plain", "warn", "dev", "default", "debug"], [("", {})]),
}
# Programs that are not distributed: if there is one rank, they get no distributed environment.
ALONE = {"word_lm", "jax_train", "flax_train", "wandb_offline", "tensorboard_log", "workers", "compiled", "retrying", "numpy_json", "shards_numpy", "tokens_numpy", "imagenet_style", "gpt"}


# Programs that start quickly: more of their combinations are run.
QUICK = {"numpy_json", "shards_numpy", "tokens_numpy", "retrying", "word_lm"}


def plan():
    """All runs: launchers and settings are combined diagonally for each extra, not each with each."""
    runs = {}
    for program, (launchers, settings, extras) in MATRIX.items():
        rounds = max(len(launchers), len(settings)) * (3 if program in QUICK else 2 if len(launchers) > 1 else 1)
        for extra_at, (extra, variables) in enumerate(extras):
            times = rounds if extra_at == 0 else max(2, rounds // 3)
            for at in range(times):
                launcher = launchers[(at + at // len(launchers) + extra_at) % len(launchers)]
                setting = settings[(at + extra_at) % len(settings)]
                if "spawn" == extra:
                    launcher = "python1"
                if variables.get("RESUME") and launcher.startswith("accelerate"):
                    launcher = "python1"
                name = "-".join(part for part in (program, launcher, setting, extra) if part)
                runs[name] = (program, launcher, setting, variables, 20 + 8 * (at % 5))
    return runs


class Machine:
    """What must not appear in an output of this machine, and its replacements."""

    def __init__(self, python):
        ask = "import sysconfig, sys, site, torch; print('\\n'.join([sysconfig.get_path('stdlib'), *sys.path, sys.prefix, sys.base_prefix]))"
        asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split("\n")
        library, *paths = [line for line in asked if line]
        # Tools from installed packages, such as ninja.
        self.tools = [path.split("/lib/python")[0] + "/bin" for path in paths if path.endswith("site-packages")]
        self.swaps = [(str(HERE / "programs"), "/home/user/run")]
        for path in paths:
            if path.endswith("site-packages"):
                self.swaps.append((path, "/opt/venv/lib/python3/site-packages"))
                self.swaps.append((path.split("/lib/python")[0], "/opt/venv"))
        self.swaps += [(library, "/usr/lib/python3"), (paths[-1], "/usr"), (paths[-2], "/opt/venv")]
        self.swaps.sort(key=lambda swap: -len(swap[0]))
        self.host = socket.gethostname()
        self.address = None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                self.address = probe.getsockname()[0]
            except OSError:
                pass

    def neutral(self, text, out, others):
        for path, other in [(str(out), "/home/user/run/out"), *others, *self.swaps]:
            text = text.replace(path, other)
        text = re.sub(rf"\b{re.escape(self.host)}\b", "node-1", text)
        if self.address:
            text = text.replace(self.address, "10.0.0.1")
        text = re.sub(r"/root\b", "/home/user", text)
        text = re.sub(r"(?<![\w/])/work/\S*", "/home/user/run", text)
        return re.sub(r"Linux-[\w.+-]+", "Linux-6.8.0-x86_64-with-glibc2.36", text)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def collect(commands, prefixes, stamp, cwd):
    """Runs commands concurrently and merges their lines in order of writing, each with the prefix of its command."""
    text, lock, children = [], threading.Lock(), []

    def pump(stream, prefix):
        for line in stream:
            line = line.decode("utf-8", "replace")
            at = time.time()
            stamped = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e9):09d}Z " if stamp else ""
            with lock:
                text.append(stamped + prefix + line)

    pumps = []
    for (command, env), prefix in zip(commands, prefixes):
        child = subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        children.append(child)
        pumps.append(threading.Thread(target=pump, args=(child.stdout, prefix)))
        pumps[-1].start()
    deadline = time.time() + LIMIT_SECONDS
    codes = []
    for child in children:
        try:
            codes.append(child.wait(max(1, deadline - time.time())))
        except subprocess.TimeoutExpired:
            codes.append("too long")
    for child in children:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
    for thread in pumps:
        thread.join()
    return "".join(text), codes


def commands_of(options, program, launcher, arguments, env, out):
    """The processes of a launcher, their prefixes, and whether lines are stamped."""
    kind, ranks = re.fullmatch(r"(\D+)(\d)", launcher).groups()
    ranks = int(ranks)
    script = [str(HERE / "programs" / f"{program}.py"), *arguments]
    stamp = kind == "stamped"
    if kind == "mainstay":
        run = [options.mainstay, "run", "--nproc-per-node", str(ranks), "--log-dir", str(out / "logs"), "--runtime-dir", str(out / "rt"), "--no-agent", "--no-warm"]
        return [(run + script, env)], [""], False
    if kind in ("torchrun", "tee"):
        run = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        run += ["--tee", "3"] if kind == "tee" else []
        return [(run + script, env)], [""], False
    if kind == "accelerate":
        run = [options.python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        return [(run + script, env)], [""], False
    commands, prefixes, port = [], [], str(free_port())
    for rank in range(ranks):
        its = dict(env)
        if ranks > 1 or program not in ALONE:
            its |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if kind == "srun":
            its |= {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ranks)} if program != "lightning_fit" else {}
        commands.append(([options.python, *script], its))
        form = {"srun": f"{rank}: ", "mpi": f"[1,{rank}]<stdout>:", "rank": f"[rank{rank}]: ", "stamped": f"[rank{rank}]:" if ranks > 1 else ""}
        prefixes.append(form.get(kind, ""))
    return commands, prefixes, stamp


def make(options, machine, name, run):
    program, launcher, setting, variables, steps = run
    target = HERE / "runs" / f"{name}.log"
    if target.exists() and not options.again:
        return None
    out = pathlib.Path(tempfile.mkdtemp(prefix="healthy-"))
    try:
        variables = dict(variables)
        arguments = variables.pop("ARGS", "").split()
        twice = variables.pop("TWICE", None)
        env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        env |= {"PATH": ":".join([str(pathlib.Path(options.python).parent), *machine.tools, env["PATH"]]), "VIRTUAL_ENV": str(pathlib.Path(options.python).parent.parent)}
        env |= {"OMP_NUM_THREADS": "1", "OUT": str(out), "STEPS": str(steps), "TMPDIR": str(out / "tmp"), "PORT": str(free_port())}
        env |= {"WANDB_SILENT": "false", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg"}
        (out / "tmp").mkdir()
        env |= SETTINGS[setting] | variables
        env = {key: value for key, value in env.items() if value != ""}
        if twice:
            # The first run writes a checkpoint. The run that resumes from it is stored.
            first = {key: value for key, value in env.items() if key != "RESUME"}
            collect(*commands_of(options, program, launcher, [], first, out), out)
            kept = sorted(out.glob("*.ckpt"))
            env["RESUME"] = str(kept[-1]) if kept else "1"
        text, codes = collect(*commands_of(options, program, launcher, arguments, env, out), out)
        text = machine.neutral(text, out, [(options.mainstay, "/opt/mainstay/bin/mainstay")] if options.mainstay else [])
        if any(code != 0 for code in codes):
            (pathlib.Path(tempfile.gettempdir()) / f"failed-{name}.log").write_text(text)
            return f"{name}: ended with {codes}: {text[-300:]!r}"
        if len(text.encode()) > MOST_BYTES:
            return f"{name}: {len(text)} characters are too many"
        left = [word for word in (r"(?<![\w])/root\b", r"(?<![\w])/work/", re.escape(machine.host)) if re.search(word, text)]
        if left:
            return f"{name}: {left} is still in it"
        target.write_text(text)
        return None
    finally:
        shutil.rmtree(out, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--mainstay", help="the program; without it, runs under mainstay are left out")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--again", action="store_true", help="also those that are stored already")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    runs = {name: run for name, run in plan().items() if options.only in name and (options.mainstay or run[1][:8] != "mainstay")}
    if options.list:
        print("\n".join(runs), f"\n{len(runs)} runs")
        return
    (HERE / "runs").mkdir(exist_ok=True)
    machine = Machine(options.python)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # Runs with few ranks first.
        runs = dict(sorted(runs.items(), key=lambda run: int(run[1][1][-1])))
        waiting = {pool.submit(make, options, machine, name, run): name for name, run in runs.items()}
        for done in concurrent.futures.as_completed(waiting):
            said = done.result()
            print(said or f"{waiting[done]}: stored", flush=True)


if __name__ == "__main__":
    main()
