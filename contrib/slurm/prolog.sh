#!/bin/bash
# For Prolog: a node that is not fit for training is drained with its reason, and the job starts on another one. Needs
# SchedulerParameters=nohold_on_prolog_fail in slurm.conf: by default, Slurm holds the job until a person releases it. By
# itself, a prolog that fails drains the node as "Prolog error". health.sh resumes the node when it is fit again.
export PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
# shellcheck disable=SC2086
said=$(mainstay check --fail-on fail $MAINSTAY_CHECK 2>&1)
case $? in
0) exit 0 ;;
# Called in a wrong way (64), or not installed (126, 127): that says nothing about the node, and must not drain all of them.
64 | 126 | 127) echo "$said" >&2; exit 0 ;;
esac
# Without the verdict in front and the counts at the end.
wrong=$(head -1 <<<"$said" | sed -E 's/^[A-Z]+: //; s/; [0-9]+ (pass|fail|warn|unknown|skipped)(,| in ).*//' | cut -c1-150)
reason="[node_problem] mainstay: $wrong"
scontrol update nodename="${SLURMD_NODENAME:-$(hostname -s)}" state=drain reason="$reason"
exit 1
