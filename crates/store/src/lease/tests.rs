use gpush_api::{Actor, LeaseBinding, LeaseHolder, LeaseKind, LeaseRequest, LeaseState};
use jiff::Timestamp;
use rusqlite::Connection;

use super::{
    LeaseRecord,
    read::{ENDED, ENDED_OF_JOB, ENDED_OF_USER, GRANTED_AFTER, OPEN},
};
use crate::{record, schema};

fn lease(number: u64, state: LeaseState) -> LeaseRecord {
    let uid = 1000 + u32::try_from(number % 50).unwrap();
    LeaseRecord {
        id: gpush_api::LeaseId(number),
        sequence: number,
        holder: LeaseHolder { uid, user: None },
        asked_by: Actor { uid, user: None, pid: None },
        kind: LeaseKind::Mps,
        state,
        reason: None,
        request: LeaseRequest::default(),
        members: Vec::new(),
        binding: LeaseBinding::Time,
        operation: None,
        created_at: Timestamp::UNIX_EPOCH,
        granted_at: None,
        expires_at: None,
        ended_at: None,
        revocation: None,
        boot_id: "boot-1".to_owned(),
    }
}

/// Returns how SQLite executes a query, with the tables that it sorts or scans.
fn query_plan(connection: &Connection, rest: &str, parameters: usize) -> String {
    let sql = format!("EXPLAIN QUERY PLAN SELECT * FROM leases {rest}");
    let mut statement = connection.prepare(&sql).unwrap();
    let parameters = rusqlite::params_from_iter(vec![1_i64; parameters]);
    let rows = statement.query_map(parameters, |row| row.get::<_, String>(3)).unwrap();
    rows.map(Result::unwrap).collect::<Vec<_>>().join("; ")
}

#[test]
fn lease_queries_use_an_index_with_few_and_many_rows() {
    let connection = Connection::open_in_memory().unwrap();
    schema::migrate(&connection, schema::MIGRATIONS, 0, |_| Ok(())).unwrap();
    let plans = |connection: &Connection| {
        [(OPEN, 0), (ENDED_OF_USER, 3), (ENDED, 2), ("WHERE id = ?1", 1), (ENDED_OF_JOB, 3), (GRANTED_AFTER, 1)]
            .map(|(rest, parameters)| query_plan(connection, rest, parameters))
    };
    let empty = plans(&connection);
    assert_eq!(empty[0], "SCAN leases USING INDEX open_leases");
    assert!(empty[1].starts_with("SEARCH leases USING INDEX ended_leases_of_user (uid=? AND sequence<?)"), "{empty:?}");
    assert!(empty[2].starts_with("SEARCH leases USING INDEX ended_leases (sequence<?)"), "{empty:?}");
    assert!(empty[3].contains("INTEGER PRIMARY KEY"), "{empty:?}");
    assert!(empty[4].starts_with("SEARCH leases USING INDEX leases_of_job (job=?)"), "{empty:?}");
    assert_eq!(empty[5], "SEARCH leases USING INTEGER PRIMARY KEY (rowid>?)");
    // A job has few leases, so only they are sorted.
    assert!(empty[..4].iter().all(|plan| !plan.contains("TEMP B-TREE")), "{empty:?}");
    let transaction = connection.unchecked_transaction().unwrap();
    for number in 1..=10_000 {
        record::put(&connection, &lease(number, LeaseState::Ended)).unwrap();
    }
    for number in 10_001..=10_020 {
        record::put(&connection, &lease(number, LeaseState::Active)).unwrap();
    }
    transaction.commit().unwrap();
    connection.execute_batch("ANALYZE").unwrap();
    assert_eq!(plans(&connection), empty);
    let open = record::select::<LeaseRecord>(&connection, OPEN, [], true).unwrap();
    assert_eq!((open.len(), open[0].id.0), (20, 10_001));
}

#[test]
fn state_names_in_the_indexes_are_those_of_the_api() {
    let migrations = schema::MIGRATIONS.join("");
    for index in
        ["open_leases", "ended_leases_of_user", "ended_leases", "ended_leases_with_size", "ended_leases_by_end"]
    {
        assert!(migrations.contains(&format!("CREATE INDEX {index} ")), "{index}");
    }
    assert_eq!(migrations.matches(&format!("'{}'", LeaseState::Ended.name())).count(), 5);
}
