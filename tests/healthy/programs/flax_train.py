"""Flax with optax and an Orbax checkpoint."""

import os
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import logging
from flax.training import train_state

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.path.abspath(os.environ.get("OUT", "."))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(32)(x)))


@jax.jit
def update(state, x, y):
    loss, slope = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))(state.params)
    return state.apply_gradients(grads=slope), loss


def main():
    logging.set_verbosity(getattr(logging, os.environ.get("LEVEL", "INFO")))
    logging.info("JAX process: %d / %d", jax.process_index(), jax.process_count())
    logging.info("JAX local devices: %r", jax.local_devices())
    key = jax.random.key(1)
    net = Net()
    state = train_state.TrainState.create(apply_fn=net.apply, params=net.init(key, jnp.ones((1, 8))), tx=optax.adamw(1e-2))
    place = os.path.join(OUT, "flax-checkpoints")
    if not os.environ.get("RESUME"):
        shutil.rmtree(place, ignore_errors=True)
    with ocp.CheckpointManager(place, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        first = 0
        if manager.latest_step() is not None:
            first = manager.latest_step()
            state = manager.restore(first, args=ocp.args.StandardRestore(state))
            logging.info("Restored step %d from %s", first, place)
        else:
            logging.warning("No checkpoint found in %s, starting from scratch", place)
        for step in range(first, first + STEPS):
            key, sub = jax.random.split(key)
            x = jax.random.normal(sub, (32, 8))
            state, loss = update(state, x, x.sum(1, keepdims=True))
            if step % 4 == 0:
                logging.info("step: %d, train_loss: %.4f", step, loss)
            if step % 15 == 14:
                manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    logging.info("Finished after %d steps", STEPS)


if __name__ == "__main__":
    main()
