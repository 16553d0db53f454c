# Returns 0 if an MPS control daemon runs. With and without systemd, each daemon holds the lock of its directory.
mps_runs() {
    for lock in /run/gpush-mps/*/lock; do
        if [ -e "$lock" ] && ! flock --nonblock "$lock" true; then
            return 0
        fi
    done
    return 1
}
