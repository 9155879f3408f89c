"""A JAX program that kills itself in the first attempt."""

import json
import os
import signal
import time

import jax
import jax.numpy as numpy
import mainstay.jax


def mark(word):
    with open(os.environ["ACCEPT_MARK"], "a") as file:
        file.write(json.dumps({"word": word, "time": time.time(), "pid": os.getpid(), "rank": "0"}) + "\n")


def has_failed():
    try:
        with open(os.environ["ACCEPT_MARK"]) as file:
            return '"failed"' in file.read()
    except FileNotFoundError:
        return False


failed = has_failed()
step = mainstay.jax.watch_step(jax.jit(lambda weights: weights * 0.99))
weights = numpy.ones((256, 256))
for number in range(20):
    weights = step(weights)
    if number == 0:
        weights.block_until_ready()
        mark("step")
    if number == 10 and not failed:
        mark("failed")
        os.kill(os.getpid(), signal.SIGKILL)
