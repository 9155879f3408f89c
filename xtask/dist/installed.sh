# After the installation and after an upgrade, as root. A running agent is replaced by the new one; ranks and launchers
# run on.
if [ -d /run/systemd/system ]; then
    systemd-sysusers mainstay.conf
    systemd-tmpfiles --create mainstay.conf
    systemctl daemon-reload
    systemctl try-restart mainstay.service
else
    systemd-sysusers mainstay.conf || true
fi
