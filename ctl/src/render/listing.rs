//! A list that can be printed in every output format: drawn for users, as CSV, as names, as UUIDs.

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
    /// Whether the list is empty, so that it is drawn as a sentence that says so.
    only_says_empty: bool,
}

/// A column that only `-o wide` shows: its heading, and its cell for an entry.
pub(crate) type WideColumn<'f, T> = (&'static str, &'f dyn Fn(&T) -> String);

/// Adds the columns that only `-o wide` shows, before the last column, which may be prose.
pub(crate) fn widened<T>(
    columns: &[(&'static str, Align)],
    mut rows: Vec<Vec<String>>,
    entries: &[T],
    more: &[WideColumn<'_, T>],
    look: &Appearance,
) -> (Vec<(&'static str, Align)>, Vec<Vec<String>>) {
    let mut columns = columns.to_vec();
    if look.wide {
        insert(&mut columns, &mut rows, entries, more);
    }
    (columns, rows)
}

/// Inserts columns before the last one.
pub(crate) fn insert<T>(
    columns: &mut Vec<(&'static str, Align)>,
    rows: &mut [Vec<String>],
    entries: &[T],
    more: &[WideColumn<'_, T>],
) {
    let last = columns.len().saturating_sub(1);
    columns.splice(last..last, more.iter().map(|(name, _)| (*name, Align::Left)));
    for (row, entry) in rows.iter_mut().zip(entries) {
        row.splice(last..last, more.iter().map(|(_, cell)| cell(entry)));
    }
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

    /// Creates a list without a drawing. Call `drawn` to set it.
    pub(crate) fn of(headings: Vec<&'static str>, rows: Vec<Vec<String>>) -> Self {
        Self { headings, rows, ..Self::default() }
    }

    /// Sets the drawing of the list.
    pub(crate) fn drawn(mut self, text: String) -> Self {
        self.drawn = text;
        self
    }

    /// Sets the names that `-o name` prints. Commands accept them as arguments.
    pub(crate) fn names(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.names = names.into_iter().collect();
        self
    }

    /// Sets what `-o uuid` prints.
    pub(crate) fn uuids(mut self, uuids: impl IntoIterator<Item = impl ToString>) -> Self {
        self.uuids = Some(uuids.into_iter().map(|uuid| uuid.to_string()).collect());
        self
    }

    /// Sets the text that is drawn if the list is empty.
    pub(crate) fn or_empty(mut self, text: &str) -> Self {
        if self.rows.is_empty() {
            (self.drawn, self.only_says_empty) = (format!("{text}\n"), true);
        }
        self
    }

    /// Appends text to the drawn list.
    pub(crate) fn after(mut self, text: &str) -> Self {
        self.drawn += text;
        self.only_says_empty &= text.is_empty();
        self
    }

    /// Returns the list as it is drawn for users.
    pub(crate) fn text(&self) -> &str {
        &self.drawn
    }

    /// Returns the list as it is drawn with `--no-headers`. If the list is empty, returns no text,
    /// so that a script that counts lines finds none.
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

    /// Returns the list as comma-separated values (RFC 4180, but with LF), without colors.
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
    fn wide_lists_have_further_columns() {
        let narrow = crate::render::fixtures::look(200, crate::render::Charset::Utf8);
        let narrow = Appearance { wraps: false, ..narrow };
        let wide = Appearance { wide: true, ..narrow };
        let headings = |look: &Appearance| {
            let leases = crate::render::fixtures::lease::all();
            let mut all = crate::render::lease::list(&leases, &[], look).text().to_owned();
            all += crate::render::mps::list::list(&[crate::render::fixtures::mps::daemon(0)], &[], look).text();
            crate::render::fixtures::plain(&all)
                .lines()
                .filter(|line| line.starts_with("LEASE ") || line.starts_with("TARGET "))
                .collect::<Vec<_>>()
                .join("; ")
        };
        assert!(!headings(&narrow).contains("UUID"), "{}", headings(&narrow));
        let wide = headings(&wide);
        for heading in ["REQUESTED AT", "GRANTED AT", "ENDS AT", "UUIDS", "SHORT NAME", "  UUID"] {
            assert!(wide.contains(heading), "{heading}: {wide}");
        }
    }

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
