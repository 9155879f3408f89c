#!/bin/sh
# Installs Mainstay below / (or $DESTDIR); `install.sh --remove` removes it. The agent is not started.
set -eu
cd "$(dirname "$0")"
root=${DESTDIR:-}
if [ "${1:-}" = --remove ]; then
    [ -n "$root" ] || [ ! -d /run/systemd/system ] || systemctl disable --now mainstay.service || true
    find usr -type f | while read -r file; do rm -f "$root/$file"; done
    exit
fi
find usr etc -type d | while read -r directory; do install -d "$root/$directory"; done
find usr -type f | while read -r file; do install -m "$(stat -c %a "$file")" "$file" "$root/$file"; done
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
    systemd-sysusers mainstay.conf
    systemd-tmpfiles --create mainstay.conf
    systemctl daemon-reload
    systemctl try-restart mainstay.service
fi
