//! The help page: keys, columns, and the meaning of the figures.

use crate::{
    commands::top::order::SortBy,
    render::{
        Appearance,
        appearance::{STRONG, pad, paint},
    },
};

/// The keys of the list, and what they do.
pub(in super::super) const KEYS: [(&str, &str); 13] = [
    ("q, Esc", "quit; Esc first removes the filter"),
    ("h, ?", "show this page"),
    ("Up, Down", "select a row; also PgUp, PgDn, Home, End"),
    ("Left, Right", "hide or show the rows below"),
    ("Enter", "show details and history"),
    ("t", "show only leases, or the tree"),
    ("o", "sort; then type a letter"),
    ("/", "show only rows with a text"),
    ("r", "renew the selected lease"),
    ("x", "release the selected lease; administrators revoke"),
    ("u", "read everything again now"),
    ("Ctrl-Z", "suspend; `fg` continues"),
    ("Ctrl-C", "quit"),
];

/// What the columns mean.
const COLUMNS: [(&str, &str); 7] = [
    ("NAME", "! marks a process without the lease that it needs; ? one that perhaps belongs to the lease above"),
    (
        "DEVICE",
        "slices of a GPU with MIG: each mark begins an instance, and each column is a memory slice. \
         For a lease: its device or share.",
    ),
    (
        "ACT",
        "active streaming multiprocessors in the last second or, if the GPU does not report them, the time in which a \
         kernel ran. ~ marks an estimate. An arrow means that this row has no figure of its own: see the row above.",
    ),
    ("MEMORY", "used and total memory in GiB; for a lease, the memory of its processes and its share"),
    ("POWER", "power and power limit of the board. A yellow figure means: something limits the clocks."),
    (
        "USE",
        "what a lease does. idle: its processes do no work. idle?: the same, but not certain. empty: it has no process. \
         ?: gpushd does not know. The details show the reason.",
    ),
    ("HISTORY", "past activity. With MIG, the past power (W), because the GPU itself reports no activity."),
];

/// Draws the help page.
pub(in super::super) fn lines(look: &Appearance) -> Vec<String> {
    let mut out = vec![paint(STRONG, "Keys")];
    out.extend(KEYS.iter().flat_map(|(keys, what)| look.wrap(&format!("  {}", pad(keys, 13)), what)));
    let orders: Vec<String> = SortBy::ALL.iter().map(|by| format!("{} {}", by.letter(), by.name())).collect();
    out.extend([String::new(), paint(STRONG, "Letters after `o`")]);
    out.extend(look.wrap("  ", &orders.join(", ")));
    out.extend([String::new(), paint(STRONG, "Columns")]);
    out.extend(COLUMNS.iter().flat_map(|(name, what)| look.wrap(&format!("  {}", pad(name, 13)), what)));
    out.push(String::new());
    let note = "A figure that is not known is -, never 0. gpushd samples the GPUs once a second while a top is open. \
                Processes and GPUs are read every 5 seconds.";
    out.extend(look.wrap("", note));
    out
}
