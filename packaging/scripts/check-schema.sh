# Refuses to install a gpushd that is too old for the database, because that gpushd would refuse all changes. The schema
# number is `user_version` in SQLite's header: four bytes at offset 60, most significant byte first.
database=/var/lib/gpush/gpush.db
if [ -s "$database" ]; then
    schema=$(od -An -tu1 -j60 -N4 "$database" | awk '{ print (($1 * 256 + $2) * 256 + $3) * 256 + $4 }')
    if [ "${schema:-0}" -gt @SCHEMA@ ]; then
        echo "gpush: cannot install version @VERSION@: it reads databases up to schema @SCHEMA@, and $database has schema $schema" >&2
        echo "gpush: install the version that is installed now or a later one; or continue without the history and all leases:" >&2
        echo "gpush:   systemctl stop gpushd.socket gpushd-admin.socket gpushd.service; mv $database $database.schema-$schema && rm -f $database-wal" >&2
        echo "gpush: then install version @VERSION@ again, and release the GPUs that gpushd holds because it knows no leases:" >&2
        echo "gpush:   gpushctl recover --reason 'version @VERSION@ cannot read schema $schema'" >&2
        exit 1
    fi
fi
