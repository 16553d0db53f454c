# Refuses to install a gpushd that is too old for the database, because that gpushd would refuse all changes.
database=/var/lib/gpush/gpush.db

# Prints the schema of the database: SQLite's `user_version`, four bytes at offset 60 of the first page. While gpushd runs,
# and after it was killed, the newest first page can be in the write-ahead log:
# - The log has a header of 32 bytes, with the page size at offset 8 and the salt at offset 16.
# - Then come frames: page number, database size, salt, checksum, page. A database size of 0 means that the commit
#   continues in the next frame. A frame whose salt differs from the header is left over from an earlier log.
schema_of_database() {
    in_file=$(od -An -tu1 -j60 -N4 "$database" | awk '{ print (($1 * 256 + $2) * 256 + $3) * 256 + $4 }')
    in_log=
    if [ -s "$database-wal" ]; then
        page=$(od -An -tu4 --endian=big -j8 -N4 "$database-wal" | awk '{ print $1 }')
        salt=$(od -An -tu4 --endian=big -j16 -N8 "$database-wal")
        in_log=$(od -An -v -tu4 --endian=big -j32 "-w$((page + 24))" "$database-wal" | awk -v page="$page" -v salt="$salt" '
            BEGIN { split(salt, words) }
            NF < page / 4 + 6 || $3 != words[1] || $4 != words[2] { exit }
            $1 == 1 { written = $22 }
            $2 > 0 && written != "" { committed = written }
            END { print committed }')
    fi
    echo "${in_log:-$in_file}"
}

if [ -s "$database" ]; then
    schema=$(schema_of_database)
    if [ "${schema:-0}" -gt @SCHEMA@ ]; then
        kept=$database.schema-$schema
        echo "gpush: cannot install version @VERSION@: it reads databases up to schema @SCHEMA@, and $database has schema $schema" >&2
        echo "gpush: install the version that is installed now or a later one; or continue without the history and all leases:" >&2
        echo "gpush:   systemctl stop gpushd.socket gpushd-admin.socket gpushd.service; for end in '' -wal; do [ ! -e $database\$end ] || mv $database\$end $kept\$end; done" >&2
        echo "gpush: then install version @VERSION@ again, and release the GPUs that gpushd holds because it knows no leases:" >&2
        echo "gpush:   gpushctl recover --reason 'version @VERSION@ cannot read schema $schema'" >&2
        exit 1
    fi
fi
