//! Test of the JSON section of `docs/exit-codes.md`, which is generated from [`PRINTED`] and from samples of the documents.
//!
//! `tests/tests/cli/json.rs` runs commands, and compares what they print with this section.

use std::fmt::Write as _;

use serde_json::Value;

use super::documents::samples;
use crate::args;

/// If this environment variable is set, the test writes the section instead of comparing it.
const WRITE: &str = "GPUSH_WRITE_CLI";

/// The lines of the page before and after the section.
const BOUNDS: [&str; 2] = ["<!-- documents: generated -->", "<!-- end of documents -->"];

/// What a command prints with `--json` when it succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Printed {
    /// A type of the API.
    One(&'static str),
    /// A list of a type of the API.
    List(&'static str),
    /// A type of the API, and `changed`.
    Change(&'static str),
    /// A type of the API, or another one if nothing had to be changed; and `changed`.
    Operation,
    /// A list of a type of the API in this field, and `changed`.
    ChangeOf(&'static str, &'static str),
    /// An object that gpushctl composes. [`samples`] has a sample with this name.
    Own(&'static str),
    /// Something else, explained in words.
    Text(&'static str),
}

/// What each visible command prints.
const PRINTED: &[(&str, Printed)] = &[
    ("status", Printed::Own("status")),
    ("top", Printed::Own("top")),
    ("apply", Printed::Operation),
    ("run", Printed::Text("only errors: stdout belongs to the command")),
    ("lease request", Printed::Change("LeaseGrant")),
    ("lease list", Printed::List("Lease")),
    ("lease show", Printed::Text("`Lease`; a list if several or no leases are named")),
    ("lease renew", Printed::Change("Lease")),
    ("lease keep", Printed::Change("Lease")),
    ("lease idle", Printed::One("IdleReport")),
    ("lease end", Printed::ChangeOf("leases", "Lease")),
    ("lease env", Printed::Text("an object with the variables of the environment")),
    ("quota", Printed::Text("`QuotaView`; a list for `--all`")),
    ("usage", Printed::One("UsageReport")),
    ("bill", Printed::One("Bill")),
    ("gpu list", Printed::List("Gpu")),
    ("gpu show", Printed::List("Gpu")),
    ("gpu holders", Printed::List("GpuHolders")),
    ("gpu cordon", Printed::ChangeOf("gpus", "Gpu")),
    ("gpu drain", Printed::ChangeOf("gpus", "Gpu")),
    ("gpu uncordon", Printed::ChangeOf("gpus", "Gpu")),
    ("gpu reset", Printed::ChangeOf("gpus", "Gpu")),
    ("mig list", Printed::List("MigDevice")),
    ("mig profiles", Printed::List("Gpu")),
    ("mig apply", Printed::Operation),
    ("mig add", Printed::Operation),
    ("mig remove", Printed::Operation),
    ("mig on", Printed::Operation),
    ("mig off", Printed::Operation),
    ("mig export", Printed::Own("mig export")),
    ("mig import", Printed::Own("mig export")),
    ("mps list", Printed::List("MpsDaemon")),
    ("mps show", Printed::One("MpsDaemon")),
    ("mps clients", Printed::Own("mps clients")),
    ("mps set", Printed::Change("MpsSetResponse")),
    ("mps start", Printed::Change("MpsDaemon")),
    ("mps stop", Printed::Change("MpsDaemon")),
    ("mps restart", Printed::Change("MpsDaemon")),
    ("mps logs", Printed::One("MpsLogs")),
    ("ps", Printed::One("GpuProcesses")),
    ("operation list", Printed::List("OperationSummary")),
    ("operation show", Printed::One("Operation")),
    ("operation wait", Printed::Change("Operation")),
    ("operation cancel", Printed::Change("Operation")),
    ("events", Printed::List("Event")),
    ("audit", Printed::List("AuditRecord")),
    ("config check", Printed::Own("config check")),
    ("config init", Printed::Own("config init")),
    ("config show", Printed::One("ConfigView")),
    ("config reload", Printed::Change("Reloaded")),
    ("config diff", Printed::One("ConfigDiff")),
    ("config overrides list", Printed::One("Overrides")),
    ("config overrides clear", Printed::ChangeOf("ended_overrides", "OverrideEnded")),
    ("maintenance enter", Printed::Change("MaintenanceState")),
    ("maintenance leave", Printed::Change("MaintenanceState")),
    ("enforce status", Printed::One("DeviceEnforcement")),
    ("enforce plan", Printed::One("EnforcementPlan")),
    ("enforce on", Printed::Change("DeviceEnforcement")),
    ("enforce off", Printed::Change("DeviceEnforcement")),
    ("enforce shell", Printed::Text("only errors: stdout belongs to the command")),
    ("doctor", Printed::Own("doctor")),
    ("advise mechanism", Printed::Own("advise mechanism")),
    ("advise queue", Printed::Own("advise queue")),
    ("advise from-use", Printed::Own("advise from-use")),
    ("support-bundle", Printed::Own("support-bundle")),
    ("explain", Printed::Own("explain")),
    ("metrics show", Printed::Own("metrics show")),
    ("metrics write", Printed::Own("metrics write")),
    ("metrics serve", Printed::Own("metrics serve")),
    ("slurm reconcile", Printed::Text("nothing; errors as below")),
    ("slurm usage", Printed::List("Lease")),
    ("slurm gres-conf", Printed::Own("slurm gres-conf")),
    ("version", Printed::Own("version")),
];

impl Printed {
    /// Returns the name of the type of the API, if any.
    fn schema(self) -> Option<&'static str> {
        match self {
            Self::One(name) | Self::List(name) | Self::Change(name) | Self::ChangeOf(_, name) => Some(name),
            Self::Operation => Some("Operation"),
            Self::Own(_) | Self::Text(_) => None,
        }
    }

    fn cell(self) -> String {
        match self {
            Self::One(name) => format!("`{name}`"),
            Self::List(name) => format!("list of `{name}`"),
            Self::Change(name) => format!("`{name}` with `changed`"),
            Self::Operation => {
                "`Operation` with `changed`; `Plans` for `--dry-run`, `--check`, and if there is nothing to do"
                    .to_owned()
            }
            Self::ChangeOf(field, name) => format!("`changed`, `{field}`: list of `{name}`"),
            Self::Own(name) => fields(name),
            Self::Text(text) => text.to_owned(),
        }
    }
}

/// Names the fields of an object that gpushctl composes.
fn fields(name: &str) -> String {
    let sample = samples().into_iter().find(|(known, _)| *known == name).expect("a sample").1;
    let names = |object: &serde_json::Map<String, Value>| {
        object.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
    };
    match &sample {
        Value::Object(object) => names(object),
        Value::Array(all) => format!("list of {}", names(all[0].as_object().expect("an object"))),
        other => panic!("{name} is neither an object nor a list: {other}"),
    }
}

fn section() -> String {
    let mut out = "\n| command | document |\n|---|---|\n".to_owned();
    for (command, printed) in PRINTED {
        let _ = writeln!(out, "| `{command}` | {} |", printed.cell());
    }
    out + "\n"
}

#[test]
fn exit_codes_page_matches_the_table_of_documents() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/exit-codes.md");
    let page = std::fs::read_to_string(path).unwrap();
    let (before, rest) = page.split_once(BOUNDS[0]).expect("the beginning");
    let (written, after) = rest.split_once(BOUNDS[1]).expect("the end");
    let generated = format!("\n{}", section());
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(path, format!("{before}{}{generated}{}{after}", BOUNDS[0], BOUNDS[1])).unwrap();
        return;
    }
    assert!(written == generated, "docs/exit-codes.md differs from the documents: run this test with {WRITE}=1");
}

#[test]
fn each_visible_command_has_a_document() {
    let mut commands = args::pages::runnable_commands();
    commands.sort();
    let mut known: Vec<&str> = PRINTED.iter().map(|(command, _)| *command).collect();
    known.sort_unstable();
    assert_eq!(commands, known);
}

#[test]
fn each_type_is_in_the_description_of_the_api() {
    let description: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let schemas = description["components"]["schemas"].as_object().unwrap();
    let unknown: Vec<&str> = PRINTED
        .iter()
        .filter_map(|(_, printed)| printed.schema())
        .filter(|name| !schemas.contains_key(*name))
        .collect();
    assert_eq!(unknown, [] as [&str; 0]);
}
