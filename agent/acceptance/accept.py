"""Verifies on this host's GPUs what Mainstay guarantees. Needs Python 3.9 or later; torch and jax only for their parts.

Each part runs in its own process group with its own time limit. A part that hangs is abandoned and reported.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import report

# Minimum time of each part in seconds, together less than 10 minutes. Later parts may use the time a part leaves over.
PARTS = {"nvml": 40, "commands": 25, "deep": 60, "weight": 30, "training": 130, "faults": 120, "checkpoint": 110, "jax": 50}
HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = {"training": "training.py", "faults": "training.py", "checkpoint": "checkpoint.py", "jax": "training.py"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mainstay", default=os.path.join(HERE, "mainstay"))
    parser.add_argument("--out", default=".")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--small", action="store_true", help="small sizes and more time for each job, as the suite uses")
    chosen = parser.parse_args()
    unknown = set(chosen.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return chosen


def run_part(part, chosen, limit):
    """Runs a part and returns its rows. Its other output goes to a log in the report's folder."""
    program = os.path.join(HERE, PROGRAMS.get(part, "readings.py"))
    command = [sys.executable, program, "--part", part, "--mainstay", os.path.abspath(chosen.mainstay),
               "--device", chosen.device, "--nvidia-smi", chosen.nvidia_smi, "--limit", f"{limit:.1f}"] + ["--small"] * chosen.small
    rows, rest, began = [], b"", time.monotonic()
    with open(os.path.join(chosen.out, f"{part}.log"), "wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        while True:
            left = began + limit - time.monotonic()
            ready = select.select([child.stdout], [], [], max(left, 0))[0]
            if not ready:
                rows.append(row(part, f"ends within {limit:.0f} s", "abandoned", time.monotonic() - began))
                break
            data = os.read(child.stdout.fileno(), 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"CHECK "):
                    rows.append(json.loads(line[6:]))
                    print_row(rows[-1])
                else:
                    log.write(line + b"\n")
        end(child, gently=ready == [])
        # A process that hangs in a driver survives even SIGKILL, so the wait is limited.
        try:
            status = child.wait(5)
        except subprocess.TimeoutExpired:
            status = "still in the kernel"
    if not rows or (status not in (0, -signal.SIGKILL) and rows[-1]["seen"] != "abandoned"):
        rows.append(row(part, "ends by itself with status 0", f"{status}; see {part}.log", time.monotonic() - began))
    return rows


def end(child, gently):
    """Ends a part and its children. A part that receives SIGTERM can end its own jobs, which are in separate sessions."""
    if child.poll() is not None:
        return
    for number in [signal.SIGTERM] * gently + [signal.SIGKILL]:
        try:
            os.killpg(child.pid, number)
            child.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def row(part, expected, seen, seconds):
    row = dict(part=part, name="the part itself", expected=expected, seen=seen, verdict="fail", seconds=round(seconds, 3))
    print_row(row)
    return row


def print_row(row):
    print(f"{row['verdict']:<8} {row['part']:<11} {row['name']}: {row['seen'][:120]}", flush=True)


def main():
    chosen = arguments()
    try:
        os.makedirs(chosen.out, exist_ok=True)
        writable = os.access(chosen.out, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        elsewhere = tempfile.mkdtemp(prefix="mainstay-gpu-")
        print(f"{os.path.abspath(chosen.out)} cannot be written to (--out); the report is written to {elsewhere}", flush=True)
        chosen.out = elsewhere
    began, rows = time.monotonic(), []
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "device": chosen.device, "parts": chosen.parts}
    try:
        about["mainstay"] = subprocess.run([chosen.mainstay, "version"], capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {chosen.mainstay} (--mainstay) does not run: {error}")
    parts = [part for part in PARTS if part in chosen.parts.split(",")]
    for number, part in enumerate(parts):
        # The later parts keep their minimum time.
        left = began + chosen.limit - time.monotonic() - sum(PARTS[later] for later in parts[number + 1:])
        print(f"-- {part} (at most {max(left, 0):.0f} s)", flush=True)
        if left < 5:
            rows.append(dict(part=part, name="the part itself", expected="time is left", seen="no time left", verdict="not_run", seconds=0))
        else:
            rows += run_part(part, chosen, left)
        # Written after each part, so that a later crash loses nothing.
        counts = report.write(chosen.out, rows, dict(about, seconds=round(time.monotonic() - began, 1)))
    print(f"{counts}; {os.path.join(chosen.out, 'report.md')}")
    sys.exit(1 if counts["fail"] else 0)


if __name__ == "__main__":
    main()
