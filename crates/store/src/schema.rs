//! The tables, the migration of older files, and the identification of a file.
//!
//! Migrations only go forward. Two things never change, so that any gpushd can identify a file:
//! `user_version` in SQLite's header, and the fact `schema` in the table `facts`. If these two
//! numbers differ, the file is damaged.

use rusqlite::Connection;

use crate::{
    error::{StoreError, from_sqlite},
    fact::Fact,
    record,
};

/// The application id in SQLite's header: `gpsh`.
pub(crate) const APPLICATION_ID: i32 = 0x6770_7368;

/// The migrations. Each one migrates a file from the previous schema; the first one creates the tables.
pub(crate) const MIGRATIONS: &[&str] = &[
    "
    CREATE TABLE facts (name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE head (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, operation INTEGER NOT NULL,
        generation INTEGER NOT NULL, at INTEGER NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE operations (number INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, kind TEXT NOT NULL,
        stage TEXT NOT NULL, actor TEXT NOT NULL, boot_id TEXT NOT NULL, instance TEXT NOT NULL,
        revision INTEGER NOT NULL, created_at INTEGER NOT NULL, ended_at INTEGER, reason TEXT NOT NULL,
        progress TEXT NOT NULL, notes TEXT NOT NULL, error TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE intents (operation INTEGER PRIMARY KEY, intent TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE undo (operation INTEGER NOT NULL, position INTEGER NOT NULL, what TEXT NOT NULL,
        undone INTEGER NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (operation, position)) WITHOUT ROWID;
    CREATE TABLE overrides (gpu TEXT NOT NULL PRIMARY KEY, rule TEXT NOT NULL, layout TEXT NOT NULL,
        author TEXT NOT NULL, reason TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
        generation INTEGER NOT NULL, sequence INTEGER NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE conditions (scope TEXT NOT NULL, kind TEXT NOT NULL, cause TEXT NOT NULL, reason TEXT NOT NULL,
        actor TEXT NOT NULL, since INTEGER NOT NULL, boot_id TEXT NOT NULL, sequence INTEGER NOT NULL,
        seal INTEGER NOT NULL, PRIMARY KEY (scope, kind, cause)) WITHOUT ROWID;
    CREATE TABLE answers (uid INTEGER NOT NULL, name TEXT NOT NULL, request TEXT NOT NULL, operation TEXT NOT NULL,
        status INTEGER NOT NULL, body TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
        sequence INTEGER NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (uid, name)) WITHOUT ROWID;
    CREATE TABLE audit (sequence INTEGER PRIMARY KEY, at INTEGER NOT NULL, actor TEXT NOT NULL,
        action TEXT NOT NULL, object TEXT NOT NULL, result TEXT NOT NULL, detail TEXT NOT NULL,
        seal INTEGER NOT NULL);
",
    "
    CREATE TABLE mps_shares (id INTEGER PRIMARY KEY, target TEXT NOT NULL, actor TEXT NOT NULL,
        settings TEXT NOT NULL, created_at INTEGER NOT NULL, process TEXT NOT NULL, expires_at INTEGER,
        boot_id TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE mps_targets (target TEXT NOT NULL PRIMARY KEY, stopped TEXT NOT NULL,
        settings TEXT NOT NULL, in_force TEXT NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE shared_gpus (gpu TEXT NOT NULL PRIMARY KEY, compute_mode TEXT NOT NULL, level TEXT NOT NULL,
        boot_id TEXT NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID;
",
    "
    CREATE TABLE leases (id INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, uid INTEGER NOT NULL,
        user TEXT NOT NULL, asked_by TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        request TEXT NOT NULL, members TEXT NOT NULL, binding TEXT NOT NULL, operation TEXT NOT NULL,
        created_at INTEGER NOT NULL, granted_at INTEGER, expires_at INTEGER, ended_at INTEGER,
        revocation TEXT NOT NULL, boot_id TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE INDEX open_leases ON leases (id) WHERE state <> 'ended';
    CREATE INDEX ended_leases ON leases (sequence) WHERE state = 'ended';
    CREATE INDEX ended_leases_of_user ON leases (uid, sequence) WHERE state = 'ended';
",
    "
    DROP TABLE mps_shares;
",
    "
    CREATE TABLE usage_checkpoint (part INTEGER PRIMARY KEY, content TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE lease_hours (number INTEGER PRIMARY KEY, hour INTEGER NOT NULL, owner TEXT NOT NULL,
        row TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE INDEX lease_hours_by_hour ON lease_hours (hour);
    CREATE TABLE gpu_hours (number INTEGER PRIMARY KEY, hour INTEGER NOT NULL, row TEXT NOT NULL,
        seal INTEGER NOT NULL);
    CREATE INDEX gpu_hours_by_hour ON gpu_hours (hour);
    CREATE TABLE unused_times (lease INTEGER NOT NULL, since INTEGER NOT NULL, until INTEGER NOT NULL,
        row TEXT NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (lease, since));
    CREATE INDEX unused_times_by_end ON unused_times (until);
    CREATE TABLE lease_totals (lease INTEGER PRIMARY KEY, ended INTEGER NOT NULL, row TEXT NOT NULL,
        seal INTEGER NOT NULL);
    CREATE INDEX lease_totals_by_end ON lease_totals (ended);
    CREATE TABLE request_days (day INTEGER NOT NULL, kind TEXT NOT NULL, profile TEXT NOT NULL, result TEXT NOT NULL,
        count INTEGER NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (day, kind, profile, result)) WITHOUT ROWID;
",
    "
    ALTER TABLE leases ADD COLUMN size INTEGER GENERATED ALWAYS AS (ifnull(length(CAST(user AS BLOB)), 0)
        + ifnull(length(CAST(asked_by AS BLOB)), 0) + ifnull(length(CAST(request AS BLOB)), 0)
        + ifnull(length(CAST(members AS BLOB)), 0) + ifnull(length(CAST(binding AS BLOB)), 0)
        + ifnull(length(CAST(revocation AS BLOB)), 0) + 200) VIRTUAL;
    ALTER TABLE leases ADD COLUMN job INTEGER GENERATED ALWAYS AS
        (CASE WHEN json_valid(binding) THEN json_extract(binding, '$.job') END) VIRTUAL;
    CREATE INDEX ended_leases_with_size ON leases (uid, sequence, size) WHERE state = 'ended';
    CREATE INDEX ended_leases_by_end ON leases (ended_at) WHERE state = 'ended';
    CREATE INDEX leases_of_job ON leases (job) WHERE job IS NOT NULL;
    CREATE TABLE lease_days (day INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, gpu TEXT NOT NULL,
        sums TEXT NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (day, owner, kind, gpu)) WITHOUT ROWID;
    CREATE TABLE gpu_days (day INTEGER NOT NULL, gpu TEXT NOT NULL, sums TEXT NOT NULL, seal INTEGER NOT NULL,
        PRIMARY KEY (day, gpu)) WITHOUT ROWID;
    CREATE TABLE gpu_models (gpu TEXT NOT NULL PRIMARY KEY, model TEXT NOT NULL, slices INTEGER NOT NULL,
        seal INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE closed_bills (month INTEGER NOT NULL, part INTEGER NOT NULL, content BLOB NOT NULL,
        seal INTEGER NOT NULL, PRIMARY KEY (month, part));
    CREATE TABLE bill_corrections (number INTEGER PRIMARY KEY, at INTEGER NOT NULL, row TEXT NOT NULL,
        seal INTEGER NOT NULL);
    CREATE INDEX bill_corrections_by_time ON bill_corrections (at);
",
    "
    CREATE TABLE lease_notices (lease INTEGER PRIMARY KEY, notice TEXT NOT NULL, seal INTEGER NOT NULL);
    CREATE TABLE lease_keeps (lease INTEGER PRIMARY KEY, keep TEXT NOT NULL, seal INTEGER NOT NULL);
",
    "
    CREATE TABLE owner_requests (day INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, sums TEXT NOT NULL,
        seal INTEGER NOT NULL, PRIMARY KEY (day, owner, kind)) WITHOUT ROWID;
",
];

/// Newest schema that this build supports.
pub const KNOWN: u32 = MIGRATIONS.len() as u32;

/// Returns the schema number in the file's header; 0 for an empty file.
pub(crate) fn version(connection: &Connection) -> Result<u32, StoreError> {
    let number: i64 = pragma(connection, "user_version")?;
    u32::try_from(number).map_err(|_| damaged(format!("its schema number is {number}")))
}

/// Migrates a file from schema `from` to the last of `migrations`. `also` runs in the same transaction.
pub(crate) fn migrate(
    connection: &Connection,
    migrations: &[&str],
    from: u32,
    also: impl FnOnce(&Connection) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let transaction = connection.unchecked_transaction().map_err(|error| from_sqlite(&error))?;
    for migration in migrations.iter().skip(from as usize) {
        transaction.execute_batch(migration).map_err(|error| from_sqlite(&error))?;
    }
    let to = migrations.len() as u32;
    record::put(&transaction, &Fact { name: "schema".to_owned(), value: to.to_string() })?;
    transaction.pragma_update(None, "user_version", to).map_err(|error| from_sqlite(&error))?;
    transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(|error| from_sqlite(&error))?;
    also(&transaction)?;
    transaction.commit().map_err(|error| from_sqlite(&error))
}

/// Writes the log into the database after a migration, so that the header of the file has the new schema number. The
/// install scripts of the packages read the number there. If the disk is full, the header gets the number at a later
/// checkpoint.
pub(crate) fn write_header(connection: &Connection) -> Result<(), StoreError> {
    let done = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    match done.map_err(|error| from_sqlite(&error)) {
        Err(StoreError::Full { .. }) => Ok(()),
        done => done,
    }
}

/// Checks the structure of a gpush database with schema `version`.
pub(crate) fn check_file(connection: &Connection, version: u32) -> Result<(), StoreError> {
    if pragma::<i64>(connection, "application_id")? != i64::from(APPLICATION_ID) {
        return Err(damaged("it is not a database of gpushd".to_owned()));
    }
    let mut statement = connection.prepare("PRAGMA integrity_check(3)").map_err(|error| from_sqlite(&error))?;
    let found = statement.query_map([], |row| row.get::<_, String>(0)).map_err(|error| from_sqlite(&error))?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|error| from_sqlite(&error))?;
    if found != ["ok"] {
        return Err(damaged(found.join("; ")));
    }
    let facts = record::select::<Fact>(connection, "WHERE name = 'schema'", [], true)?;
    match facts.as_slice() {
        [fact] if fact.value == version.to_string() => Ok(()),
        [] | [_, ..] => Err(damaged("its header and its content have different schema numbers".to_owned())),
    }
}

/// Checks that the tables are exactly those that the migrations up to `version` create.
pub(crate) fn check_tables(connection: &Connection, version: u32) -> Result<(), StoreError> {
    let fresh = Connection::open_in_memory().map_err(|error| from_sqlite(&error))?;
    for migration in MIGRATIONS.iter().take(version as usize) {
        fresh.execute_batch(migration).map_err(|error| from_sqlite(&error))?;
    }
    if tables(connection)? == tables(&fresh)? {
        Ok(())
    } else {
        Err(damaged("its tables do not match its schema version".to_owned()))
    }
}

fn tables(connection: &Connection) -> Result<Vec<[Option<String>; 4]>, StoreError> {
    let sql = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name";
    let mut statement = connection.prepare(sql).map_err(|error| from_sqlite(&error))?;
    let rows = statement
        .query_map([], |row| Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?]))
        .map_err(|error| from_sqlite(&error))?;
    // rusqlite returns various errors for invalid text. All of them mean damage.
    rows.collect::<Result<_, _>>().map_err(|error| damaged(error.to_string()))
}

fn pragma<T: rusqlite::types::FromSql>(connection: &Connection, name: &str) -> Result<T, StoreError> {
    connection.pragma_query_value(None, name, |row| row.get(0)).map_err(|error| from_sqlite(&error))
}

fn damaged(what: String) -> StoreError {
    StoreError::Corrupt { table: "the database".to_owned(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_migration_leaves_file_unchanged() {
        let connection = Connection::open_in_memory().unwrap();
        migrate(&connection, MIGRATIONS, 0, |_| Ok(())).unwrap();
        assert_eq!(version(&connection).unwrap(), KNOWN);
        check_file(&connection, KNOWN).unwrap();
        check_tables(&connection, KNOWN).unwrap();

        let later = [MIGRATIONS, &["ALTER TABLE audit ADD COLUMN host TEXT", "no SQL at all"]].concat();
        let error = migrate(&connection, &later, KNOWN, |_| Ok(())).unwrap_err();
        assert!(matches!(error, StoreError::Internal(_)), "{error}");
        // The migration step that succeeded is rolled back together with the step that failed.
        check_tables(&connection, KNOWN).unwrap();
        check_file(&connection, KNOWN).unwrap();

        migrate(&connection, &later[..later.len() - 1], KNOWN, |_| Ok(())).unwrap();
        check_file(&connection, KNOWN + 1).unwrap();
        assert!(check_tables(&connection, KNOWN).is_err());
    }
}
