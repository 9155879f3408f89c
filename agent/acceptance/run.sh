#!/bin/sh
# Proves on this host's GPUs what Mainstay promises. Needs no network and no root. Ends within 10 minutes.
# usage: ./run.sh [--out DIR] [--parts nvml,commands,...]      PYTHON names the Python (with torch for training).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
echo "The program needs glibc $(cat "$here/GLIBC") or later; this host has $(getconf GNU_LIBC_VERSION 2>/dev/null || echo unknown)."
chmod +x "$here/mainstay"
# The wheel is unpacked beside the program: nothing is installed on this host.
"$python" -m zipfile -e "$here"/mainstay*.whl "$here/packages"
PYTHONPATH="$here/packages${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$python" "$here/accept.py" --mainstay "$here/mainstay" "$@"
