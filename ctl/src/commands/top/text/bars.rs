//! A row of bars for past figures.

use crate::render::Appearance;

/// Bars from 0 to 1.
const UTF8: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];

/// Draws the last ratios that fit into `columns`. A ratio that is not known is a blank.
pub(super) fn bars(ratios: impl DoubleEndedIterator<Item = Option<f64>>, columns: usize, look: &Appearance) -> String {
    let levels = match look.charset {
        crate::render::Charset::Utf8 => UTF8,
        crate::render::Charset::Ascii => ASCII,
    };
    let bar = |ratio: Option<f64>| match ratio {
        Some(ratio) => levels[((ratio.clamp(0.0, 1.0) * 8.0) as usize).min(7)],
        None => ' ',
    };
    let mut text: Vec<char> = ratios.rev().take(columns).map(bar).collect();
    text.reverse();
    text.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn unknown_ratio_is_a_blank_and_zero_is_a_bar() {
        let ratios = [Some(0.0), None, Some(0.5), Some(1.0), Some(f64::NAN)];
        let drawn = |columns, charset| bars(ratios.into_iter(), columns, &fixtures::look(80, charset));
        assert_eq!(drawn(8, Charset::Utf8), "▁ ▅█▁");
        assert_eq!(drawn(3, Charset::Utf8), "▅█▁");
        assert_eq!(drawn(8, Charset::Ascii), "_ =#_");
    }
}
