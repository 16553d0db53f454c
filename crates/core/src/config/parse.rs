//! Parses the bytes of a config: UTF-8, then TOML, then the settings. The module `rules` parses the
//! rules.

use std::{ops::Range, time::Duration};

use gpush_api::UnleasedPolicy;
use toml::de::DeTable;

use super::{
    Access, Api, Config, Driver, Health, Log, LogLevel, MOST_BYTES, bounded_syntax, history, idle,
    layouts::{entries, layout_texts},
    leasing, limits, metrics, mode_change, mps, notify, prices, processes, quotas,
    reader::{Reader, Text, Value, get},
    rules,
    schema::{
        ACCESS, API, DEFAULTS, DRIVER, HEALTH, HISTORY, IDLE, IDLE_EXEMPT, LAYOUTS, LEASES, LIMITS, LOG, METRICS,
        MODE_CHANGE, MPS, NOTIFY, PROCESSES, SECTIONS, SLURM, Section, TOP,
    },
    slurm, syntax_error,
};
use crate::{
    diagnostic::{self, Document, FileErrors as ConfigErrors, Problem},
    layout::{self, Layout},
    quote::Quoted,
};

pub(super) fn bytes(bytes: &[u8], path: &str) -> Result<Config, ConfigErrors> {
    if bytes.len() > MOST_BYTES {
        let problem = Problem::new(
            0..0,
            format!("the file has {} bytes", bytes.len()),
            format!("the limit is {MOST_BYTES} bytes: check that this file is the config of gpushd"),
        );
        return Err(ConfigErrors::new(Document::Config, path, "", vec![problem]));
    }
    let text = diagnostic::text(bytes)
        .map_err(|(lossy, problem)| ConfigErrors::new(Document::Config, path, &lossy, vec![problem]))?;
    let readable = bounded_syntax::readable(text);
    let (table, errors) = DeTable::parse_recoverable(readable);
    if !errors.is_empty() {
        let problems = syntax_error::problems(text, &table, &errors);
        return Err(ConfigErrors::new(Document::Config, path, text, problems));
    }
    let mut reader = Reader::new(text);
    let config = settings(&mut reader, table.get_ref());
    if reader.problems.is_empty() {
        Ok(config)
    } else {
        Err(ConfigErrors::new(Document::Config, path, text, reader.problems))
    }
}

fn settings(reader: &mut Reader<'_>, top: &DeTable<'_>) -> Config {
    let tables: Vec<&str> =
        SECTIONS.iter().map(Section::table).filter(|name| !name.is_empty() && !name.contains('.')).collect();
    reader.report_unknown_keys(top, TOP, &tables);
    let mut config = Config::default();
    if let Some(flag) = reader.flag(top, "auto_reconcile") {
        config.auto_reconcile = flag;
    }
    config.enforce = reader.flag(top, "enforce").unwrap_or_default();
    if let Some(table) = reader.table(top, LOG) {
        reader.report_unknown_keys(table, LOG, &[]);
        config.log = log(reader, table);
    }
    if let Some(table) = reader.table(top, DRIVER) {
        reader.report_unknown_keys(table, DRIVER, &[]);
        config.driver = driver(reader, table);
    }
    if let Some(table) = reader.table(top, API) {
        reader.report_unknown_keys(table, API, &[]);
        config.api = api(reader, table);
    }
    if let Some(table) = reader.table(top, ACCESS) {
        reader.report_unknown_keys(table, ACCESS, &[]);
        config.access = access(reader, table);
    }
    if let Some(table) = reader.table(top, LIMITS) {
        reader.report_unknown_keys(table, LIMITS, &[]);
        config.limits = limits::read(reader, table);
    }
    if let Some(table) = reader.table(top, HEALTH) {
        reader.report_unknown_keys(table, HEALTH, &[]);
        config.health = health(reader, table);
    }
    if let Some(table) = reader.table(top, MODE_CHANGE) {
        reader.report_unknown_keys(table, MODE_CHANGE, &[]);
        config.mode_change = mode_change::read(reader, table);
    }
    if let Some(table) = reader.table(top, MPS) {
        reader.report_unknown_keys(table, MPS, &[]);
        config.mps = mps::read(reader, table);
    }
    let processes_table = reader.table(top, PROCESSES);
    if let Some(table) = processes_table {
        reader.report_unknown_keys(table, PROCESSES, &[]);
        config.processes = processes::read(reader, table);
    }
    if config.enforce && processes_table.is_none_or(|table| get(table, "unleased").is_none()) {
        config.processes.unleased = UnleasedPolicy::End;
    }
    if let Some(table) = reader.table(top, LEASES) {
        reader.report_unknown_keys(table, LEASES, &[]);
        config.leases = quotas::leases(reader, table);
    }
    if let Some(table) = reader.table(top, HISTORY) {
        reader.report_unknown_keys(table, HISTORY, &[]);
        config.history = history::read(reader, table);
    }
    if let Some(table) = reader.table(top, METRICS) {
        reader.report_unknown_keys(table, METRICS, &[]);
        config.metrics = metrics::read(reader, table);
    }
    if let Some(table) = reader.table(top, NOTIFY) {
        reader.report_unknown_keys(table, NOTIFY, &[]);
        config.notify = notify::read(reader, table);
    }
    let idle_table = reader.table(top, IDLE);
    if let Some(table) = idle_table {
        reader.report_unknown_keys(table, IDLE, &[IDLE_EXEMPT.key()]);
        config.idle = idle::read(reader, table);
    }
    if let Some(table) = reader.table(top, SLURM) {
        reader.report_unknown_keys(table, SLURM, &[]);
        config.slurm = slurm::read(reader, table);
    }
    config.quotas = quotas::read(reader, top);
    config.prices = prices::read(reader, top);
    // The list of names includes layouts with an error, so that a rule that uses such a layout gets
    // no second error.
    let mut names = Vec::new();
    if let Some(table) = reader.table(top, LAYOUTS) {
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            if layout_name(reader, name, key.span()) {
                names.push(name.to_owned());
                if let Some(layout) = named_layout(reader, name, value) {
                    config.layouts.insert(name.to_owned(), layout);
                }
            }
        }
    }
    if let Some(table) = reader.table(top, DEFAULTS) {
        reader.report_unknown_keys(table, DEFAULTS, &[]);
        config.defaults = leasing::keys(reader, table);
    }
    let defaults = if config.enforce { config.defaults.or_enforced() } else { config.defaults };
    config.rules = rules::read(reader, top, &names, &defaults);
    if let Some(table) = idle_table {
        idle::check_exempt_rules(reader, table, &config.rules);
    }
    config
}

fn log(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Log {
    let known = LogLevel::ALL.map(|level| (level.name(), level));
    Log { level: reader.choice(table, "level", "log level", &known).unwrap_or_default() }
}

fn driver(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Driver {
    let default = Driver::default();
    let example = format!("\"{}\"", default.library);
    let library = reader.word_or(table, "library", &example, |_| None).and_then(|text| {
        if text.value.contains('/') && !text.value.starts_with('/') {
            reader.report(Problem::new(
                text.span.clone(),
                format!("`library` is a relative path: {}", Quoted(&text.value)),
                "write an absolute path, or a bare name such as \"libnvidia-ml.so.1\" that the dynamic linker finds",
            ));
            return None;
        }
        Some(text.value)
    });
    Driver { library: library.unwrap_or(default.library) }
}

fn api(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Api {
    Api { admin_socket: admin_socket(reader, table) }
}

fn admin_socket(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<String> {
    let example = "\"/run/gpush/admin.sock\"";
    let text = reader.word_or(table, "admin_socket", example, |_| None)?;
    if text.value.starts_with('/') {
        return Some(text.value);
    }
    let problem = format!("`admin_socket` is a relative path: {}", Quoted(&text.value));
    reader.report(Problem::new(text.span, problem, format!("write an absolute path, such as {example}")));
    None
}

fn access(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Access {
    let groups = reader.words(table, "admin_groups", "[\"gpuadmin\"]").unwrap_or_default();
    let mut seen: Vec<(String, Range<usize>)> = Vec::new();
    for text in groups {
        let span = text.span.clone();
        let Some(group) = group(reader, text) else { continue };
        match seen.iter().find(|(other, _)| *other == group) {
            Some((_, first)) => {
                let problem = Problem::new(span, format!("group {} is listed twice", Quoted(&group)), "keep one");
                reader.report(problem.also(first.clone(), "the first is"));
            }
            None => seen.push((group, span)),
        }
    }
    Access { admin_groups: seen.into_iter().map(|(group, _)| group).collect() }
}

/// Longest interval between two health checks of a GPU.
const DAY: Duration = Duration::from_secs(86_400);

fn health(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Health {
    let default = Health::default();
    let cordon_xids = reader.numbers(table, "cordon_xids", 1..=9999, "[79, 95]").map(|mut xids| {
        xids.sort_unstable();
        xids.dedup();
        xids
    });
    Health {
        cordon_xids: cordon_xids.unwrap_or(default.cordon_xids),
        poll: reader.duration(table, "poll", Duration::ZERO..=DAY, default.poll),
    }
}

fn group(reader: &mut Reader<'_>, text: Text) -> Option<String> {
    if text.value.chars().any(|c| c.is_whitespace() || matches!(c, ':' | ',' | '/')) {
        reader.report(Problem::new(
            text.span,
            format!("{} is not the name of a group", Quoted(&text.value)),
            "write the name of one group, such as \"gpuadmin\"",
        ));
        return None;
    }
    Some(text.value)
}

fn layout_name(reader: &mut Reader<'_>, name: &str, span: Range<usize>) -> bool {
    let reserved = [layout::NONE, layout::DYNAMIC].into_iter().find(|word| name.eq_ignore_ascii_case(word));
    let problem = if let Some(word) = reserved {
        Problem::new(span, format!("the layout name `{word}` is reserved"), "give the layout another name")
    } else if layout::is_name(name) {
        return true;
    } else {
        Problem::new(
            span,
            format!("{} can't be the name of a layout", Quoted(name)),
            "a name begins with a letter, and contains at most 64 letters, digits, - and _",
        )
    };
    reader.report(problem);
    false
}

fn named_layout(reader: &mut Reader<'_>, name: &str, value: Value<'_, '_>) -> Option<Layout> {
    let texts = layout_texts(reader, name, value)?;
    let layout = entries(reader, &texts, value)?;
    if layout.is_none() {
        reader.report(Problem::new(
            value.span(),
            format!("layout `{name}` has no instances, like the reserved layout `none`"),
            "remove this layout, and write layout = \"none\" in the rule",
        ));
    }
    Some(layout)
}
