#!/bin/sh
# Verifies on this host's GPUs what Mainstay guarantees. Needs no network and no root. Ends within 10 minutes.
# usage: ./run.sh [--out DIR] [--parts nvml,commands,...]      PYTHON names the Python (with torch for training).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
echo "The program needs glibc $(cat "$here/GLIBC") or later; this host has $(getconf GNU_LIBC_VERSION 2>/dev/null || echo unknown)."
# Nothing is installed on this host. What cannot be done in this folder (not ours, read-only) is done in a temporary one.
work=$here program=$here/mainstay
if [ ! -w "$here" ] || { [ ! -x "$program" ] && ! chmod +x "$program" 2>/dev/null; }; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
if [ ! -x "$program" ]; then
    cp "$program" "$work/mainstay"
    program=$work/mainstay
    chmod +x "$program"
fi
"$python" -m zipfile -e "$here"/mainstay*.whl "$work/packages"
# An installer would put these next to the package.
cp "$work"/packages/*.data/purelib/* "$work/packages/"
PYTHONPATH="$work/packages${PYTHONPATH:+:$PYTHONPATH}"
# Python writes no compiled files into this folder, which may not be ours.
PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH PYTHONDONTWRITEBYTECODE
"$python" "$here/accept.py" --mainstay "$program" "$@"
