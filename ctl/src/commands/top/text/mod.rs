//! The text of a picture, with colors. `--once` prints it, and `draw` shows it on the terminal.
//!
//! | file | subject |
//! |---|---|
//! | `columns` | the widths of the columns |
//! | `row` | the line of a row |
//! | `header` | the lines about the host |
//! | `details` | all that is known about a row |
//! | `bars` | a row of bars for past figures |
//! | `past` | the past of a lease before the picture |
//! | `help` | the keys and the columns |

mod bars;
mod columns;
mod details;
mod header;
mod help;
mod past;
mod row;

pub(super) use self::{
    columns::{ColumnWidths, headings},
    details::lines as details,
    header::{Connection, lines as header},
    help::lines as help,
    past::lines as past,
    row::{Drawing, line as row},
};

#[cfg(test)]
pub(super) use self::help::KEYS;

use super::{rows::VisibleRow, tree::Node};
use crate::render::Appearance;

/// Returns the text for `--once`: the host, and all rows.
pub(super) fn once(header: &[String], lines: &[VisibleRow<'_>], drawing: &Drawing<'_>) -> String {
    let mut out: Vec<String> = header.to_vec();
    out.extend([String::new(), headings(drawing.columns)]);
    out.extend(lines.iter().map(|line| row(line, drawing)));
    out.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Returns why a list has no rows; `None` if it has some.
pub(super) fn nothing(nodes: &[Node<'_>], filter: &str, look: &Appearance) -> Option<String> {
    if !nodes.is_empty() {
        return None;
    }
    Some(if filter.is_empty() {
        "Nothing to show.".to_owned()
    } else {
        format!("No row contains \"{}\". Esc shows all rows.", look.clean(filter))
    })
}
