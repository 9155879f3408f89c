"""Logistic regression on shards that worker processes read: late files, checksum mismatches, retries."""

import concurrent.futures
import hashlib
import logging
import os
import sys
import tempfile
import time
import warnings

import numpy as np

STEPS = int(os.environ.get("STEPS", 40))
RANK = int(os.environ.get("RANK", 0))
log = logging.getLogger("shards")


def write_shard(folder, number):
    path = os.path.join(folder, f"shard-{number:05d}.npy")
    data = np.random.default_rng(number).normal(size=(64, 9))
    np.save(path, data)
    return path, hashlib.sha256(data.tobytes()).hexdigest()


def read_shard(path, digest, attempt):
    if attempt == 0 and path.endswith("3.npy"):
        raise TimeoutError(f"[Errno 110] Connection timed out: {path}")
    data = np.load(path)
    found = hashlib.sha256(data.tobytes()).hexdigest()
    if attempt == 0 and path.endswith("5.npy"):
        found = "0" * 64
    if found != digest:
        raise OSError(f"checksum mismatch in {path}: expected {digest[:12]}, got {found[:12]}")
    return data


def fetch(pool, path, digest):
    for attempt in range(3):
        try:
            return pool.submit(read_shard, path, digest, attempt).result(timeout=60)
        except (TimeoutError, OSError) as error:
            log.warning("reading %s failed, attempt %d/3, will retry: %s", path, attempt + 1, error, exc_info=bool(os.environ.get("TRACE")))
            time.sleep(0.01)
    raise RuntimeError(f"{path} cannot be read")


def main():
    form = f"%(asctime)s.%(msecs)03d %(levelname).1s {RANK} %(filename)s:%(lineno)d] %(message)s"
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format=form, datefmt="%m%d %H:%M:%S", stream=sys.stderr)
    log.info("rank %d of %s, numpy %s", RANK, os.environ.get("WORLD_SIZE", 1), np.__version__)
    if "SLURM_PROCID" not in os.environ:
        log.warning("not under Slurm; --requeue has no effect")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ProcessPoolExecutor(2) as pool:
        shards = [write_shard(folder, number) for number in range(8)]
        weight = np.zeros(8)
        for step in range(1, STEPS + 1):
            data = fetch(pool, *shards[step % 8])
            x, y = data[:, :8], data[:, 8] > 0
            p = 1 / (1 + np.exp(-x @ weight))
            weight -= 0.1 * x.T @ (p - y) / len(x)
            if step % 4 == 0:
                loss = -np.mean(np.where(y, np.log(p), np.log(1 - p)))
                log.info("step=%d loss=%.4f grad_norm=%.3f nan_count=0 oom_count=0", step, loss, np.linalg.norm(x.T @ (p - y)))
            if step == 11:
                np.sqrt(np.array([-1.0]))
                warnings.warn("shuffle buffer is smaller than a shard; samples may be correlated", UserWarning, stacklevel=1)
            if step == 16:
                open(os.path.join(folder, "left-open"), "w")  # a ResourceWarning where those are shown
    log.info("done: 0 errors, 0 failures")


if __name__ == "__main__":
    main()
