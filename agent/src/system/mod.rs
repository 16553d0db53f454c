//! The process gpushd: options, config, log, signals, supervised tasks, watchdog; and small tools that know nothing of GPUs.

pub(crate) mod account_permits;
pub(crate) mod backoff;
pub(crate) mod coalesced;
pub(crate) mod constants;
pub(crate) mod host_services;
pub(crate) mod late_driver;
pub(crate) mod logging;
pub(crate) mod options;
pub(crate) mod settings;
pub(crate) mod signals;
pub(crate) mod slurm_job;
pub(crate) mod tasks;
pub(crate) mod watchdog;
