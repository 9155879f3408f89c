#!/bin/sh
# A program behind a shell script.
set -e
echo "starting on $(uname -s)"
python3 "$@"
echo finished
