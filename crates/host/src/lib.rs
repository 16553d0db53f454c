//! Access to the operating system.
//!
//! | module | subject |
//! |---|---|
//! | [`proc`] | processes, from `/proc`, with bounded reads |
//! | [`path_lock`] | a lock for a path |
//! | [`pidfd`] | a process identified by its pidfd: signals, and waiting for its end |
//! | [`peer`] | the process at the other end of a Unix socket |
//! | [`users`] | users and groups, from the name service |
//! | [`accounts`] | the account of a uid: a user with all subordinate uids |
//! | [`config_accounts`] | notes about users and groups that the config names but the host does not have |
//! | [`identity`] | user and command line of a process |
//! | [`device_files`] | processes that have a GPU's device node open |
//! | [`capability_files`] | the nodes of MIG capabilities |
//! | [`device_probe`] | a program that tries to open a device |
//! | [`driver_devices`] | major numbers of the driver's devices |
//! | [`error_chain`] | an error and its causes as one line of text |
//! | [`cgroup`] | the systemd unit and the Slurm job of a process |
//! | [`process_facts`] | the facts that decide to which lease a process belongs |
//! | [`acl`] | POSIX access lists of directories and files |
//! | [`boot`] | the boot id |
//! | [`machine`] | a description of the host, for the log |
//! | [`terminal`] | lines on the terminals of a user's processes |
//! | [`systemd`] | units, through D-Bus |
//! | [`notify`] | notifications to the service manager |
//! | [`kernel_log`] | messages of the kernel about Xid errors |
//! | [`helper`] | helper units: programs that run outside gpushd's own unit |
//! | [`other_managers`] | other managers of MIG layouts on this host |
//!
//! This crate uses only `gpush-api` and `gpush-core`. It does not use the store, the driver, or the state of gpushd.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests start their own tasks"))]

pub mod accounts;
pub mod acl;
pub mod boot;
pub mod capability_files;
pub mod cgroup;
pub mod config_accounts;
pub mod device_files;
pub mod device_probe;
pub mod driver_devices;
pub mod error_chain;
pub mod helper;
pub mod identity;
pub mod kernel_log;
pub mod machine;
mod name_cache;
mod name_service_outage;
pub mod notify;
pub mod other_managers;
pub mod path_lock;
pub mod peer;
pub mod pidfd;
pub mod proc;
pub mod process_facts;
pub mod subtask;
pub mod systemd;
pub mod terminal;
mod transient_uids;
pub mod users;
