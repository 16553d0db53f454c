//! Tables: one line a thing, columns aligned, headings quiet.

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use gpush_api::{Gpu, OperationSummary};

use super::{
    Look, gpu,
    look::{QUIET, gib, paint, product},
    operation,
};

/// Where a column's text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table of plain text; a column too wide for the terminal wraps, but never the first, which names
/// the row, and none into a pipe.
pub(crate) fn table(columns: &[(&str, Align)], rows: Vec<Vec<String>>, indent: usize, look: &Look) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_content_arrangement(if look.wraps { ContentArrangement::Dynamic } else { ContentArrangement::Disabled });
    // comfy-table pads every cell on both sides, and the first starts at the margin.
    table.set_width(u16::try_from(look.width.saturating_sub(indent).max(40) + 1).unwrap_or(u16::MAX));
    table.set_header(columns.iter().map(|(name, _)| *name));
    for row in rows {
        table.add_row(row);
    }
    for (at, (_, align)) in columns.iter().enumerate() {
        if let Some(column) = table.column_mut(at) {
            column.set_padding((0, 2));
            if at == 0 {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
    }
    let margin = " ".repeat(indent);
    let mut out = String::new();
    for (at, line) in table.lines().enumerate() {
        let line = format!("{margin}{}", line.trim_end());
        out += &if at == 0 { paint(QUIET, &line) } else { line };
        out.push('\n');
    }
    out
}

/// `gpushctl gpu list`.
pub(crate) fn gpus(gpus: &[Gpu], look: &Look) -> String {
    use Align::{Left, Right};
    let columns = [
        ("GPU", Right),
        ("PRODUCT", Left),
        ("PCI", Left),
        ("GIB", Right),
        ("MODE", Left),
        ("MIG", Left),
        ("STATE", Left),
        ("UUID", Left),
    ];
    // 40 characters of UUID leave no room for the rest on most terminals. Its beginning names the GPU
    // as well, and `gpu show` has all of it. On a narrow one the PCI address gives way to it. A pipe has
    // no edge.
    let (pci, uuid) = match look.width {
        _ if !look.wraps => (true, usize::MAX),
        0..100 => (false, "GPU-00000000".len()),
        100..136 => (true, "GPU-00000000".len()),
        _ => (true, usize::MAX),
    };
    let columns: Vec<_> = columns.into_iter().filter(|(name, _)| pci || *name != "PCI").collect();
    let rows = gpus
        .iter()
        .map(|gpu| {
            let mut row = vec![
                gpu.index.to_string(),
                look.fit(&look.clean(product(&gpu.name)), if pci || !look.wraps { 24 } else { 14 }),
                look.clean(&gpu.pci),
                format!("{}/{}", gib(gpu.memory.used_mib), gib(gpu.memory.total_mib)),
                gpu::mode(gpu.mode).to_owned(),
                mig(gpu),
                gpu::state(gpu.state).0.to_owned() + if gpu.drift.is_empty() { "" } else { ", drift" },
                look.clean(&gpu.uuid).chars().take(uuid).collect(),
            ];
            if !pci {
                row.remove(2);
            }
            row
        })
        .collect();
    table(&columns, rows, 0, look)
}

/// MIG mode and instances in a few characters: `on, 4`.
fn mig(gpu: &Gpu) -> String {
    match &gpu.mig {
        None => "-".to_owned(),
        Some(mig) => match (mig.enabled, mig.pending) {
            (true, true) => format!("on, {}", mig.instances.len()),
            (true, false) => "on > off".to_owned(),
            (false, true) => "off > on".to_owned(),
            (false, false) => "off".to_owned(),
        },
    }
}

/// `gpushctl operation list`.
pub(crate) fn operations(operations: &[OperationSummary], look: &Look) -> String {
    use Align::{Left, Right};
    let columns = [
        ("ID", Left),
        ("WHAT", Left),
        ("STATE", Left),
        ("BY", Left),
        ("ASKED", Right),
        ("GPUS", Left),
        ("STEPS", Right),
    ];
    let rows = operations
        .iter()
        .map(|op| {
            vec![
                op.id.clone(),
                look.clean(&op.kind),
                operation::state(op.state).0.to_owned(),
                op.by.user.as_ref().map_or_else(|| format!("uid {}", op.by.uid), |u| look.clean(u)),
                look.ago(op.created_at),
                super::status::gpu_numbers(&op.gpus).trim_start_matches("GPUs ").trim_start_matches("GPU ").to_owned(),
                format!("{}/{}", op.done, op.total),
            ]
        })
        .collect();
    table(&columns, rows, 0, look)
}
