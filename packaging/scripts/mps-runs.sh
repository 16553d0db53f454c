# Returns 0 if an MPS control daemon runs. Each daemon holds the lock of its directory, with and without systemd.
mps_runs() {
    for lock in /run/gpush-mps/*/lock; do
        if [ -e "$lock" ] && ! flock --nonblock "$lock" true; then
            return 0
        fi
    done
    return 1
}
