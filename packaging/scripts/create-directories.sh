systemd-sysusers gpush.conf
# Without /proc, for example in some chroots, systemd-tmpfiles fails. systemd then creates the directories at the next
# boot.
systemd-tmpfiles --create gpush.conf || true
