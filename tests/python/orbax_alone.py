"""A JAX process that saves by Orbax into a directory of its host's, and goes on from the newest step that it finds there.

usage: orbax_alone.py DIRECTORY      prints what it restored and what it saved
"""

import sys

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
import orbax.checkpoint as ocp

SIZE = 1 << 18


def main():
    manager = ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=2))
    step = manager.latest_step() or 0
    if step:
        wanted = {"weights": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}
        restored = manager.restore(step, args=ocp.args.StandardRestore(wanted))
        assert (restored["weights"] == jnp.arange(SIZE, dtype=jnp.float32) + step).all()
    print(f"restored step {step}", flush=True)
    state = {"weights": jnp.arange(SIZE, dtype=jnp.float32) + step + 10}
    assert manager.save(step + 10, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    manager.close()
    print(f"saved step {step + 10}", flush=True)


main()
