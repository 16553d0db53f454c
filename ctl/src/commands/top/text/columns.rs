//! The widths of the columns.
//!
//! ```text
//! NAME                    DEVICE         ACT   MEMORY GiB  POWER, USE   HISTORY
//! ▾ 0 H100 80GB HBM3      ●───○─●·       97%    12.3/80.0  412/700 W    ▁▂▃▅▇
//!   ▾ L17 alice           3g.40gb@0     ~34%     9.8/39.5  busy         in 2h
//!       alice 4123 python train.py                    4.0
//! ```

use crate::render::appearance::{QUIET, pad, paint, width};

/// The widths of the columns of a picture. A column of width 0 is left out.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct ColumnWidths {
    pub(super) name: usize,
    pub(super) device: usize,
    pub(super) activity: usize,
    /// Width of the bar before the figures of the memory; 0 for none.
    pub(super) bar: usize,
    pub(super) memory: usize,
    /// Power of a GPU, or state of a lease.
    pub(super) usage: usize,
    /// History of a GPU, or end of a lease.
    pub(super) rest: usize,
    pub(super) gap: usize,
}

/// From this width on, there are also bars.
const WIDE: usize = 110;

/// Below this width, there is no total memory.
const NARROW: usize = 76;

/// Minimum width of the last column. A terminal without room for it has no such column.
const LEAST_REST: usize = 7;

impl ColumnWidths {
    /// Returns the columns for a terminal of this width. Leaves out whole columns that have no room, because a figure that
    /// is cut looks like another figure.
    pub(in super::super) fn of(width: usize) -> Self {
        let all = match width {
            WIDE.. => Self { name: 34, device: 14, activity: 5, bar: 8, memory: 12, usage: 13, rest: 0, gap: 2 },
            NARROW.. => Self { name: 21, device: 12, activity: 5, bar: 0, memory: 11, usage: 11, rest: 0, gap: 2 },
            _ => Self { name: 16, device: 12, activity: 5, bar: 0, memory: 5, usage: 9, rest: 0, gap: 1 },
        };
        let rest = width.saturating_sub(all.taken() + all.gap);
        if rest >= LEAST_REST {
            return Self { rest, ..all };
        }
        let fits = if all.taken() <= width { all } else { Self { device: 0, ..all } };
        Self { name: fits.name + width.saturating_sub(fits.taken()), ..fits }
    }

    /// Returns the width of all columns except the last one.
    fn taken(self) -> usize {
        let bar = if self.bar == 0 { 0 } else { self.bar + 1 };
        let device = if self.device == 0 { 0 } else { self.device + self.gap };
        self.name + device + self.activity + bar + self.memory + self.usage + 3 * self.gap
    }

    /// Returns whether the total memory is shown.
    pub(super) fn has_totals(self) -> bool {
        self.memory > 5
    }
}

/// Returns the line with the names of the columns.
pub(in super::super) fn headings(columns: ColumnWidths) -> String {
    let gap = " ".repeat(columns.gap);
    let right = |text: &str, columns: usize| format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))));
    let memory = if columns.has_totals() { "MEMORY GiB" } else { "GiB" };
    let memory_columns = columns.memory + if columns.bar == 0 { 0 } else { columns.bar + 1 };
    let usage = if columns.has_totals() { "POWER, USE" } else { "USE" };
    let (name, rest) = match columns.bar {
        0 => ("NAME", "HISTORY"),
        _ => ("GPU, LEASE, PROCESS", "HISTORY, ENDS"),
    };
    let mut line = vec![pad(name, columns.name)];
    line.extend((columns.device > 0).then(|| pad("DEVICE", columns.device)));
    line.extend([right("ACT", columns.activity), right(memory, memory_columns), pad(usage, columns.usage)]);
    line.extend((columns.rest > 0).then(|| rest.to_owned()));
    paint(QUIET, line.join(&gap).trim_end())
}
