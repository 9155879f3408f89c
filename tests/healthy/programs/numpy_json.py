"""A numpy-only trainer: no framework at all, JSON lines as its log."""

import json
import os
import sys
import time
import warnings

import numpy as np

STEPS = int(os.environ.get("STEPS", 50))


def main():
    random = np.random.default_rng(0)
    weight = np.zeros(8)
    truth = random.normal(size=8)
    print(json.dumps({"event": "start", "rank": int(os.environ.get("RANK", 0)), "world": int(os.environ.get("WORLD_SIZE", 1))}), flush=True)
    for step in range(STEPS):
        x = random.normal(size=(32, 8))
        error = x @ (weight - truth)
        weight -= 0.05 * x.T @ error / 32
        if step == 7:
            np.log(np.zeros(1))  # divide by zero: a RuntimeWarning
            warnings.warn("step size is near the stable limit", RuntimeWarning, stacklevel=1)
        print(json.dumps({"level": "info", "step": step, "loss": round(float((error**2).mean()), 6), "error": None, "time": round(time.time(), 3)}), flush=True)
        time.sleep(0.002)
    print(json.dumps({"level": "info", "event": "finished", "failed": 0, "errors": []}), file=sys.stderr)


if __name__ == "__main__":
    main()
