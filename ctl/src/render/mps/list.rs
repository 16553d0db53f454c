//! The table of MPS targets, and the lines for targets below their GPU.

use anstream::adapter::strip_str;
use gpush_api::{Gpu, Mode, MpsDaemon};
use gpush_core::layout::Layout;

use super::{
    NONE, bar_columns, current_user, displayed_argument, granted_bar, label, memory, notes, of_how_many, paint_words,
    remedy, state,
};
use crate::render::{
    Appearance,
    appearance::{NOTE, QUIET, pad, paint, width},
    listing::{Listing, widened},
    table::{Align, Narrow},
};

/// Text of an empty list.
const NOTHING: &str = "No GPU is shared through MPS. Use `mode = \"mps\"` in a rule of the config for whole GPUs, or layout entries \
     such as `2g.20gb:mps` for MIG devices. `gpushctl config show` shows the rules.";

/// Lists the targets of `gpushctl mps list`.
pub(crate) fn list(daemons: &[MpsDaemon], rules: &[String], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [
        ("TARGET", Left),
        ("STATE", Left),
        ("CLIENTS", Right),
        ("MAX CLIENTS", Right),
        ("LEASES", Left),
        ("LEASED", Right),
        ("MAX LEASED", Right),
        ("USER", Left),
        ("PERCENT", Right),
        ("MEMORY", Right),
        ("PID", Right),
    ];
    // For a program, each cell has one value, and there is no bar.
    let is_shown = |name: &str| match name {
        "MAX CLIENTS" | "MAX LEASED" => look.exact,
        "LEASES" => !look.exact,
        _ => true,
    };
    let row = |daemon: &MpsDaemon| {
        let (word, style) = state(daemon.state);
        let in_force = daemon.in_force.as_ref();
        let (bar, mut figures) = granted_bar(daemon, bar_columns(look), look);
        let mut clients = of_how_many(daemon);
        if look.exact {
            clients = if daemon.clients_known { daemon.clients.len().to_string() } else { NONE.to_owned() };
            figures = daemon.granted_percent.to_string();
        }
        let row = [
            displayed_argument(daemon, look),
            paint_words(style, word),
            clients,
            daemon.wanted.max_clients.to_string(),
            bar,
            figures,
            daemon.wanted.total_percentage.to_string(),
            current_user(daemon, look)
                .map_or_else(|| NONE.to_owned(), |user| look.fit(&user, if look.width < 100 { 12 } else { 16 })),
            in_force.map_or_else(|| NONE.to_owned(), |settings| settings.percentage.to_string()),
            in_force.map_or_else(|| NONE.to_owned(), |settings| memory(settings.memory_limit_mib)),
            daemon.pid.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
        ];
        columns.iter().zip(row).filter(|((name, _), _)| is_shown(name)).map(|(_, cell)| cell).collect::<Vec<_>>()
    };
    let shown: Vec<_> = columns.iter().copied().filter(|(name, _)| is_shown(name)).collect();
    let narrow = Narrow::spare(&["PID", "MEMORY", "PERCENT", "LEASES"]);
    let mut out = String::new();
    for daemon in daemons {
        for line in notes(daemon, &format!("! {}: ", label(daemon, look)), look) {
            out += &(line + "\n");
        }
    }
    for line in remedies(daemons, look) {
        out += &(line + "\n");
    }
    let (columns, rows) = widened(
        &shown,
        daemons.iter().map(row).collect(),
        daemons,
        &[("SHORT NAME", &|one| look.clean(&one.target)), ("UUID", &|one| look.clean(one.uuid.as_str()))],
        look,
    );
    Listing::new(&columns, rows, narrow, look)
        .names(daemons.iter().map(|daemon| displayed_argument(daemon, look)))
        .uuids(daemons.iter().map(|daemon| daemon.uuid.clone()))
        .after(&out)
        .or_empty(&look.wrap("", &nothing(rules)).join("\n"))
}

/// Returns the commands with which the user can solve the problems of these daemons.
pub(crate) fn remedies<'a>(daemons: impl IntoIterator<Item = &'a MpsDaemon>, look: &Appearance) -> Vec<String> {
    let text = |daemon| Some(format!("{}: {}", label(daemon, look), remedy(daemon, look)?));
    let texts = daemons.into_iter().filter_map(text);
    texts.flat_map(|text| look.wrap("", &text)).map(|line| paint(NOTE, &line)).collect()
}

/// Returns a text that explains why no target is shared through MPS.
fn nothing(rules: &[String]) -> String {
    match rules {
        [] => NOTHING.to_owned(),
        rules => format!(
            "No GPU is shared through MPS yet, but the config has rules of mode `mps`: {}. `gpushctl apply \
            --dry-run` \
             shows what they change; `gpushctl config show` shows which GPUs they claim.",
            rules.join(", ")
        ),
    }
}

/// Returns whether a GPU uses MPS. If no GPU does, gpushctl does not request the daemons.
pub(crate) fn concerns(gpu: &Gpu) -> bool {
    gpu.mode == Mode::Mps || gpu.layout.as_deref().is_some_and(Layout::shares_devices)
}

/// Returns the daemons of a GPU, first the one of the whole GPU.
pub(crate) fn of<'a>(gpu: &Gpu, daemons: &'a [MpsDaemon]) -> Vec<&'a MpsDaemon> {
    let mut its: Vec<&MpsDaemon> = daemons.iter().filter(|daemon| daemon.gpu == Some(gpu.index)).collect();
    its.sort_by_key(|daemon| daemon.device.is_some());
    its
}

fn place(daemon: &MpsDaemon, look: &Appearance) -> String {
    match &daemon.device {
        Some(device) => format!("MPS {}", look.clean(device)),
        None => "MPS".to_owned(),
    }
}

/// Draws only the notes of each daemon.
pub(crate) fn notes_below(daemons: &[&MpsDaemon], indent: usize, look: &Appearance) -> Vec<String> {
    let margin = " ".repeat(indent);
    daemons.iter().flat_map(|daemon| notes(daemon, &format!("{margin}! {}: ", place(daemon, look)), look)).collect()
}

/// Draws a line for each daemon, with its notes.
pub(crate) fn below(daemons: &[&MpsDaemon], indent: usize, look: &Appearance) -> Vec<String> {
    let margin = " ".repeat(indent);
    let place = |daemon: &MpsDaemon| place(daemon, look);
    let at = daemons.iter().map(|daemon| width(&place(daemon))).max().unwrap_or(0);
    let words = daemons.iter().map(|daemon| width(state(daemon.state).0)).max().unwrap_or(0);
    let mut out = Vec::new();
    for daemon in daemons {
        let notes = notes(daemon, &format!("{margin}! {}: ", place(daemon)), look);
        let (word, style) = state(daemon.state);
        let clients = format!("{} clients", of_how_many(daemon));
        let user = current_user(daemon, look).map_or_else(String::new, |user| format!("  {user}"));
        let (bar, figures) = granted_bar(daemon, bar_columns(look), look);
        let line = |bar: &str, leased: &str, user: &str| {
            let line = format!(
                "{margin}{}  {}  {}  {bar}{figures:>8}{leased}{user}",
                paint(QUIET, &pad(&place(daemon), at)),
                paint(style, &pad(word, words)),
                pad(&clients, "48/48 clients".len()),
            );
            line.trim_end().to_owned()
        };
        let (bar, user) = (bar + " ", look.fit(&user, 18));
        // If the line is too wide, leave out the word, then the user, and then the bar. `mps list` shows all of them.
        let lines = [line(&bar, " leased", &user), line(&bar, "", &user), line(&bar, "", ""), line("", "", "")];
        let fits = |line: &&String| !look.wraps || width(&strip_str(line).to_string()) <= look.width;
        let fitting = lines.iter().find(fits).unwrap_or(&lines[3]);
        out.push(fitting.clone());
        out.extend(notes);
    }
    out
}

/// Returns a sentence for `gpu show` with the commands that show more about these daemons.
pub(crate) fn more(daemons: &[&MpsDaemon], look: &Appearance) -> String {
    let commands: Vec<String> =
        daemons.iter().map(|daemon| format!("`gpushctl mps show {}`", displayed_argument(daemon, look))).collect();
    look.wrap("  ", &format!("more: {}", commands.join(", "))).join("\n") + "\n"
}
