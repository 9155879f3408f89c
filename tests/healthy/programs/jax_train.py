"""A multilayer perceptron in plain JAX."""

import logging
import os

import jax
import jax.numpy as jnp

STEPS = int(os.environ.get("STEPS", 40))


def predict(weights, x):
    for matrix, bias in weights[:-1]:
        x = jnp.tanh(x @ matrix + bias)
    matrix, bias = weights[-1]
    return x @ matrix + bias


def loss_of(weights, x, y):
    return jnp.mean((predict(weights, x) - y) ** 2)


@jax.jit
def update(weights, x, y):
    loss, slope = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.05 * g, weights, slope), loss


def main():
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format="%(levelname)s:%(asctime)s:%(name)s: %(message)s")
    print(f"JAX {jax.__version__} devices: {jax.devices()}, process {jax.process_index()} of {jax.process_count()}")
    key = jax.random.key(0)
    sizes = [8, 32, 1]
    weights = []
    for a, b in zip(sizes, sizes[1:]):
        key, sub = jax.random.split(key)
        weights.append((jax.random.normal(sub, (a, b)) / a**0.5, jnp.zeros(b)))
    if os.environ.get("DOUBLE"):
        # Without x64, JAX truncates this to float32 with a warning.
        jnp.zeros(3, dtype=jnp.float64)
    for step in range(STEPS):
        key, sub = jax.random.split(key)
        x = jax.random.normal(sub, (32, 8))
        weights, loss = update(weights, x, x.sum(1, keepdims=True))
        if step % 2 == 0:
            print(f"step {step} loss {float(loss):.5f}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
