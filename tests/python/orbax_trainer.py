"""A host of a JAX job that checkpoints by Orbax's own multi-tier checkpointing, and knows nothing of Mainstay.

usage: orbax_trainer.py DIRECTORY      prints what it restored, and what it saved, each as a line

Who places the job's processes (GKE) tells each its number and the coordinator's address in DIRECTORY/jax-init-info.txt.
"""

import functools

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")

import orbax.checkpoint as ocp
from absl import app
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import initialization
from orbax.checkpoint.experimental.emergency.replicator_checkpoint_manager import (
    ReplicatorCheckpointManager,
    ReplicatorCheckpointManagerOptions,
)

HOSTS = 2
SIZE = 1 << 20
initialize = jax.distributed.initialize


@functools.wraps(initialize)
def initialize_here(coordinator_address, **more):
    """On TPUs JAX finds the number of hosts by itself; here other tests listen on this machine too."""
    initialize(coordinator_address, HOSTS, coordinator_bind_address=coordinator_address, **more)


jax.distributed.initialize = initialize_here


def main(arguments):
    directory = epath.Path(arguments[1])
    initialization.initialize_multi_tier_checkpointing(
        directory, run_name="orbax-job", backup_interval_minutes=30, num_slices=1, data_parallelism=1
    )
    mesh = Mesh(np.array(jax.devices()), ("hosts",))
    sharding = NamedSharding(mesh, PartitionSpec("hosts"))
    manager = ReplicatorCheckpointManager(directory, ReplicatorCheckpointManagerOptions(), global_mesh=mesh)
    newest = manager.latest_step()
    if newest is None:
        step, of = 0, 0.0
    else:
        wanted = {"weights": jax.ShapeDtypeStruct((SIZE,), np.float32, sharding=sharding)}
        how = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
        )
        restored = manager.restore(newest, args=ocp.args.Composite(state=how))["state"]["weights"]
        # This host's part: every word as it was saved.
        mine = np.asarray(restored.addressable_shards[0].data)
        first = float(mine[0])
        begin = restored.addressable_shards[0].index[0].start or 0
        assert np.array_equal(mine, np.arange(begin, begin + mine.size, dtype=np.float32) + newest), mine[:3]
        step, of = newest, first
    print(f"restored step {step}: {of}", flush=True)

    save = step + 10
    whole = np.arange(SIZE, dtype=np.float32) + save
    weights = jax.make_array_from_callback((SIZE,), sharding, lambda index: whole[index])
    assert manager.save(save, args=ocp.args.Composite(state=ocp.args.PyTreeSave({"weights": weights})))
    manager.wait_until_finished()
    print(f"saved step {save}", flush=True)
    manager.close()
    jax.distributed.shutdown()


app.run(main)
