#!/bin/bash
# For HealthCheckProgram: drains a node that is not fit for training, and resumes it when it is again.
#
#   HealthCheckProgram=/etc/slurm/health.sh
#   HealthCheckInterval=60
#   HealthCheckNodeState=ANY,CYCLE
#
# Slurm ignores the exit status of this program, so it calls scontrol itself, as root or SlurmUser. It never changes a node
# that somebody else drained. MAINSTAY_CHECK has options for `mainstay check`, such as --require gpu=8.
export PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
node=${SLURMD_NODENAME:-$(hostname -s)}
# "[node_problem]" is the prefix by which Soperator and others know reasons of programs.
own='[node_problem] mainstay:'

# "FAIL: gpu.0000:3b:00: the GPU has fallen off the bus (XID 79); 17 pass, 1 fail in 34 ms": what is between.
wrong() { head -1 <<<"$1" | sed -E 's/^[A-Z]+: //; s/; [0-9]+ (pass|fail|warn|unknown|skipped)(,| in ).*//' | cut -c1-150; }

about=$(scontrol --oneliner show node "$node") || exit 1
state=$(sed -n 's/.* State=\([^ ]*\).*/\1/p' <<<"$about")
reason=$(sed -n 's/.* Reason=\(.*\) \[[^]]*\].*/\1/p' <<<"$about")

# An idle node that this program drained passes a deeper check before it gets jobs again: what cannot be read is no pass.
deep=
fail_on=fail
case $state,$reason in
IDLE*DRAIN*,"$own"*) deep=--deep fail_on=fail,unknown ;;
esac
# shellcheck disable=SC2086
said=$(mainstay check $deep --fail-on $fail_on $MAINSTAY_CHECK 2>&1)
status=$?
case $status,$reason in
0,"$own"*) [ -n "$deep" ] && scontrol update nodename="$node" state=resume ;;
0,*) ;;
# Called in a wrong way (64), or not installed (126, 127): that says nothing about the node.
64,* | 126,* | 127,*) echo "$said" >&2 ;;
*,"") scontrol update nodename="$node" state=drain reason="$own $(wrong "$said")" ;;
esac
