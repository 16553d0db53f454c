# Checks the minimum versions: pidfds need Linux 5.4, and the units need systemd 245. During the build of an image,
# checks nothing, because the running kernel is then the kernel of the build host.
if [ -d /run/systemd/system ]; then
    kernel=$(uname -r)
    number=$(echo "$kernel" | awk -F'[^0-9]+' '{ print $1 * 1000 + $2 }')
    if [ "$number" -lt 5004 ]; then
        echo "gpush: cannot install: gpush needs Linux 5.4 or later, and this host runs Linux $kernel" >&2
        exit 1
    fi
    systemd=$(systemctl --version | awk 'NR == 1 { print $2 + 0 }')
    if [ "$systemd" -lt 245 ]; then
        echo "gpush: cannot install: gpush needs systemd 245 or later, and this host has systemd $systemd" >&2
        exit 1
    fi
fi
