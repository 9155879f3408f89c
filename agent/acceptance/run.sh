#!/bin/sh
# Verifies on this host's GPUs what Mainstay guarantees. Needs no network and no root. Ends within 10 minutes.
# usage: ./run.sh [--out DIR] [--parts nvml,commands,...]      PYTHON names the Python (with torch for training).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
echo "The program needs glibc $(cat "$here/GLIBC") or later; this host has $(getconf GNU_LIBC_VERSION 2>/dev/null || echo unknown)."
# Installs nothing on this host. Uses a temporary folder if this one is read-only or belongs to another user.
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
# An installer would copy these next to the package.
cp "$work"/packages/*.data/purelib/* "$work/packages/"
PYTHONPATH="$work/packages${PYTHONPATH:+:$PYTHONPATH}"
# Keeps Python from writing compiled files into this folder, which may belong to another user.
PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH PYTHONDONTWRITEBYTECODE
"$python" "$here/accept.py" --mainstay "$program" "$@"
