//! The list of operations.

use gpush_api::OperationSummary;

use super::{
    Appearance,
    listing::{Listing, widened},
    names, operation,
    table::{Align, Narrow},
};

/// Lists the operations of `gpushctl operation list`.
pub(crate) fn operations(operations: &[OperationSummary], look: &Appearance) -> Listing {
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
                operation::summary_outcome(op).0.to_owned(),
                names::actor(&op.by, look),
                look.ago(op.created_at),
                names::gpu_numbers(&op.gpus).trim_start_matches("GPUs ").trim_start_matches("GPU ").to_owned(),
                format!("{}/{}", op.done, op.total),
            ]
        })
        .collect();
    let (columns, rows) = widened(
        &columns,
        rows,
        operations,
        &[
            ("ASKED AT", &|op| look.clock(op.created_at)),
            ("ENDED AT", &|op| op.ended_at.map_or_else(|| "-".to_owned(), |at| look.clock(at))),
            ("GPU UUIDS", &|op| look.clean(&op.gpu_uuids.join(","))),
        ],
        look,
    );
    Listing::new(&columns, rows, Narrow::default(), look).names(operations.iter().map(|op| op.id.clone()))
}
