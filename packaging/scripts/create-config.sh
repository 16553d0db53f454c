# Creates the config if it does not exist. The package does not contain this file, so an upgrade never asks about it, and
# never changes it. A symbolic link to a missing file counts as a config: the administrator made it.
if [ ! -e /etc/gpush/config.toml ] && [ ! -L /etc/gpush/config.toml ]; then
    install -d -m 755 /etc/gpush
    install -m 644 /usr/share/gpush/config.toml /etc/gpush/config.toml
fi
