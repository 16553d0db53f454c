//! Opens the store: finds the database, judges whether it can be trusted, and reports problems.
//!
//! ```text
//! directory ─► private? ─► file system suitable? ─► lock ─► reserve, watermark, marker ─► database?
//!   none, never used ───────────────────────────────► created          Note::Created
//!   none or empty, but used before ─────────────────► created          Note::Lost
//!   file, schema, seals or progress do not agree ───► set aside        Note::Lost
//!   sound, of another machine ──────────────────────► set aside        Note::OtherHost
//!   older schema ───────────────────────────────────► migrated         Note::Migrated
//!   newer schema ───────────────────────────────────► read-only        Note::NewerSchema
//!   cannot be read for another reason ──────────────► OpenError: left unchanged
//! ```
//!
//! If records were lost, the new database contains a record of that loss from its creation on. So
//! every start reports the loss again until an administrator accepts it. The module
//! [`provenance`](crate::provenance) compares the progress of the database with the progress that
//! is recorded outside it.

use std::{
    fs, io,
    path::Path,
    sync::{Arc, mpsc},
};

use jiff::Timestamp;
use rusqlite::{
    Connection, OpenFlags,
    config::DbConfig,
    functions::{Context, FunctionFlags},
};
use uuid::Uuid;

use crate::{
    engine::{Counters, Engine, EngineCondition},
    error::{OpenError, StoreError, from_sqlite},
    fact::{Fact, LAST_LEASE, LOST, Lost, MACHINE, STORE},
    files::Files,
    filesystem::{self, Verdict},
    head::Head,
    lock::Lock,
    note::{AccountOf, Clock, Note, Options},
    ownership,
    provenance::{Evidence, Identity, Provenance},
    quarantine, record,
    reserve::Reserve,
    schema,
    store::Store,
    tx::View,
    watermark::{Origin, ProgressFile, Recorded, Watermarks, boot_digest},
};

/// File name of the database in the state directory.
const DATABASE: &str = "gpush.db";

impl Store {
    /// Opens the store of a state directory. Creates the directory if necessary, and locks it for this process until
    /// the store is closed.
    ///
    /// # Errors
    /// The directory cannot be used, another gpushd holds its lock, or the database cannot be
    /// opened for a reason other than its content.
    pub fn open(directory: &Path, options: Options) -> Result<Opened, OpenError> {
        open_on(directory, options, None)
    }
}

/// The open store, and the notes that opening it returned.
#[derive(Debug)]
pub struct Opened {
    /// The store.
    pub store: Store,
    /// Notes for the log and for health. gpushd also acts on [`Note::Lost`] and [`Note::NewerSchema`].
    pub notes: Vec<Note>,
}

/// The result of the search for the database.
enum Found {
    Nothing,
    /// A trusted database, which now has the schema of this build. The number is the schema before
    /// the migration.
    Ours(Connection, Head, u32),
    Newer(Connection, Head, u32),
    /// A database that is not trusted, with the reason. `on_this_boot` says whether grants and operations of this boot
    /// may be lost. `sequence` is the last sequence number, if it could be read.
    Damaged {
        cause: String,
        on_this_boot: bool,
        sequence: Option<u64>,
    },
    /// A sound database from another machine.
    OtherHost,
}

/// Opens the store like [`Store::open`]. `magic` replaces the type number of the file system.
pub(crate) fn open_on(directory: &Path, options: Options, magic: Option<i64>) -> Result<Opened, OpenError> {
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |cause: io::Error| OpenError::Unusable { path, cause }
    };
    ownership::create_directory(directory)?;
    let mut notes = Vec::new();
    let magic = magic.map_or_else(|| filesystem::magic(directory), Ok).map_err(unusable(directory))?;
    match filesystem::judge(magic) {
        Verdict::Local => {}
        Verdict::Volatile(kind) => notes.push(Note::Volatile { directory: directory.to_owned(), kind }),
        Verdict::Opaque(kind) => notes.push(Note::Opaque { directory: directory.to_owned(), kind }),
        Verdict::Network(kind) => {
            return Err(OpenError::NetworkFilesystem { path: directory.to_owned(), kind });
        }
    }
    let lock = Lock::take(directory)?;
    let mut reserve = Reserve::open(directory, options.bounds.reserve)?;
    let (watermark, recorded) = ProgressFile::open(&directory.join("watermark"))?;
    let boot = boot_digest(&options.boot_id);
    let (marker, marked) = open_marker(options.marker.as_deref());
    let evidence = Evidence::new(recorded, marked, boot, options.machine_id.clone());
    let mark = evidence.highest_sequence();
    let clock: Clock = {
        let clock = Arc::clone(&options.clock);
        // The tables store milliseconds. Truncate the time, so that a record reads back unchanged.
        Arc::new(move || {
            let now = clock();
            Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now)
        })
    };
    let now = clock();
    let database = directory.join(DATABASE);

    let mut condition = EngineCondition::Fine;
    let mut sealed = true;
    let lost = |cause: String, kept, holds| Lost { at: now, boot_id: options.boot_id.clone(), cause, kept, holds };
    let set_aside = || quarantine::set_aside(&database, now).map_err(unusable(&database));
    let (connection, head) = match inspect(&database, &evidence, &options.boot_id)? {
        Found::Ours(connection, head, from) => {
            if from < schema::KNOWN {
                notes.push(Note::Migrated { from, to: schema::KNOWN });
            }
            (connection, head)
        }
        Found::Newer(connection, head, found) => {
            let known = schema::KNOWN;
            condition = EngineCondition::Refusing(StoreError::ReadOnly { file: database.clone(), found, known });
            sealed = false;
            notes.push(Note::NewerSchema { file: database.clone(), found, known });
            (connection, head)
        }
        Found::Nothing => {
            let cause = format!("{} was deleted", database.display());
            let used = evidence.of_an_earlier_database();
            let loss = used.then(|| lost(cause, None, evidence.used_on_this_boot()));
            if loss.is_none() {
                notes.push(Note::Created);
            }
            make(&database, &mut reserve, mark, now, loss.as_ref())?
        }
        Found::Damaged { cause, on_this_boot, sequence } => {
            let loss = lost(format!("{}: {cause}", database.display()), set_aside()?, on_this_boot);
            make(&database, &mut reserve, mark.max(sequence), now, Some(&loss))?
        }
        Found::OtherHost => {
            notes.push(Note::OtherHost { file: database.clone(), kept: set_aside()? });
            make(&database, &mut reserve, mark, now, None)?
        }
    };
    add_account_function(&connection, Arc::clone(&options.account_of))
        .map_err(|error| database_error(&database, &error))?;
    fs::File::open(directory).and_then(|opened| opened.sync_all()).map_err(unusable(directory))?;
    let origin = if sealed {
        identify(&connection, &mut reserve, boot, options.machine_id.as_deref())
            .map_err(|error| database_error(&database, &error))?
    } else {
        // A read-only store writes nothing, so this id is never stored.
        Origin { store: Uuid::nil(), boot }
    };
    let epoch = format!("{:08x}", origin.store.as_fields().0);
    let watermarks = Watermarks { watermark, marker, origin };
    if sealed {
        watermarks.set(head.sequence);
        watermarks.sync();
    }

    let view = View { connection: &connection, head: &head, now, sealed };
    // A newer gpushd may store a loss in another form, so do not read the loss from such a database.
    if let Some(loss) = if sealed { view.lost().map_err(|error| database_error(&database, &error))? } else { None } {
        notes.push(Note::Lost(loss));
    }
    if head.at > now {
        notes.push(Note::ClockBack { last: head.at, now });
    }
    let counters = Arc::new(Counters::default());
    if !reserve.restore() {
        notes.push(Note::NoReserve { directory: directory.to_owned() });
        counters.set_refusal(Some(StoreError::Full { path: directory.to_owned() }));
    }
    let instance = Uuid::new_v4().to_string();
    let engine = Engine {
        files: Files::of(directory, &database),
        connection,
        head,
        condition,
        sealed,
        watermarks,
        reserve,
        bounds: options.bounds,
        clock,
        instance: instance.clone(),
        boot_id: options.boot_id,
        counters: Arc::clone(&counters),
        commits_since_checkpoint: 0,
        commits_since_prune: 0,
        pruned: None,
        _lock: lock,
    };
    let (sender, jobs) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("store".to_owned())
        .spawn(move || engine.run(&jobs))
        .map_err(unusable(directory))?;
    Ok(Opened { store: Store::new(sender, thread, counters, directory.to_owned(), instance, epoch), notes })
}

/// Opens the marker. If that fails, gpushd still starts, but the next start can detect fewer losses.
fn open_marker(path: Option<&Path>) -> (Option<ProgressFile>, Recorded) {
    let Some(path) = path else { return (None, Recorded::Missing) };
    match ProgressFile::open_marker(path) {
        Ok((file, recorded)) => (Some(file), recorded),
        Err(error) => {
            let cause = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            tracing::warn!(
                path = %path.display(),
                "cannot use the marker file of the database: {error}{cause}; without this file, gpushd cannot distinguish an emptied state directory from a first start"
            );
            (None, Recorded::Missing)
        }
    }
}

/// Gives the database an id if it has none, and records the machine. Returns the origin.
fn identify(
    connection: &Connection,
    reserve: &mut Reserve,
    boot: u64,
    machine: Option<&str>,
) -> Result<Origin, StoreError> {
    let known = store_id(connection)?;
    let store = known.unwrap_or_else(Uuid::new_v4);
    let is_new_machine = machine.is_some() && fact(connection, MACHINE)?.as_deref() != machine;
    let write = || -> Result<(), StoreError> {
        if known.is_none() {
            record::put(connection, &Fact { name: STORE.to_owned(), value: store.to_string() })?;
        }
        if let Some(machine) = machine.filter(|_| is_new_machine) {
            record::put(connection, &Fact { name: MACHINE.to_owned(), value: machine.to_owned() })?;
        }
        Ok(())
    };
    let mut written = write();
    if matches!(written, Err(StoreError::Full { .. })) {
        reserve.release();
        written = write();
    }
    written.map(|()| Origin { store, boot })
}

fn fact(connection: &Connection, name: &str) -> Result<Option<String>, StoreError> {
    let facts = record::select::<Fact>(connection, "WHERE name = ?1", [name], true)?;
    Ok(facts.into_iter().next().map(|fact| fact.value))
}

fn store_id(connection: &Connection) -> Result<Option<Uuid>, StoreError> {
    let Some(text) = fact(connection, STORE)? else { return Ok(None) };
    let id = Uuid::parse_str(&text);
    id.map(Some).map_err(|error| StoreError::Corrupt { table: STORE.to_owned(), what: error.to_string() })
}

fn database_error(file: &Path, error: &StoreError) -> OpenError {
    if matches!(error, StoreError::Full { .. }) {
        return OpenError::Full { path: file.parent().unwrap_or(file).to_owned() };
    }
    OpenError::Database { file: file.to_owned(), cause: error.to_string() }
}

fn connect(file: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags).map_err(|error| from_sqlite(&error))?;
    // With exclusive access, SQLite needs no shared-memory file. Creating that file could fail on a full tmpfs.
    let settings = "PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY;
        PRAGMA cell_size_check = ON; PRAGMA trusted_schema = OFF; PRAGMA wal_autocheckpoint = 0;";
    connection.execute_batch(settings).map_err(|error| from_sqlite(&error))?;
    keep_log_at_close(&connection, true)?;
    Ok(connection)
}

/// Adds the SQL function `account(uid)`. For a uid, it returns the number of the account, and NULL if the account is not
/// known yet. Any other number is returned unchanged, as the number of an account. For anything but an integer, it
/// returns NULL.
fn add_account_function(connection: &Connection, account_of: AccountOf) -> Result<(), StoreError> {
    let account = move |context: &Context<'_>| {
        let uid: Option<i64> = context.get(0).ok();
        Ok(uid.and_then(|uid| u32::try_from(uid).map_or(Some(uid), |uid| account_of(uid))))
    };
    let added = connection.create_scalar_function("account", 1, FunctionFlags::SQLITE_UTF8, account);
    added.map_err(|error| from_sqlite(&error))
}

/// Sets whether closing the database keeps the write-ahead log. Until gpushd knows that the database is sound, reading
/// must not change the database, because gpushd may have to set the database aside.
fn keep_log_at_close(connection: &Connection, keep: bool) -> Result<(), StoreError> {
    let set = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, keep);
    set.map(|_| ()).map_err(|error| from_sqlite(&error))
}

fn inspect(file: &Path, evidence: &Evidence, boot_id: &str) -> Result<Found, OpenError> {
    // Check the owner and mode of these files too, because SQLite opens them by name.
    for companion in quarantine::COMPANIONS {
        ownership::check_existing(Path::new(&format!("{}{companion}", file.display())))?;
    }
    match ownership::open_file(file, false) {
        Ok(_) => {}
        Err(OpenError::Unusable { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
            return Ok(Found::Nothing);
        }
        Err(error) => return Err(error),
    }
    let damaged = |cause| Found::Damaged { cause, on_this_boot: evidence.used_on_this_boot(), sequence: None };
    match examine(file, evidence, boot_id) {
        Ok(found) => Ok(found),
        Err(StoreError::Corrupt { table, what }) => Ok(damaged(format!("{table}: {what}"))),
        // The SQL statement is valid, so damage in the file caused this error.
        Err(StoreError::Internal(what)) => Ok(damaged(what)),
        Err(error) => Err(database_error(file, &error)),
    }
}

fn examine(file: &Path, evidence: &Evidence, boot_id: &str) -> Result<Found, StoreError> {
    let damaged = |cause: &str| {
        Ok(Found::Damaged { cause: cause.to_owned(), on_this_boot: evidence.used_on_this_boot(), sequence: None })
    };
    let sqlite = |error: rusqlite::Error| from_sqlite(&error);
    let connection = connect(file)?;
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).map_err(sqlite)?;
    let version = schema::version(&connection)?;
    if version == 0 && tables == 0 {
        // An interrupted first start leaves an empty file.
        return if evidence.of_an_earlier_database() { damaged("it is empty") } else { Ok(Found::Nothing) };
    }
    let mode: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0)).map_err(sqlite)?;
    if mode != "wal" || connection.is_readonly("main").map_err(sqlite)? {
        return damaged("its header is not the one that gpushd wrote");
    }
    schema::check_file(&connection, version)?;
    if version > schema::KNOWN {
        connection.execute_batch("PRAGMA query_only = ON").map_err(sqlite)?;
        // This build may be unable to read the sequence number of a newer database. In that case, the store uses the
        // number from the watermark or the marker.
        let sequence = evidence.highest_sequence().unwrap_or(0);
        let head = Head { sequence, operation: 0, generation: 0, at: Timestamp::MIN };
        let head = head_of(&connection, false).unwrap_or(head);
        return Ok(Found::Newer(connection, head, version));
    }
    schema::check_tables(&connection, version)?;
    if version < schema::KNOWN {
        schema::migrate(&connection, schema::MIGRATIONS, version, |_| Ok(()))?;
    }
    let head = head_of(&connection, true)?;
    let view = View { connection: &connection, head: &head, now: Timestamp::MIN, sealed: true };
    view.check_records()?;
    view.unfinished()?;
    let identity = Identity {
        sequence: head.sequence,
        store: store_id(&connection)?,
        machine: fact(&connection, MACHINE)?,
        of_this_boot: view.last_boot()?.is_some_and(|boot| boot.boot_id == boot_id),
    };
    match evidence.judge(&identity) {
        Provenance::Current => {}
        Provenance::Lost { cause, on_this_boot } => {
            return Ok(Found::Damaged { cause, on_this_boot, sequence: Some(head.sequence) });
        }
        Provenance::OtherHost => return Ok(Found::OtherHost),
    }
    keep_log_at_close(&connection, false)?;
    if version < schema::KNOWN {
        schema::write_header(&connection)?;
    }
    Ok(Found::Ours(connection, head, version))
}

fn head_of(connection: &Connection, sealed: bool) -> Result<Head, StoreError> {
    let mut heads = record::select::<Head>(connection, "", [], sealed)?;
    match (heads.pop(), heads.is_empty()) {
        (Some(head), true) => Ok(head),
        (Some(_) | None, _) => {
            Err(StoreError::Corrupt { table: "head".to_owned(), what: "there is not exactly one row".to_owned() })
        }
    }
}

/// Creates a database where there is none, or only an empty one. Numbers continue after `mark`, so that no operation
/// number is used twice.
fn make(
    file: &Path,
    reserve: &mut Reserve,
    mark: Option<u64>,
    now: Timestamp,
    lost: Option<&Lost>,
) -> Result<(Connection, Head), OpenError> {
    if !reserve.is_reserved() {
        return Err(OpenError::Full { path: file.parent().unwrap_or(file).to_owned() });
    }
    // Create the file here. If SQLite created the file and its log, all users could read both files.
    ownership::open_file(file, true)?;
    let first = mark.map_or(0, |mark| mark + 1);
    let head = Head { sequence: first, operation: first, generation: first, at: now };
    let made = || -> Result<Connection, StoreError> {
        let connection = connect(file)?;
        connection.execute_batch("PRAGMA journal_mode = WAL").map_err(|error| from_sqlite(&error))?;
        schema::migrate(&connection, schema::MIGRATIONS, 0, |transaction| {
            record::put(transaction, &head)?;
            // Each lost lease took a sequence number, so no lost lease has a number higher than
            // `first`.
            record::put(transaction, &Fact { name: LAST_LEASE.to_owned(), value: first.to_string() })?;
            if let Some(lost) = lost {
                let value = serde_json::to_string(lost).map_err(|error| StoreError::Internal(error.to_string()))?;
                record::put(transaction, &Fact { name: LOST.to_owned(), value })?;
            }
            Ok(())
        })?;
        keep_log_at_close(&connection, false)?;
        Ok(connection)
    };
    let mut outcome = made();
    if matches!(outcome, Err(StoreError::Full { .. })) {
        reserve.release();
        outcome = made();
    }
    outcome.map(|connection| (connection, head)).map_err(|error| database_error(file, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_system_is_refused_before_any_write() {
        let scratch = tempfile::tempdir().unwrap();
        let error = open_on(scratch.path(), Options::default(), Some(0x6969)).unwrap_err();
        assert!(matches!(error, OpenError::NetworkFilesystem { kind: "NFS", .. }), "{error}");
        assert!(error.to_string().contains("--state-dir"), "{error}");
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }

    #[test]
    fn directory_in_memory_is_allowed_with_note() {
        let scratch = tempfile::tempdir().unwrap();
        let opened = open_on(scratch.path(), Options::default(), Some(0x0102_1994)).unwrap();
        assert!(opened.notes.contains(&Note::Volatile { directory: scratch.path().to_owned(), kind: "tmpfs" }));
        assert!(opened.notes.contains(&Note::Created));
    }
}
