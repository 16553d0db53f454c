//! `cargo xtask bench`: measures the release builds of the programs for docs/benchmarks.md.
//!
//! The command measures counts, and ratios within one run. Both are also valid for other machines. Absolute times are
//! valid only for one machine, so the command shows them only if the target is a time. The document contains no date,
//! so a second run on the same machine changes little in the document.

use std::{
    fmt::Write as _,
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::workspace::{self, Build};

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Fail if a target is missed; do not write docs/benchmarks.md
    #[arg(long)]
    check: bool,
    /// Measure only these figures, and keep the other sections of docs/benchmarks.md
    #[arg(long, value_name = "FIGURE", value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
}

/// The figures in the order of the document: those of the examples of `gpush-core`, and those of the bench of
/// `gpush-tests`.
const PLANS: [(&str, &[&str]); 4] = [
    ("plans", &["plan_bench"]),
    ("placement", &["placement_bench"]),
    ("optimum", &["placement_bench", "--optimum"]),
    ("queue", &["placement_bench", "--queue"]),
];
const FIGURES: [&str; 14] = [
    "apply",
    "status",
    "start",
    "reads",
    "durable",
    "leases",
    "scopes",
    "footprint",
    "usage",
    "history",
    "mps",
    "slurm",
    "events",
    "hung",
];

/// The figure of the packages. It needs packages for hosts.
const PACKAGES: &str = "packages";

fn names() -> Vec<&'static str> {
    PLANS.iter().map(|(name, _)| *name).chain(FIGURES).chain([PACKAGES]).collect()
}

/// Runs the measurements. Returns true if every target is met.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    println!("building the programs as shipped");
    let programs = workspace::build_programs(Build::Release)?;
    // The packages contain this program without shared libraries.
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let hook = workspace::build_static_hook(&triple, &[])?;
    std::fs::copy(hook, programs.join(workspace::SLURM_HOOK)).context("cannot copy the program of Slurm's hooks")?;
    let is_wanted = |name: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name);
    let mut reports = Vec::new();
    for name in names().into_iter().filter(|name| is_wanted(name)) {
        let report = match PLANS.iter().find(|(plans, _)| *plans == name) {
            Some((_, example)) => Some(measure(workspace::cargo(), &plans(example))?),
            None if name == PACKAGES => packages()?,
            None => Some(measure(workspace::cargo(), &figure(name))?),
        };
        reports.extend(report.inspect(|report| print!("\n{}", table(report))));
    }
    let missed: Vec<String> = reports.iter().flat_map(targets).filter(|target| !target.met).map(|t| t.what).collect();
    if !arguments.check {
        let path = workspace::root().join("docs/benchmarks.md");
        let before = fs::read_to_string(&path).unwrap_or_default();
        let text = match arguments.only.is_empty() {
            true => document(&reports) + kept(&before),
            false => replaced(&before, &reports),
        };
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("\nwritten to docs/benchmarks.md");
    }
    if missed.is_empty() {
        println!("all targets met");
    } else {
        println!("targets missed: {}", missed.join("; "));
    }
    Ok(missed.is_empty() || !arguments.check)
}

/// Returns the arguments of cargo that run an example of `gpush-core`. `example` is its name and its arguments.
fn plans<'a>(example: &[&'a str]) -> Vec<&'a str> {
    let run = ["run", "--release", "--locked", "--quiet", "--package", "gpush-core", "--example"];
    let (name, arguments) = example.split_at(1);
    [&run, name, &["--", "--json"], arguments].concat()
}

/// Returns the arguments of cargo that measure a figure.
fn figure(name: &str) -> Vec<&str> {
    vec!["bench", "--locked", "--quiet", "--package", "gpush-tests", "--bench", "figures", "--", name]
}

/// Builds the packages for hosts, and measures them. Returns `None` without cargo-zigbuild, which these packages need.
fn packages() -> Result<Option<Value>> {
    if !workspace::is_installed("cargo-zigbuild") {
        println!("SKIPPED packages: cargo-zigbuild is not installed");
        return Ok(None);
    }
    let xtask = std::env::current_exe().context("the path of xtask is not known")?;
    if !Command::new(xtask).arg("package").status().context("xtask cannot be started")?.success() {
        bail!("`cargo xtask package` failed");
    }
    let mut command = workspace::cargo();
    command.env("GPUSH_TEST_PACKAGES", workspace::target().join("package"));
    measure(command, &figure(PACKAGES)).map(Some)
}

fn measure(mut cargo: Command, command: &[&str]) -> Result<Value> {
    let output = cargo.args(command).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.context("cargo cannot be started")?;
    if !output.status.success() {
        bail!("`cargo {}` failed ({})", command.join(" "), output.status);
    }
    let text = String::from_utf8(output.stdout).context("a report that is not UTF-8")?;
    let line = text.lines().rev().find(|line| line.starts_with('{'));
    let report: Value =
        serde_json::from_str(line.context("it reported nothing")?).context("a report that is not JSON")?;
    Ok(match report["plan"].as_array() {
        Some(rows) => planning(rows),
        None => report,
    })
}

/// Returns the percentiles of the planner's bench as a report. That bench has no table and no targets, so this function
/// adds them.
fn planning(rows: &[Value]) -> Value {
    let microseconds = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN) / 1e3;
    let name = |row: &Value| row["what"].as_str().unwrap_or_default().to_owned();
    let table: Vec<Value> = rows
        .iter()
        .map(|row| {
            let times = ["p50_ns", "p99_ns", "p999_ns"].map(|key| format!("{:.1}", microseconds(row, key)));
            json!([name(row), row["count"].to_string(), times[0], times[1], times[2]])
        })
        .collect();
    let worst = |hosts: bool| {
        let chosen = rows.iter().filter(|row| name(row).contains("64 GPUs") == hosts);
        chosen.map(|row| microseconds(row, "p99_ns")).fold(f64::NAN, f64::max)
    };
    let (one, host) = (worst(false), worst(true));
    json!({
        "title": "Planning",
        "note": "Times are in µs. The planner plans from every state of an A100 and of an H100 to every layout of up \
                 to eight instances. The last row of each model is a host of 64 GPUs, each with a different state and \
                 layout. Its time begins when gpush starts to read the profiles that the driver reported, and ends \
                 when all plans are ready.",
        "columns": ["", "calls", "p50", "p99", "p99.9"],
        "rows": table,
        "targets": [
            { "what": "planning a GPU", "wanted": "p99 under 100 µs", "measured": format!("{one:.1} µs"), "met": one < 100.0 },
            { "what": "planning 64 GPUs", "wanted": "p99 under 10 ms", "measured": format!("{:.2} ms", host / 1e3), "met": host < 10_000.0 },
        ],
    })
}

/// A target of a report, with its measurement.
struct Target {
    what: String,
    wanted: String,
    measured: String,
    met: bool,
}

impl Target {
    /// Returns the row of the target in the document.
    fn row(&self) -> String {
        let Self { what, wanted, measured, met } = self;
        format!("| {what} | {wanted} | {measured} | {} |", if *met { "met" } else { "**missed**" })
    }
}

fn targets(report: &Value) -> Vec<Target> {
    let list = report["targets"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    list.iter()
        .map(|target| Target {
            what: text(&target["what"]),
            wanted: text(&target["wanted"]),
            measured: text(&target["measured"]),
            met: target["met"] == true,
        })
        .collect()
}

/// Returns the part of the document that was measured on hosts with a GPU. This run cannot repeat these measurements,
/// so the new document keeps the part.
fn kept(before: &str) -> &str {
    before.find("\n## On a real GPU").map_or("", |at| &before[at..])
}

fn document(reports: &[Value]) -> String {
    let mut text = format!(
        "# Benchmarks\n\n\
         `cargo xtask bench` writes this page. `cargo xtask bench --check` fails if a target is missed. Counts and \
         ratios come from one run, and are also valid for other machines. Times are valid only for the machine of this \
         measurement: {}. Measurements on a real GPU are in the last sections, \"On a real GPU\". Copy such a section \
         from the output of `tests/gpu/run`. `cargo xtask bench` keeps these sections.\n\n\
         ## Targets\n\n| target | goal | measured | |\n|---|---|---|---|\n",
        machine()
    );
    for target in reports.iter().flat_map(targets) {
        let _ = writeln!(text, "{}", target.row());
    }
    for report in reports {
        let _ = write!(text, "\n{}", table(report));
    }
    text
}

/// Replaces the sections and targets of these reports in the document `before`, and returns the result.
fn replaced(before: &str, reports: &[Value]) -> String {
    let targets: Vec<Target> = reports.iter().flat_map(targets).collect();
    let sections = before.split("\n## ").map(|section| {
        let title = section.lines().next().unwrap_or_default();
        if let Some(report) = reports.iter().find(|report| report["title"] == title) {
            return table(report).trim_start_matches("## ").to_owned();
        }
        let row = |line: &str| {
            let target = targets.iter().find(|target| line.starts_with(&format!("| {} | ", target.what)));
            target.map_or_else(|| line.to_owned(), Target::row) + "\n"
        };
        if title == "Targets" { section.lines().map(row).collect() } else { section.to_owned() }
    });
    sections.collect::<Vec<_>>().join("\n## ")
}

/// Returns a report as a section with a table.
fn table(report: &Value) -> String {
    let cells = |row: &Value| -> Vec<String> {
        let row = row.as_array().map(Vec::as_slice).unwrap_or_default();
        row.iter().map(|cell| cell.as_str().unwrap_or_default().to_owned()).collect()
    };
    let columns = cells(&report["columns"]);
    let mut text = format!("## {}\n\n", report["title"].as_str().unwrap_or("Untitled"));
    if let Some(note) = report["note"].as_str() {
        let _ = writeln!(text, "{note}\n");
    }
    let _ = writeln!(text, "| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    for row in report["rows"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "| {} |", cells(row).join(" | "));
    }
    text
}

fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let cpu = read("/proc/cpuinfo");
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split_once(':'));
    let cpu = cpu.map_or("unknown processor", |(_, name)| name.trim()).to_owned();
    let kernel = read("/proc/sys/kernel/osrelease");
    // Keep only the version number: vendors append their own names to it.
    let kernel = kernel.trim().split('-').next().unwrap_or_default().to_owned();
    format!("{cores} cores ({cpu}), Linux {kernel}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowest_plan_decides_and_empty_measurement_fails() {
        let row = |what: &str, p99: u64| json!({"what": what, "count": 1, "p50_ns": 1, "p99_ns": p99, "p999_ns": p99});
        let met = |rows: &[Value]| targets(&planning(rows)).iter().map(|target| target.met).collect::<Vec<_>>();
        let host = row("a: 64 GPUs from profiles to plans", 9_000_000);
        assert_eq!(met(&[row("a", 5_000), row("b", 99_000), host.clone()]), [true, true]);
        assert_eq!(met(&[row("a", 5_000), row("b", 101_000), host]), [false, true]);
        assert_eq!(met(&[]), [false, false]);
    }

    #[test]
    fn gpu_measurements_are_kept() {
        assert_eq!(kept("# Figures\n\n## Planning\n\nx\n"), "");
        assert_eq!(kept("# Figures\n\nx\n\n## On a real GPU: MPS\n\ny\n"), "\n## On a real GPU: MPS\n\ny\n");
    }

    #[test]
    fn missed_target_is_shown() {
        let report = json!({
            "title": "T", "note": "How.\n- **a:** one\n- **b:** two", "columns": ["a", "b"], "rows": [["1", "2"]],
            "targets": [{"what": "speed", "wanted": "under 5", "measured": "7", "met": false}],
        });
        assert_eq!(table(&report), "## T\n\nHow.\n- **a:** one\n- **b:** two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n");
        assert!(document(&[report]).contains("| speed | under 5 | 7 | **missed** |"));
    }

    #[test]
    fn only_the_measured_sections_and_targets_change() {
        let report = |title: &str, measured: &str| {
            let target = json!({"what": title, "wanted": "5", "measured": measured, "met": true});
            json!({"title": title, "columns": ["a"], "rows": [[measured]], "targets": [target]})
        };
        let before = document(&[report("one", "1"), report("two", "2")]) + "\n## On a real GPU: MPS\n\ny\n";
        let after = document(&[report("one", "1"), report("two", "3")]) + "\n## On a real GPU: MPS\n\ny\n";
        assert_eq!(replaced(&before, &[report("two", "3")]), after);
    }
}
