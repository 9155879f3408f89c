"""The report of the acceptance program: one row per check, as JSON and as Markdown."""

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
import traceback

# not_run: the host lacks something that the check needs. This is not a success.
VERDICTS = ("pass", "fail", "not_run")


def emit(part, name, expected, seen, verdict, seconds=None):
    """Prints a check as a line of JSON for the parent process."""
    assert verdict in VERDICTS, verdict
    row = dict(part=part, name=name, expected=str(expected), seen=str(seen), verdict=verdict)
    row["seconds"] = None if seconds is None else round(seconds, 3)
    print("CHECK " + json.dumps(row), flush=True)


def parse():
    """The options that accept.py passes to each part."""
    parser = argparse.ArgumentParser()
    for name in ("--part", "--mainstay", "--device", "--nvidia-smi"):
        parser.add_argument(name)
    parser.add_argument("--limit", type=float, default=600, help="seconds until the part is abandoned")
    parser.add_argument("--small", action="store_true")
    # On SIGTERM a part unwinds: it ends its jobs and agents and removes its folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return parser.parse_args()


@contextlib.contextmanager
def guarded(part, name):
    """Reports an exception as a failed check with its last lines, and lets the part continue."""
    try:
        yield
    except Exception:
        emit(part, name, "it can be checked", traceback.format_exc()[-600:], "fail")


def timed(part, name, expected, action):
    """Runs an action that returns (seen, verdict). An exception is a failed check and does not end the part."""
    began = time.monotonic()
    try:
        seen, verdict = action()
    except Exception as error:
        seen, verdict = f"{type(error).__name__}: {error}", "fail"
    emit(part, name, expected, seen, verdict, time.monotonic() - began)


def write(folder, rows, about):
    """Writes report.json and report.md."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    about = dict(about, host_kernel=platform.release(), libc=" ".join(platform.libc_ver()), python=platform.python_version())
    with open(os.path.join(folder, "report.json"), "w") as file:
        json.dump({"about": about, "counts": counts, "checks": rows}, file, indent=1)
    cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")[:400]
    lines = ["# GPU acceptance report", ""]
    lines += [f"- {key}: {cell(value)}" for key, value in about.items()]
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), ""]
    lines += ["| part | check | expected | seen | verdict | seconds |", "|---|---|---|---|---|---|"]
    keys = ("part", "name", "expected", "seen", "verdict", "seconds")
    lines += ["| " + " | ".join(cell(row[key]) for key in keys) + " |" for row in rows]
    with open(os.path.join(folder, "report.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    return counts
