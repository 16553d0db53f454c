# Removal ends nothing that a user may be using.
if systemctl --quiet is-active gpush.slice 2>/dev/null; then
    echo "gpush: MPS control daemons keep running. To end them with their clients: systemctl stop gpush.slice" >&2
fi
echo "gpush: MIG instances, compute modes and time-slice settings of the GPUs stay as they are" >&2
