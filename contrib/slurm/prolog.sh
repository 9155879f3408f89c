#!/bin/bash
# For Prolog: a node that is not fit for training is drained with its reason, and the job starts on another one. Needs
# SchedulerParameters=nohold_on_prolog_fail in slurm.conf: by default, Slurm holds the job until a person releases it. By
# itself, a prolog that fails drains the node as "Prolog error". `mainstay slurm healthcheck` resumes the node when it is
# fit again. MAINSTAY_CHECK has options for `mainstay check`, such as --require gpu=8.
export PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
# shellcheck disable=SC2086
wrong=$(mainstay check --format npd --fail-on fail $MAINSTAY_CHECK)
case $? in
0) exit 0 ;;
1 | 2) ;;
# Called in a wrong way (64), or not installed (126, 127): that says nothing about the node, and must not drain all of them.
*) exit 0 ;;
esac
scontrol update nodename="${SLURMD_NODENAME:-$(hostname -s)}" state=drain reason="[node_problem] mainstay: $wrong"
exit 1
