#!/bin/bash
# HOSTS hosts and a spare, started from a login node: the host of this script is no part of the job, and is not lost with
# one of its hosts. Needs etcd on the first three hosts. Set PROGRAM; run it in tmux, or with nohup.
HOSTS=3
PROGRAM=(--nproc-per-node 8 --checkpoint-dir /shared/llm train.py)

# Of srun; launchers see this variable.
export SLURM_NO_KILL=set
salloc --no-kill --nodes=$((HOSTS + 1)) --ntasks-per-node=1 --exclusive \
    srun --kill-on-bad-exit=0 --wait=0 mainstay run --nnodes "$HOSTS" "${PROGRAM[@]}"
