# Before the removal, not before an upgrade.
if [ -d /run/systemd/system ]; then
    systemctl disable --now mainstay.service
fi
