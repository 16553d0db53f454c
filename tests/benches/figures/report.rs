//! Output of a bench: a table, and targets with their measurements. The bench prints this report as
//! one JSON object on standard output. `cargo xtask bench` renders it.

use serde_json::{Value, json};

/// A table with its targets.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Heading.
    pub(crate) title: String,
    /// How the report was measured: a paragraph in Markdown, and a list directly below it if needed.
    pub(crate) note: String,
    /// Column heads.
    pub(crate) columns: Vec<String>,
    /// Cells, row by row.
    pub(crate) rows: Vec<Vec<String>>,
    targets: Vec<Value>,
}

impl Report {
    /// Creates an empty table.
    pub(crate) fn new(title: &str, note: &str, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Self { title: title.into(), note: note.into(), columns, ..Self::default() }
    }

    /// Adds a target, the measurement, and whether the measurement meets the target.
    pub(crate) fn target(&mut self, what: &str, wanted: &str, measured: &str, met: bool) {
        self.targets.push(json!({ "what": what, "wanted": wanted, "measured": measured, "met": met }));
    }

    /// Prints the report to standard output.
    pub(crate) fn print(&self) {
        let Self { title, note, columns, rows, targets } = self;
        println!("{}", json!({ "title": title, "note": note, "columns": columns, "rows": rows, "targets": targets }));
    }
}

pub(crate) fn median(values: Vec<f64>) -> f64 {
    percentile(values, 0.5)
}

/// Returns a percentile: the value below which the fraction `share` of the measurements lies.
pub(crate) fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a small number")]
    let at = (values.len() as f64 * share) as usize;
    values.get(at).copied().unwrap_or(f64::NAN)
}

/// Returns a number with a comma before each group of three digits, as in `10,000`.
pub(crate) fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
