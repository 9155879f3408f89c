"""Compares our readings with nvidia-smi's. Checks the commands, the deep check and the agent's resource usage."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import xml.etree.ElementTree as xml

from report import emit, guarded, parse, timed

# Field of `mainstay gpus --json`, path in nvidia-smi's XML, factor, maximum difference between readings one second
# apart.
FIELDS = [
    ("uuid", "uuid", None, 0),
    ("model", "product_name", None, 0),
    ("temperature", "temperature/gpu_temp", 1, 4),
    ("memory_temperature", "temperature/memory_temp", 1, 4),
    ("power", ("gpu_power_readings/instant_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw"), 1, 60),
    ("power_limit", ("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit"), 1, 1),
    ("utilization", "utilization/gpu_util", 1, 100),
    ("memory_total", "fb_memory_usage/total", 1 << 20, 1 << 20),
    # Excludes memory that the driver reserves: 616 MiB on an H200.
    ("memory_used", "fb_memory_usage/used", 1 << 20, 64 << 20),
]
ABSENT = ("N/A", "[N/A]", "Not Supported", "Unknown Error", "")


def text_at(gpu, paths):
    for path in [paths] if isinstance(paths, str) else paths:
        text = (gpu.findtext(path) or "").strip()
        if text not in ABSENT:
            return text
    return None


def compare(part, ours, gpu):
    name = ours["pci_address"]
    for field, path, factor, tolerance in FIELDS:
        theirs, mine = text_at(gpu, path), ours.get(field)
        label = f"{name} {field}"
        if theirs is None:
            emit(part, label, "absent, as in nvidia-smi", mine, "pass" if mine in (None, "") else "fail")
        elif factor is None:
            emit(part, label, theirs, mine, "pass" if theirs == mine else "fail")
        else:
            number = float(re.match(r"[-\d.]+", theirs).group()) * factor
            near = mine is not None and abs(mine - number) <= tolerance
            emit(part, label, f"{number:g} within {tolerance}", mine, "pass" if near else "fail")
    mode = text_at(gpu, "mig_mode/current_mig")
    mig = None if mode is None else mode == "Enabled"
    emit(part, f"{name} MIG", mig, ours.get("split"), "pass" if mig == ours.get("split") else "fail")
    theirs = {int(of.findtext("pid")) for of in gpu.findall("processes/process_info") if "C" in (of.findtext("type") or "C")}
    mine = {of["pid"] for of in ours.get("processes", [])}
    emit(part, f"{name} processes", sorted(theirs), sorted(mine), "pass" if theirs == mine else "fail")


class Agent:
    """A separate agent with its own folder."""

    def __init__(self, mainstay):
        self.mainstay, self.folder = mainstay, tempfile.mkdtemp(prefix="ms-")
        self.socket = os.path.join(self.folder, "a.sock")
        variables = dict(os.environ, MAINSTAY_AGENT_GPU_INTERVAL="1s")
        self.log = open(os.path.join(self.folder, "log"), "wb")
        self.child = subprocess.Popen([mainstay, "agent", "--socket", self.socket, "--state-dir", os.path.join(self.folder, "state")],
                                      env=variables, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def ask(self, *words):
        done = subprocess.run([self.mainstay, *words, "--socket", self.socket], capture_output=True, text=True, timeout=20)
        return done.stdout

    def gpus(self):
        """Waits until all GPUs have been read once. Returns an empty list if there are none after 20 s."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if self.child.poll() is not None:
                self.log.flush()
                with open(self.log.name, errors="replace") as log:
                    raise RuntimeError(f"the agent ended with status {self.child.returncode}: {log.read()[-600:]}")
            told = self.ask("gpus", "--json")
            devices = json.loads(told)["devices"] if told.strip() else []
            if devices and all("read_age" in device or device["state"] != "UNKNOWN" for device in devices):
                return devices
            time.sleep(0.1)
        return []

    def metrics(self):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(self.socket)
            stream.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: stream.recv(65536), b"")).decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.terminate()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def driver(part):
    """Whether there is a driver. Without one the part does not run, because an agent would only wait."""
    signs = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
    found = any(map(os.path.exists, signs)) or "MAINSTAY_AGENT_GPU_LIBRARY" in os.environ
    if not found:
        emit(part, "NVIDIA driver", "it is loaded", f"neither {' nor '.join(signs)} exists", "not_run")
    return found


def nvml(args):
    if not driver("nvml"):
        return None
    with Agent(args.mainstay) as agent:
        agent.gpus()
        try:
            told = subprocess.run([args.nvidia_smi, "-q", "-x"], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return emit("nvml", "nvidia-smi", "it runs", error, "not_run")
        devices = agent.gpus()
        if told.returncode != 0:
            said = (told.stderr or told.stdout).decode(errors="replace")[-300:]
            return emit("nvml", "nvidia-smi", "exit status 0", f"{told.returncode}: {said}", "not_run")
        # `devices` was read right after nvidia-smi, so that both readings are close in time.
        theirs = xml.fromstring(told.stdout).findall("gpu")
        emit("nvml", "GPUs", len(theirs), len(devices), "pass" if len(theirs) == len(devices) else "fail")
        by_uuid = {device.get("uuid"): device for device in devices}
        for gpu in theirs:
            uuid = gpu.findtext("uuid")
            if uuid in by_uuid:
                with guarded("nvml", uuid):
                    compare("nvml", by_uuid[uuid], gpu)
            else:
                emit("nvml", uuid, "it is in mainstay gpus", list(by_uuid), "fail")


def commands(args):
    if not driver("commands"):
        return None
    with Agent(args.mainstay) as agent:
        devices = agent.gpus()
        timed("commands", "mainstay gpus", "at least one GPU", lambda: (len(devices), "pass" if devices else "fail"))
        status = agent.ask("status")
        for device in devices:
            name, page = device["component"], agent.metrics()
            emit("commands", f"status shows {name}", True, name in status, "pass" if name in status else "fail")
            there = device["pci_address"] in page or device["uuid"] in page
            emit("commands", f"metrics name {name}", True, there, "pass" if there else "fail")


def deep(args):
    if not driver("deep"):
        return None

    def check():
        done = subprocess.run([args.mainstay, "check", "--deep", "--group", "gpu", "--alone", "--json"], capture_output=True, text=True, timeout=55)
        verdict = {0: "pass", 2: "fail", 1: "fail"}.get(done.returncode, "not_run")
        return (done.stdout or done.stderr)[:1000], verdict
    timed("deep", "mainstay check --deep", "exit status 0", check)


def weight(args):
    if not driver("weight"):
        return None
    with Agent(args.mainstay) as agent:
        agent.gpus()
        ticks, seconds, began = cpu(agent.child.pid), 10, time.monotonic()
        time.sleep(seconds)
        used = (cpu(agent.child.pid) - ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
        for pid in tree(agent.child.pid):
            with open(f"/proc/{pid}/status") as file:
                rss = int(re.search(r"VmRSS:\s+(\d+)", file.read()).group(1)) / 1024
            name = "agent" if pid == agent.child.pid else "probe"
            emit("weight", f"memory of {name}",
                 "less than 100 MiB", f"{rss:.1f} MiB", "pass" if rss < 100 else "fail")
        emit("weight", "CPU, GPUs read each second (10 times the default rate)", "less than 5 % of a core",
             f"{100 * used:.2f} %: {1000 * used:.1f} ms for a reading of all GPUs and what else the agent does in a second",
             "pass" if used < 0.05 else "fail", seconds)


def stat(pid):
    """The fields of /proc/PID/stat after the name; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()
    except OSError:
        return None


def tree(pid):
    """The process and all its descendants, including the probe. Uses parents: not every kernel lists children."""
    parents = {int(entry): stat(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    pids = [pid]
    for known in pids:
        pids += [child for child, fields in parents.items() if fields and int(fields[1]) == known]
    return pids


def cpu(pid):
    fields = [stat(one) for one in tree(pid)]
    return sum(int(of[11]) + int(of[12]) for of in fields if of)


if __name__ == "__main__":
    parsed = parse()
    with guarded(parsed.part, "the part itself"):
        {"nvml": nvml, "commands": commands, "deep": deep, "weight": weight}[parsed.part](parsed)
