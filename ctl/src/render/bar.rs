//! Bars that show which part of a whole is used: memory, with its numbers, or the shares of a GPU.
//!
//! `Memory::used_mib` includes the memory that the driver reserves for itself. So the bar shows only use of at
//! least one percent, and is empty for an idle GPU.

use gpush_api::Memory;

use super::{
    Appearance, Charset,
    appearance::{QUIET, USED, gib, paint},
};

/// Draws memory as a bar of `columns` columns. The heavy part is the used memory.
pub(crate) fn line(memory: Memory, columns: usize, look: &Appearance) -> String {
    part(memory.used_mib, memory.total_mib, columns, look)
}

/// Draws a bar of `columns` columns. The heavy part shows `used` of `total`. In UTF-8, the bar has half columns.
pub(crate) fn part(used: u64, total: u64, columns: usize, look: &Appearance) -> String {
    let (full, half, empty) = match look.charset {
        Charset::Utf8 => ("━", "╸", "·"),
        Charset::Ascii => ("#", "", "."),
    };
    let steps = if half.is_empty() { 1 } else { 2 };
    let all = (columns * steps) as u64;
    let used = used.min(total);
    // Round to the nearest step. But if one percent or more is used, draw at least one step; draw a full bar only if
    // everything is used. Less than one percent is what the driver reserves on an idle instance.
    let filled = match (used * all + total / 2).checked_div(total) {
        None => 0,
        Some(n) if used == total => n,
        Some(n) => n.clamp(u64::from(used * 100 >= total), all - 1),
    } as usize;
    let heavy = format!("{}{}", full.repeat(filled / steps), if filled % steps == 1 { half } else { "" });
    let rest = columns - filled.div_ceil(steps);
    format!("{}{}", paint(USED, &heavy), paint(QUIET, &empty.repeat(rest)))
}

/// Returns `12.1/39.5 GiB`. Both numbers have the width of `139.5`, so that several lines align.
pub(crate) fn figures(memory: Memory) -> String {
    format!("{:>5}/{:>5} GiB", gib(memory.used_mib), gib(memory.total_mib))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(used_mib: u64, total_mib: u64, charset: Charset) -> String {
        let look = crate::render::fixtures::look(80, charset);
        anstream::adapter::strip_str(&line(Memory { used_mib, total_mib }, 8, &look)).to_string()
    }

    #[test]
    fn bar_is_to_scale_and_shows_almost_empty_and_almost_full() {
        let bars: Vec<_> =
            [0, 9, 10, 500, 560, 999, 1000, 2000].iter().map(|u| drawn(*u, 1000, Charset::Utf8)).collect();
        assert_eq!(
            bars,
            ["········", "········", "╸·······", "━━━━····", "━━━━╸···", "━━━━━━━╸", "━━━━━━━━", "━━━━━━━━"]
        );
        let bars: Vec<_> = [0, 9, 10, 500, 999, 1000].iter().map(|u| drawn(*u, 1000, Charset::Ascii)).collect();
        assert_eq!(bars, ["........", "........", "#.......", "####....", "#######.", "########"]);
        assert_eq!(drawn(5, 0, Charset::Utf8), "········", "a reading of nothing is no division by zero");
    }
}
