//! The isolation of each sharing mechanism.

use anstyle::Style;
use gpush_core::isolation::{MECHANISMS, SOURCES, TABLE};

use super::{
    Appearance,
    appearance::{BAD, NEW, NOTE, QUIET, STRONG, pad, paint},
};

/// Width of a mechanism's name, in columns.
const NAMES: usize = 11;

/// Width of an answer, in columns.
const ANSWERS: usize = 7;

/// Draws `gpushctl explain isolation`.
pub(crate) fn table(look: &Appearance) -> String {
    let mut out = String::new();
    for aspect in TABLE {
        out += &(paint(STRONG, aspect.name) + "\n");
        for (mechanism, cell) in MECHANISMS.into_iter().zip(aspect.cells) {
            let first = format!("  {}{}", pad(mechanism.name(), NAMES), pad(cell.answer, ANSWERS));
            let sources: Vec<String> = cell.sources.iter().map(ToString::to_string).collect();
            let lines = look.wrap(&first, &format!("{} [{}]", cell.text, sources.join(",")));
            // Color only the answer, which is at the beginning of the line.
            let painted = first.replacen(cell.answer, &paint(style(cell.answer), cell.answer), 1);
            out += &(lines.join("\n").replacen(&first, &painted, 1) + "\n");
        }
        out.push('\n');
    }
    out +=
        &(look.wrap("", "yes = isolated; limit = a ceiling that programs can change or avoid; no = shared").join("\n")
            + "\n");
    for source in SOURCES {
        let url = if source.url.starts_with("https:") { format!(": {}", source.url) } else { String::new() };
        let lines = look.wrap(&format!("[{}] ", source.number), &format!("{}{url}", source.title));
        out += &(lines.iter().map(|line| paint(QUIET, line)).collect::<Vec<_>>().join("\n") + "\n");
    }
    out
}

fn style(answer: &str) -> Style {
    match answer {
        "yes" => NEW,
        "limit" => NOTE,
        _ => BAD,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn isolation_at_every_width() {
        for width in [60, 80, 120] {
            let look = fixtures::look(width, Charset::Ascii);
            insta::assert_snapshot!(format!("isolation-{width}"), fixtures::plain(&table(&look)));
        }
    }
}
