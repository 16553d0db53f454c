//! The clients of MPS daemons.

use gpush_api::{MpsClient, MpsDaemon};

use super::{NONE, displayed_argument, label, user};
use crate::render::{
    Appearance,
    appearance::{QUIET, count, paint},
    listing::{Listing, WideColumn, widened},
    process_names,
    table::{Align, Narrow, fitted},
};

const COLUMNS: [(&str, Align); 6] = [
    ("TARGET", Align::Left),
    ("PID", Align::Right),
    ("USER", Align::Left),
    ("LEASE", Align::Left),
    ("SERVER", Align::Right),
    ("COMMAND", Align::Left),
];

/// Maximum width of a command line in a table on a terminal.
const COMMAND: usize = 60;

/// Lists the MPS clients for `gpushctl mps clients`.
pub(crate) fn all(daemons: &[MpsDaemon], look: &Appearance) -> Listing {
    let none = if daemons.iter().all(|daemon| daemon.clients.is_empty()) {
        let of = match daemons {
            [one] => format!("{} has", label(one, look)),
            [] => "No GPU is shared through MPS, so there is".to_owned(),
            [..] => format!("{} have", count(daemons.len(), "target")),
        };
        format!("{of} no MPS client.")
    } else {
        String::new()
    };
    let (columns, rows) = rows(daemons, 0, look);
    let pids = daemons.iter().flat_map(|daemon| &daemon.clients).filter_map(|client| Some(client.pid?.to_string()));
    let headings = columns.iter().map(|(name, _)| *name).collect();
    let listing = Listing::of(headings, rows).names(pids);
    listing.drawn(table(daemons, daemons.len() > 1, 0, look)).or_empty(&none)
}

/// Draws a table of the clients of daemons. `with_target` adds a column with the targets.
pub(super) fn table(daemons: &[MpsDaemon], with_target: bool, indent: usize, look: &Appearance) -> String {
    let (columns, rows) = rows(daemons, usize::from(!with_target), look);
    fitted(&columns, rows, Narrow::spare(&["SERVER"]).prose(), indent, look)
}

/// Returns the columns and the rows of a table of clients. Leaves out the first `from` columns.
fn rows(daemons: &[MpsDaemon], from: usize, look: &Appearance) -> (Vec<(&'static str, Align)>, Vec<Vec<String>>) {
    let clients: Vec<(&MpsDaemon, &MpsClient)> =
        daemons.iter().flat_map(|daemon| daemon.clients.iter().map(move |client| (daemon, client))).collect();
    let cells =
        clients.iter().map(|(daemon, client)| row(client, &displayed_argument(daemon, look), look)[from..].to_vec());
    let uid =
        |(_, client): &(&MpsDaemon, &MpsClient)| client.uid.map_or_else(|| NONE.to_owned(), |uid| uid.to_string());
    let more: [WideColumn<'_, _>; 2] =
        [("UID", &uid), ("TARGET UUID", &|(daemon, _)| look.clean(daemon.uuid.as_str()))];
    widened(&COLUMNS[from..], cells.collect(), &clients, &more, look)
}

fn row(client: &MpsClient, target: &str, look: &Appearance) -> [String; 6] {
    let user = user(client.user.as_ref(), client.uid, look);
    // If the user is not permitted to see the client, show only that the client belongs to another
    // user.
    let command = match (&client.command, client.pid) {
        (Some(command), _) => look.fit(&look.clean(command), COMMAND),
        (None, None) if user.is_none() => process_names::ANOTHER.to_owned(),
        (None, _) => NONE.to_owned(),
    };
    // If the user is not permitted to see the client, its lease is not known.
    let lease = match &client.lease {
        Some(lease) if client.unattributed => format!("perhaps {}", look.clean(lease)),
        Some(lease) => look.clean(lease),
        None if user.is_none() && client.pid.is_none() => NONE.to_owned(),
        None => "none".to_owned(),
    };
    [
        target.to_owned(),
        client.pid.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
        user.unwrap_or_else(|| NONE.to_owned()),
        lease,
        client.server.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
        command,
    ]
}

/// Returns the clients in one line: `alice 4123, bob 991, another user`.
pub(crate) fn names(clients: &[MpsClient], look: &Appearance) -> String {
    let name = |client: &MpsClient| match (user(client.user.as_ref(), client.uid, look), client.pid) {
        (Some(user), Some(pid)) => Some(format!("{user} {pid}")),
        (Some(user), None) => Some(user),
        (None, Some(pid)) => Some(format!("pid {pid}")),
        (None, None) if client.unidentified => Some(process_names::UNIDENTIFIED.to_owned()),
        (None, None) => None,
    };
    let mut names: Vec<String> = clients.iter().filter_map(name).collect();
    let known = names.len();
    names.truncate(SHOWN);
    if known > SHOWN {
        names.push(format!("{} more", known - SHOWN));
    }
    if known < clients.len() {
        names.push("another user".to_owned());
    }
    names.join(", ")
}

/// Maximum number of clients that a line names.
const SHOWN: usize = 4;

/// Returns the line that is printed if there are no clients.
pub(super) fn no_clients() -> String {
    paint(QUIET, "  none") + "\n"
}
