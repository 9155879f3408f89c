"""A trainer that succeeds with much output: retries that succeed, exceptions that are caught and logged."""

import logging
import os
import random
import socket
import sys
import traceback
import urllib.request
import warnings

import numpy as np
import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")
log = logging.getLogger("trainer")


def with_retries(what, call, times=4):
    for attempt in range(1, times + 1):
        try:
            return call(attempt)
        except Exception as error:
            log.warning("%s failed (attempt %d of %d): %s: %s, retrying", what, attempt, times, type(error).__name__, error)
    log.error("%s failed for good, going on without it", what)
    return None


def refused(attempt):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    if attempt < 3:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
    return "ok"


def unresolved(attempt):
    if attempt < 2:
        socket.getaddrinfo("metrics.invalid", 443)
    return "ok"


def missing(attempt):
    if attempt < 3:
        open(os.path.join(OUT, "not-yet-there.json")).read()
    return "ok"


def denied(attempt):
    raise PermissionError(13, "Permission denied", "/sys/class/power_cap")


def main():
    level = os.environ.get("LEVEL", "DEBUG")
    logging.basicConfig(level=level, format="%(asctime)s | %(levelname)-8s | %(name)s:%(lineno)d | %(message)s", stream=sys.stdout)
    logging.captureWarnings(bool(os.environ.get("CAPTURE")))
    random.seed(int(os.environ.get("SEED", 0)))
    with_retries("asking the metrics server", refused)
    with_retries("resolving the telemetry host", unresolved)
    with_retries("reading the manifest", missing)
    with_retries("reading the power cap", denied)
    try:
        import apex  # noqa: F401
    except ImportError as error:
        log.info("apex is not installed (%s), using the native AdamW", error)
    try:
        torch.zeros(1, device="cuda")
    except Exception:
        log.warning("no accelerator, falling back to CPU\n%s", traceback.format_exc())
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    skipped = 0
    for step in range(1, STEPS + 1):
        x = torch.randn(16, 12)
        loss = nn.functional.cross_entropy(model(x), torch.randint(0, 3, (16,)))
        if step % 17 == 0:
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            skipped += 1
            log.warning("loss is nan at step %d, skipping the update (%d so far)", step, skipped)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 3:
            try:
                model(torch.randn(4, 11))
            except RuntimeError:
                log.exception("the probe batch could not be run; training goes on")
        if step % 9 == 0:
            try:
                {}["tokens_seen"]
            except KeyError as error:
                log.debug("no counter yet: %r", error)
            np.float64(1.0) / np.float64(0.0)
        if step % 4 == 0:
            log.info("step %d | loss %.4f | lr %.1e | tokens/s %.0f", step, loss.item(), 3e-3, 1e4 * random.random())
        if step == 20:
            warnings.warn("`lr_lambda` is deprecated and will be removed in 3.0", DeprecationWarning, stacklevel=1)
            warnings.warn("the learning rate is higher than is usual", UserWarning, stacklevel=1)
            print("GPU memory: n/a; CUDA out of memory is handled by halving the batch", file=sys.stderr)
    log.info("training finished: %d steps, %d skipped, exit code 0", STEPS, skipped)


if __name__ == "__main__":
    main()
