//! The daemons that running operations start or keep stopped.

use std::collections::{BTreeMap, BTreeSet};

use super::Mps;

/// The daemons that an operation starts or keeps stopped. Removed when the operation ends.
#[derive(Debug, Clone, Default)]
pub(super) struct OperationDaemons {
    /// UUIDs of the targets whose daemons the operation keeps stopped.
    pub(super) aside: BTreeSet<String>,
    /// UUIDs of the GPUs on which the operation starts daemons.
    pub(super) starting: BTreeSet<String>,
    /// For each GPU on which the operation starts daemons of MIG devices and changes the override, by UUID, the layout
    /// after the operation. The change of the override is recorded only with the end of the operation.
    pub(super) layouts: BTreeMap<String, Vec<String>>,
}

impl Mps {
    /// Returns the daemons that any running operation starts or keeps stopped.
    pub(super) fn all_operation_daemons(&self) -> OperationDaemons {
        let mut all = OperationDaemons::default();
        for moves in self.operation_daemons().values() {
            all.aside.extend(moves.aside.iter().cloned());
            all.starting.extend(moves.starting.iter().cloned());
            all.layouts.extend(moves.layouts.iter().map(|(gpu, layout)| (gpu.clone(), layout.clone())));
        }
        all
    }

    /// Forgets which daemons an operation starts or keeps stopped. After that, only the records determine which daemons
    /// gpushd starts or keeps stopped.
    pub(crate) fn forget_operation(&self, operation: &str) {
        if self.operation_daemons().remove(operation).is_some() {
            self.wake_all();
        }
    }
}
