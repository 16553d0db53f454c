//! Compares the hardware with the desired state: when gpushd starts, after a reading, and after a reload of the config.

pub(crate) mod monitor;
pub(crate) mod reload;
pub(crate) mod startup;
pub(crate) mod xid_processes;
