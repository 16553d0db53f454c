//! Cost of a change that needs no driver call: gpushd writes the change to disk before it answers.

use std::path::Path;

use gpush_tests::{agent::Agent, host::Host};
use rusqlite::Connection;

use crate::{
    bare,
    client::Client,
    report::{Report, median},
};

/// Number of changes of each kind.
const CHANGES: usize = 500;

const CORDON: &str = "/v1/gpus/0/cordon";

/// The tables that a change without a driver call writes: one row about its object, one row of the
/// audit trail, and the head of the journal.
const TABLES: [&str; 3] = ["conditions", "audit", "head"];

/// Opens an SQLite database with the tables [`TABLES`] and durable commits.
fn plain(file: &Path) -> Connection {
    let database = Connection::open(file).expect("a database");
    database.pragma_update(None, "journal_mode", "WAL").expect("a log");
    database.pragma_update(None, "synchronous", "FULL").expect("it is synced");
    for table in TABLES {
        let create = format!("CREATE TABLE {table} (number INTEGER PRIMARY KEY, what TEXT NOT NULL)");
        database.execute(&create, ()).expect("a table");
    }
    database
}

/// Alternately measures changes by gpushd, and plain commits of the same size.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    let agent = Agent::start_public(&host, "");
    let mut ours = Client::connect(agent.socket()).expect("a connection");
    let socket = host.scratch("static.sock");
    let (_, answer, _) = ours.ask("POST", CORDON, "{}").expect("an answer");
    let _server = bare::server(&socket, answer.len());
    let database = plain(&host.scratch("plain.db"));
    let text = "x".repeat(150);
    let commit = || {
        let begun = std::time::Instant::now();
        let transaction = database.unchecked_transaction().expect("a transaction");
        for table in TABLES {
            let insert = format!("INSERT INTO {table} (what) VALUES (?1)");
            transaction.prepare_cached(&insert).and_then(|mut insert| insert.execute([&text])).expect("a row");
        }
        transaction.commit().expect("a commit");
        begun.elapsed().as_secs_f64()
    };
    let mut bare = Client::connect(&socket).expect("a connection");
    let (mut commits, mut trips, mut cordons) = (vec![], vec![], vec![]);
    for at in 0..CHANGES {
        commits.push(commit());
        let reason = format!("{{\"reason\": \"bench {at}\"}}");
        trips.push(bare.timed("POST", "/", &reason, 200));
        cordons.push(ours.timed("POST", CORDON, &reason, 200));
    }
    let (commit, trip, cordon) = (median(commits), median(trips), median(cordons));
    let ratio = cordon / (commit + trip);
    let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let mut report = Report::new(
        "A durable change",
        &format!(
            "`POST {CORDON}` needs no driver call, and gpushd writes the change to disk before it answers. Three \
             measurements alternate. `cordon` is this request. `plain commit` is a commit of the same number of rows \
             to a plain SQLite database on the same file system (WAL, synchronous FULL). `plain request` is a request \
             that changes nothing and has an answer of the same size. `both` is the sum of `plain commit` and `plain \
             request`. The table shows medians of {CHANGES} runs."
        ),
        &["", "ms", "ratio"],
    );
    report.rows.push(vec!["plain commit".into(), ms(commit), String::new()]);
    report.rows.push(vec!["plain request".into(), ms(trip), String::new()]);
    report.rows.push(vec!["both".into(), ms(commit + trip), "1".into()]);
    report.rows.push(vec!["cordon".into(), ms(cordon), format!("{ratio:.1}")]);
    report.target("a durable change, p50", "at most 2 times both", &format!("{ratio:.1} times"), ratio <= 2.0);
    report
}
