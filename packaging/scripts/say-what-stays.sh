# Prints what remains after the removal, because the removal ends no process that a user may need.
if systemctl list-units --plain --no-legend --state=active,activating,deactivating 'gpushd-mps@*.service' | grep -q .; then
    echo "gpush: MPS control daemons keep running. To end them with their clients: systemctl stop 'gpushd-mps@*.service'" >&2
fi
echo "gpush: programs with leases keep running. Until gpush is installed again, nothing ends these leases" >&2
echo "gpush: MIG instances, compute modes and time-slice settings of the GPUs stay as they are" >&2
