//! Tables: one line for each row, aligned columns, dim headings.
//!
//! On a narrow terminal, optional columns are left out first. Then cells break at blanks, never inside a word. As the
//! last step, the text of the last column moves below its row. A cell may have colors, but each word must be colored
//! separately.

use std::borrow::Cow;

use anstream::adapter::strip_str;

use super::{
    Appearance,
    appearance::{self, QUIET, paint},
};

/// Number of blanks between two columns.
const GAP: usize = 2;

/// Minimum width of a column that contains sentences.
pub(crate) const PROSE: usize = 24;

/// A cell that is at most this wide, such as `off > on`, breaks only if nothing else helps.
const SHORT: usize = 8;

/// Number of blanks before a text that has moved below its row.
pub(crate) const BELOW: usize = 4;

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// How to make a table narrower if it is wider than the terminal.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Narrow {
    /// Columns that may be left out, in this order, until all words fit into their columns.
    pub(crate) spare: &'static [&'static str],
    /// Whether the last column contains sentences, which may move below their row.
    pub(crate) prose: bool,
    /// The column with UUIDs. If the table is too wide even without the other columns in `spare`, the UUIDs are
    /// shortened.
    pub(crate) uuids: Option<&'static str>,
}

impl Narrow {
    /// Creates the settings for a table in which these columns may be left out.
    pub(crate) fn spare(columns: &'static [&'static str]) -> Self {
        Self { spare: columns, ..Self::default() }
    }

    /// Also allows the last column to move below its row.
    pub(crate) fn prose(self) -> Self {
        Self { prose: true, ..self }
    }
}

/// Number of characters of a shortened UUID: `MIG-` or `GPU-`, and the first group.
const SHORT_UUID: usize = "GPU-00000000".len();

/// Draws a table in which no column may be left out. A column that is too wide breaks at blanks. The first column,
/// which names the row, breaks last. For a pipe, no column breaks.
pub(crate) fn table(columns: &[(&str, Align)], rows: Vec<Vec<String>>, indent: usize, look: &Appearance) -> String {
    fitted(columns, rows, Narrow::default(), indent, look)
}

/// Draws a table. If it is too wide, makes it narrower as `narrow` says.
pub(crate) fn fitted(
    columns: &[(&str, Align)],
    mut rows: Vec<Vec<String>>,
    narrow: Narrow,
    indent: usize,
    look: &Appearance,
) -> String {
    let mut columns = columns.to_vec();
    let room = if look.wraps { look.width.saturating_sub(indent).max(40) } else { usize::MAX };
    let gaps = |columns: usize| GAP * columns.saturating_sub(1);
    if let Some(at) = narrow.uuids.and_then(|uuids| columns.iter().position(|(column, _)| *column == uuids)) {
        let (least, _) = measured(&columns, &rows, SHORT);
        let can_move = |at: usize| narrow.prose && at + 1 == columns.len();
        let is_needed = |one: &usize| *one == at || !(narrow.spare.contains(&columns[*one].0) || can_move(*one));
        let needed: Vec<usize> = (0..columns.len()).filter(is_needed).map(|one| least[one]).collect();
        if needed.iter().sum::<usize>() + gaps(needed.len()) > room {
            let cells = rows.iter_mut().map(|row| &mut row[at]);
            // A cell with blanks is a text in place of a UUID, so do not shorten it.
            cells.filter(|cell| !cell.contains(' ')).for_each(|cell| *cell = shortened(cell, SHORT_UUID, look));
        }
    }
    for name in narrow.spare {
        let (least, whole) = measured(&columns, &rows, SHORT);
        let devices = narrow.uuids.is_some();
        // Sentences can move below their row, so their column needs no room.
        let kept = columns.len() - usize::from(narrow.prose && devices);
        // As long as another column can be left out, do not break the first column, which names the row. In a list of
        // devices, do not break any other column either.
        let unbroken = if devices { kept } else { 1 };
        let needed = whole.iter().take(unbroken).chain(least.iter().take(kept).skip(unbroken)).sum::<usize>();
        if needed + gaps(kept) <= room {
            break;
        }
        if let Some(at) = columns.iter().position(|(column, _)| column == name) {
            columns.remove(at);
            rows.iter_mut().for_each(|row| drop(row.remove(at)));
        }
    }
    let (_, whole) = measured(&columns, &rows, SHORT);
    let mut prose = None;
    if narrow.prose && whole.iter().sum::<usize>() + gaps(whole.len()) > room {
        let others: usize = whole.iter().rev().skip(1).sum();
        if others + gaps(whole.len()) + PROSE > room {
            prose = Some(rows.iter_mut().map(|row| row.pop().unwrap_or_default()).collect::<Vec<_>>());
            columns.pop();
        }
    }
    let (mut least, whole) = measured(&columns, &rows, SHORT);
    if least.iter().sum::<usize>() + gaps(least.len()) > room {
        (least, _) = measured(&columns, &rows, 0);
    }
    let widths = widths(least, &whole, room.saturating_sub(gaps(columns.len())));
    let margin = " ".repeat(indent);
    let header: Vec<String> = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
    let mut out = String::new();
    for line in lines(&header, &columns, &widths).iter().filter(|_| look.headings) {
        out += &(paint(QUIET, &format!("{margin}{line}")) + "\n");
    }
    for (at, row) in rows.iter().enumerate() {
        for line in lines(row, &columns, &widths) {
            out += &format!("{}\n", format!("{margin}{line}").trim_end());
        }
        let below = prose.as_ref().map(|texts| texts[at].as_str()).filter(|text| !text.is_empty());
        for line in below.into_iter().flat_map(|text| broken(text, room.saturating_sub(BELOW))) {
            out += &format!("{margin}{}{line}\n", " ".repeat(BELOW));
        }
    }
    out
}

/// Returns the width of a cell in columns, without its color codes.
fn width(cell: &str) -> usize {
    appearance::width(&bare(cell))
}

fn bare(cell: &str) -> Cow<'_, str> {
    if cell.contains('\x1b') { Cow::Owned(strip_str(cell).to_string()) } else { Cow::Borrowed(cell) }
}

/// Breaks a cell into lines of at most `room` columns. Never breaks a word.
fn broken(cell: &str, room: usize) -> Vec<String> {
    if !cell.contains('\x1b') {
        return appearance::broken(cell, room);
    }
    let mut lines: Vec<String> = Vec::new();
    for word in cell.split_whitespace() {
        match lines.last_mut().filter(|line| width(line) + 1 + width(word) <= room) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Returns two widths for each column: its minimum width, and the width of its widest cell. The minimum width is the
/// width of the column's longest word. Cells with a width of up to `short` count as one word.
fn measured(columns: &[(&str, Align)], rows: &[Vec<String>], short: usize) -> (Vec<usize>, Vec<usize>) {
    let cells = |at: usize| rows.iter().map(move |row| row[at].as_str()).chain([columns[at].0]);
    let word = |cell: &str| match width(cell) {
        whole if whole <= short => whole,
        _ => cell.split_whitespace().map(width).max().unwrap_or(0),
    };
    let whole: Vec<usize> = (0..columns.len()).map(|at| cells(at).map(width).max().unwrap_or(0)).collect();
    let least = (0..columns.len()).map(|at| cells(at).map(word).max().unwrap_or(0)).collect();
    (least, whole)
}

/// Gives each column its minimum width, and then distributes the rest of `room`. First come the columns that need the
/// least additional room.
fn widths(least: Vec<usize>, whole: &[usize], room: usize) -> Vec<usize> {
    let mut widths = least;
    let mut left = room.saturating_sub(widths.iter().sum());
    let mut order: Vec<usize> = (0..widths.len()).collect();
    order.sort_by_key(|at| (*at != 0, whole[*at] - widths[*at]));
    for at in order {
        let more = (whole[at] - widths[at]).min(left);
        widths[at] += more;
        left -= more;
    }
    widths
}

/// Draws one row, in as many lines as its longest cell needs.
fn lines(row: &[String], columns: &[(&str, Align)], widths: &[usize]) -> Vec<String> {
    // Do not change a cell that fits, because this would remove blanks.
    let cell = |(cell, room): (&String, &usize)| {
        if width(cell) <= *room { vec![cell.clone()] } else { broken(cell, *room) }
    };
    let cells: Vec<Vec<String>> = std::iter::zip(row, widths).map(cell).collect();
    let height = cells.iter().map(Vec::len).max().unwrap_or(0);
    let line = |n: usize| {
        let mut out = String::new();
        for (at, cell) in cells.iter().enumerate() {
            let text = cell.get(n).map_or("", String::as_str);
            let fill = " ".repeat(widths[at].saturating_sub(width(text)));
            let gap = if at == 0 { "" } else { "  " };
            out += &match columns[at].1 {
                Align::Left => format!("{gap}{text}{fill}"),
                Align::Right => format!("{gap}{fill}{text}"),
            };
        }
        out.truncate(out.trim_end().len());
        out
    };
    (0..height).map(line).collect()
}

/// Returns the UUID if it fits into `columns`; otherwise its beginning with an ellipsis.
pub(crate) fn shortened(uuid: &str, columns: usize, look: &Appearance) -> String {
    if uuid.len() <= columns {
        return uuid.to_owned();
    }
    uuid.chars().take(columns).collect::<String>() + look.pick("…", "...")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    fn drawn(width: usize, narrow: Narrow) -> String {
        let columns =
            [("GPU", Align::Right), ("A LONG NAME", Align::Left), ("FIGURE", Align::Right), ("WHY", Align::Left)];
        let row = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
        let rows = vec![
            row(["0", "training-and-more", "80.0", "it looks broken, and has for weeks"]),
            row(["11", "two words", "9.5", ""]),
        ];
        fixtures::plain(&fitted(&columns, rows, narrow, 2, &fixtures::look(width, Charset::Ascii)))
    }

    #[test]
    fn words_are_not_broken_and_prose_may_move_below_its_row() {
        insta::assert_snapshot!(drawn(80, Narrow::default()), @r"
        GPU  A LONG NAME        FIGURE  WHY
          0  training-and-more    80.0  it looks broken, and has for weeks
         11  two words             9.5
        ");
        insta::assert_snapshot!(drawn(50, Narrow::default()), @r"
        GPU  A LONG NAME        FIGURE  WHY
          0  training-and-more    80.0  it looks broken,
                                        and has for
                                        weeks
         11  two words             9.5
        ");
        insta::assert_snapshot!(drawn(50, Narrow::default().prose()), @r"
        GPU  A LONG NAME        FIGURE
          0  training-and-more    80.0
            it looks broken, and has for weeks
         11  two words             9.5
        ");
    }
}
