//! Converts the API's types into text for users.
//!
//! The functions depend only on a value and an [`Appearance`] (width, character set, time), so
//! their snapshot tests need neither gpushd nor a terminal. The returned text contains colors. If
//! the output does not support them, the caller removes them.

pub(crate) mod advise;
pub(crate) mod appearance;
pub(crate) mod assertion;
pub(crate) mod audit;
pub(crate) mod bar;
pub(crate) mod bill;
pub(crate) mod config;
pub(crate) mod cordon;
mod device_rows;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod enforce;
mod equal_errors;
pub(crate) mod events;
pub(crate) mod gpu;
pub(crate) mod gpu_list;
mod gpu_notes;
pub(crate) mod holders;
pub(crate) mod host;
pub(crate) mod isolation;
pub(crate) mod lease;
pub(crate) mod listing;
pub(crate) mod mig_history;
pub(crate) mod mps;
pub(crate) mod names;
pub(crate) mod operation;
pub(crate) mod operation_list;
pub(crate) mod overrides;
pub(crate) mod plan;
mod policy;
pub(crate) mod process_names;
pub(crate) mod processes;
pub(crate) mod profiles;
pub(crate) mod progress;
pub(crate) mod quota;
mod sensors;
pub(crate) mod show;
pub(crate) mod slices;
pub(crate) mod status;
pub(crate) mod summary;
pub(crate) mod support_bundle;
pub(crate) mod table;
pub(crate) mod timeslice;
pub(crate) mod topics;
pub(crate) mod trouble;
pub(crate) mod usage_report;

#[cfg(test)]
pub(crate) mod fixtures;
#[cfg(test)]
mod pictures;

pub(crate) use appearance::{Appearance, Charset};
