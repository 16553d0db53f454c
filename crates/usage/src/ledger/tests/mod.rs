use super::*;
use crate::samples::{at, sample};

/// A ledger with a whole GPU, which was seen without a process.
fn ledger() -> Ledger {
    let mut ledger = Ledger::new();
    ledger.add_gpu(&"GPU-1".into(), at(0));
    assert!(ledger.sample(&sample(1_000)));
    assert!(ledger.sample(&sample(2_000)));
    ledger
}

mod cases;
mod neighbours;
mod properties;
