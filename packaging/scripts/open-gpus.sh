# Returns whether gpushd has written a list: it has all major numbers but that of the GPUs, and all block devices.
is_of_gpushd() {
    [ "$(grep -c '^DeviceAllow=char-[0-9]* rwm$' "$1")" = 511 ] && grep -q '^DeviceAllow=block-\* rwm$' "$1" &&
        ! grep -q '^DeviceAllow=char-195 ' "$1"
}
# Lets login sessions open the GPUs again, if `gpushctl enforce on` has denied them: without gpushd, they would get no lease.
for unit in user.slice cron.service crond.service atd.service; do
    control="/etc/systemd/system.control/$unit.d"
    list="$control/50-DeviceAllow.conf"
    [ -e "$list" ] || continue
    if is_of_gpushd "$list"; then
        # systemd may keep the last list, so it must allow all devices.
        systemctl set-property "$unit" DeviceAllow= 'DeviceAllow=char-* rwm' 'DeviceAllow=block-* rwm' || true
    elif grep -q '^DeviceAllow=.' "$list"; then
        # An administrator has set this list.
        continue
    fi
    rm -f "$list" "$control/50-DevicePolicy.conf"
    rmdir --ignore-fail-on-non-empty "$control" 2>/dev/null || true
    systemctl daemon-reload || true
done
# The scope of Slurm jobs.
for list in /run/systemd/transient/*slurmstepd.scope.d/50-DeviceAllow.conf; do
    if [ -e "$list" ] && is_of_gpushd "$list"; then
        # rpm would read a percent sign as a macro.
        unit=$(basename "$(dirname "$list")" .d)
        systemctl set-property --runtime "$unit" DeviceAllow= 'DeviceAllow=char-* rwm' 'DeviceAllow=block-* rwm' || true
        systemctl set-property --runtime "$unit" DeviceAllow= DevicePolicy=auto || true
    fi
done
