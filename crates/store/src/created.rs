//! GPU instances that gpushd created on this boot, identified by their placements. On a GPU with
//! the layout `dynamic`, gpushd destroys only these instances for leases.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuUuid, Placement};
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    fact::Fact,
    record,
    tx::{Tx, View},
};

/// Placements by UUID of the GPU.
pub type CreatedInstances = BTreeMap<GpuUuid, BTreeSet<Placement>>;

const CREATED: &str = "created_instances";

/// The record in the database. It is valid only on the boot on which it was written, because a reboot removes all GPU
/// instances.
#[derive(Debug, Serialize, Deserialize)]
struct Created {
    boot_id: String,
    gpus: CreatedInstances,
}

impl View<'_> {
    fn created(&self) -> Result<Option<Created>, StoreError> {
        let Some(text) = self.fact(CREATED)? else { return Ok(None) };
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| StoreError::Corrupt { table: CREATED.to_owned(), what: error.to_string() })
    }

    /// Returns the instances that gpushd created on a boot.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn created_instances(&self, boot_id: &str) -> Result<CreatedInstances, StoreError> {
        let created = self.created()?.filter(|created| created.boot_id == boot_id);
        Ok(created.map(|created| created.gpus).unwrap_or_default())
    }
}

impl Tx<'_> {
    /// Records the instances that gpushd created on a GPU on this boot. Replaces the previous record.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_created_instances(&mut self, gpu: &GpuUuid, placements: BTreeSet<Placement>) -> Result<(), StoreError> {
        let mut gpus = self.view().created_instances(self.boot_id)?;
        if placements.is_empty() {
            gpus.remove(gpu);
        } else {
            gpus.insert(gpu.clone(), placements);
        }
        self.next_sequence();
        let created = Created { boot_id: self.boot_id.to_owned(), gpus };
        let value = serde_json::to_string(&created).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: CREATED.to_owned(), value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Store};

    #[test]
    fn created_instances_end_with_their_boot() {
        let directory = tempfile::tempdir().unwrap();
        let options = |boot: &str| Options { boot_id: boot.to_owned(), ..Options::default() };
        let placement = |start| Placement { start, size: 2 };
        let store = Store::open(directory.path(), options("one")).unwrap().store;
        let write = |store: &Store, gpu: &'static str, starts: &[u8]| {
            let placements: BTreeSet<Placement> = starts.iter().map(|start| placement(*start)).collect();
            store.write(move |tx| tx.set_created_instances(&gpu.into(), placements.clone())).wait().unwrap();
        };
        write(&store, "GPU-0", &[0, 2]);
        write(&store, "GPU-1", &[4]);
        write(&store, "GPU-1", &[]);
        drop(store);
        let store = Store::open(directory.path(), options("two")).unwrap().store;
        let read = |boot: &'static str| store.read(move |view| view.created_instances(boot)).wait().unwrap();
        assert_eq!(read("one"), BTreeMap::from([("GPU-0".into(), [placement(0), placement(2)].into())]));
        assert_eq!(read("two"), CreatedInstances::new());
        write(&store, "GPU-1", &[0]);
        assert_eq!(read("two").len(), 1);
        assert_eq!(read("one"), CreatedInstances::new());
    }
}
