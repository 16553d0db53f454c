//! Results of the checks of one part. Each check prints a line when it finishes. For the part `mps`,
//! `mps.json` is for programs, and `mps.md` is for `docs/benchmarks.md`.

use std::{fmt::Write as _, fs, path::Path};

use serde::Serialize;
use serde_json::Value;

use super::ground::Ground;

/// A part of the checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Name of the part, and of its files.
    pub name: &'static str,
    /// Heading in the page.
    pub heading: &'static str,
}

impl Part {
    /// Sharing through MPS.
    pub const MPS: Self = Self { name: "mps", heading: "MPS" };
    /// Figures about the use of GPUs.
    pub const USE: Self = Self { name: "use", heading: "figures about use" };
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Found {
    /// Whether the check passed.
    pub ok: bool,
    /// The measurements, as text.
    pub words: String,
    /// The measurements, for programs.
    pub figures: Value,
}

impl Found {
    /// Returns the result of a check that this host does not permit, which is not a failure.
    #[must_use]
    pub fn not_done(why: &str) -> Self {
        Self { ok: true, words: format!("not done: {why}"), figures: Value::Null }
    }
}

/// A check with its result. If a check could not run, the result is the reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// Name of the check.
    pub name: &'static str,
    /// Result of the check.
    #[serde(flatten)]
    pub found: Found,
}

/// All checks, and the GPU on which they ran.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    #[serde(skip)]
    part: Part,
    /// The GPU.
    pub gpu: Ground,
    /// The command of the clients.
    pub client: Vec<String>,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// The checks, in the order in which they ran.
    pub checks: Vec<Check>,
}

impl Report {
    /// Creates a report without checks.
    #[must_use]
    pub fn of(part: Part, gpu: Ground, client: Vec<String>, seconds: f64) -> Self {
        Self { part, gpu, client, seconds, checks: Vec::new() }
    }

    /// Adds a check to the report and prints its line. A check that could not run counts as failed,
    /// and its text is the reason.
    pub fn add(&mut self, name: &'static str, outcome: Result<Found, String>) {
        let found = outcome.unwrap_or_else(|why| Found { words: why, ..Found::default() });
        println!("{:<7} {name:<22} {}", if found.ok { "ok" } else { "FAILED" }, found.words);
        self.checks.push(Check { name, found });
    }

    /// Returns the number of failed checks.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.checks.iter().filter(|check| !check.found.ok).count()
    }

    /// Writes both files to a directory.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, out: &Path) -> Result<(), String> {
        let json = serde_json::to_string_pretty(self).map_err(|error| error.to_string())?;
        for (ending, text) in [("json", json + "\n"), ("md", self.markdown())] {
            let name = format!("{}.{ending}", self.part.name);
            fs::write(out.join(&name), text).map_err(|error| format!("{name} can't be written: {error}"))?;
        }
        Ok(())
    }

    /// Returns a section for `docs/benchmarks.md`.
    #[must_use]
    pub fn markdown(&self) -> String {
        let Ground { name, memory_mib, driver, cuda, simulated, .. } = &self.gpu;
        let mut text = format!("## On a real GPU: {}\n\n", self.part.heading);
        if *simulated {
            text.push_str("**Of a simulated GPU: the figures mean nothing.**\n\n");
        }
        let _infallible = write!(
            text,
            "By `tests/gpu/run`: {name}, {memory_mib} MiB, driver {driver}, CUDA {cuda}. Each measurement lasts {} s. \
             Compute mode DEFAULT; no setting of the GPU was changed.\n\n| check | | figures |\n|---|---|---|\n",
            self.seconds
        );
        for Check { name, found: Found { ok, words, .. } } in &self.checks {
            // A `|` in the text would end the table cell.
            let words = words.replace('|', "\\|");
            let _infallible = writeln!(text, "| {name} | {} | {words} |", if *ok { "ok" } else { "**failed**" });
        }
        for check in &self.checks {
            text.push_str(&table(&check.found.figures));
        }
        text
    }
}

/// Returns the table of a check with several measurements. Its figures have the form `{"columns":
/// […], "rows": [[…], …]}`. For other checks, returns an empty text.
fn table(figures: &Value) -> String {
    let cells = |row: &Value| -> Vec<String> {
        let row = row.as_array().map(Vec::as_slice).unwrap_or_default();
        row.iter().map(cell).collect()
    };
    let columns = cells(&figures["columns"]);
    if columns.is_empty() {
        return String::new();
    }
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = format!("\n{}|{}\n", line(&columns), "---|".repeat(columns.len()));
    for row in figures["rows"].as_array().into_iter().flatten() {
        text.push_str(&line(&cells(row)));
    }
    text
}

fn cell(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.2}", number.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_become_a_table() {
        let figures = json!({ "columns": ["b", "a"], "rows": [[1, 0.256], ["x", 2.0]] });
        assert_eq!(table(&figures), "\n| b | a |\n|---|---|\n| 1 | 0.26 |\n| x | 2.00 |\n");
        assert_eq!((table(&Value::Null), table(&json!({ "x": 1 }))), (String::new(), String::new()));
    }
}
