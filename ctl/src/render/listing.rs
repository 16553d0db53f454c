//! A list in every output format: the drawing, CSV, names, UUIDs.

use anstream::adapter::strip_str;

use super::{
    Appearance,
    table::{Align, Narrow, fitted},
};

/// A list with one row per object.
#[derive(Debug, Clone, Default)]
pub(crate) struct Listing {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    names: Vec<String>,
    uuids: Option<Vec<String>>,
    drawn: String,
    /// Whether the drawing is only the sentence that the list is empty.
    only_says_empty: bool,
}

impl Listing {
    /// Creates a list that is drawn as a table.
    pub(crate) fn new(
        columns: &[(&'static str, Align)],
        rows: Vec<Vec<String>>,
        narrow: Narrow,
        look: &Appearance,
    ) -> Self {
        let drawn = if rows.is_empty() { String::new() } else { fitted(columns, rows.clone(), narrow, 0, look) };
        Self { drawn, ..Self::of(columns.iter().map(|(name, _)| *name).collect(), rows) }
    }

    /// Creates a list whose drawing is set separately.
    pub(crate) fn of(headings: Vec<&'static str>, rows: Vec<Vec<String>>) -> Self {
        Self { headings, rows, ..Self::default() }
    }

    /// Sets the drawing.
    pub(crate) fn drawn(mut self, text: String) -> Self {
        self.drawn = text;
        self
    }

    /// Sets what `-o name` prints: values that commands accept as arguments.
    pub(crate) fn names(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.names = names.into_iter().collect();
        self
    }

    /// Sets what `-o uuid` prints.
    pub(crate) fn uuids(mut self, uuids: impl IntoIterator<Item = String>) -> Self {
        self.uuids = Some(uuids.into_iter().collect());
        self
    }

    /// Sets the drawing of an empty list.
    pub(crate) fn or_empty(mut self, text: &str) -> Self {
        if self.rows.is_empty() {
            (self.drawn, self.only_says_empty) = (format!("{text}\n"), true);
        }
        self
    }

    /// Appends text to the drawing.
    pub(crate) fn after(mut self, text: &str) -> Self {
        self.drawn += text;
        self.only_says_empty &= text.is_empty();
        self
    }

    /// Returns the drawing.
    pub(crate) fn text(&self) -> &str {
        &self.drawn
    }

    /// Returns the drawing for `--no-headers`: an empty list is empty text, so that a script counts
    /// no line.
    pub(crate) fn text_without_headings(&self) -> &str {
        if self.only_says_empty { "" } else { &self.drawn }
    }

    /// Returns one name per line.
    pub(crate) fn name_lines(&self) -> String {
        lines(&self.names)
    }

    /// Returns one UUID per line; `None` if the objects have no UUID.
    pub(crate) fn uuid_lines(&self) -> Option<String> {
        self.uuids.as_ref().map(|uuids| lines(uuids))
    }

    /// Returns comma-separated values (RFC 4180, with LF), without colors.
    pub(crate) fn csv(&self, headings: bool) -> String {
        let line = |cells: Vec<String>| cells.join(",") + "\n";
        let heading = |name: &&str| name.to_lowercase().replace(' ', "_");
        let mut out = if headings { line(self.headings.iter().map(heading).collect()) } else { String::new() };
        for row in &self.rows {
            out += &line(row.iter().map(|cell| field(cell)).collect());
        }
        out
    }
}

fn lines(all: &[String]) -> String {
    all.iter().map(|one| format!("{one}\n")).collect()
}

fn field(cell: &str) -> String {
    let plain = strip_str(cell).to_string();
    if plain.contains([',', '"', '\n', '\r']) { format!("\"{}\"", plain.replace('"', "\"\"")) } else { plain }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn csv_quotes_what_needs_it_and_has_no_colours() {
        let rows = vec![vec!["0".to_owned(), "\x1b[1m3g.40gb,\x1b[0m \"x\"".to_owned()]];
        let columns = [("GPU", Align::Right), ("A B", Align::Left)];
        let listing = Listing::new(&columns, rows, Narrow::default(), &fixtures::look(80, Charset::Ascii));
        assert_eq!(listing.csv(true), "gpu,a_b\n0,\"3g.40gb, \"\"x\"\"\"\n");
        assert_eq!(listing.csv(false).lines().count(), 1);
        assert_eq!(listing.uuid_lines(), None);
        let empty = Listing::default().or_empty("none");
        assert_eq!((empty.text(), empty.text_without_headings()), ("none\n", ""));
        assert_eq!(empty.after("1 GPU is lost").text_without_headings(), "none\n1 GPU is lost");
        assert_eq!(listing.or_empty("none").names(["0".to_owned()]).name_lines(), "0\n");
    }
}
