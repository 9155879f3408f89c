#!/bin/bash
# with-batch-host.sh COMMAND...: runs the launcher as a task of srun. If the host of the batch script is lost, nothing else
# ends the Slurm job: with --no-kill it stays RUNNING until its time limit. The tasks that are left then end it, or, if
# Mainstay hands the job back (75), let Slurm start it again. BATCH_HOST is the node of the batch script.
"$@" &
launcher=$!
# Slurm signals only this process (proctrack/cgroup).
for signal in TERM USR1 USR2 INT; do
    trap "kill -$signal $launcher 2>/dev/null" "$signal"
done
while :; do
    wait "$launcher"
    status=$?
    kill -0 "$launcher" 2>/dev/null || break
done
[ "$SLURMD_NODENAME" = "$BATCH_HOST" ] && exit $status
# The node's slurmd answers, or Slurm has found that it does not.
for ((look = 0; look < 40; look++)); do
    squeue --noheader --job "$SLURM_JOB_ID" --states RUNNING --format %i 2>/dev/null | grep -q . || break
    state=$(scontrol --oneliner show node "$BATCH_HOST" | grep -o 'State=[^ ]*')
    case $state in
    *DOWN* | *NOT_RESPONDING* | *'*'*)
        echo "$BATCH_HOST is lost and the job has ended with status $status: ending the Slurm job" >&2
        case $status in
        75) scontrol requeue "$SLURM_JOB_ID" ;;
        *) scancel "$SLURM_JOB_ID" ;;
        esac
        break
        ;;
    esac
    # While it is not known, the script itself may go on.
    timeout 2 bash -c ">/dev/tcp/$BATCH_HOST/${SLURMD_PORT:-6818}" 2>/dev/null && break
    sleep 3
done
exit $status
