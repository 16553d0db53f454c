systemd-sysusers gpush.conf
systemd-tmpfiles --create gpush.conf
