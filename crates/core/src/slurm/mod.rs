//! Slurm's hooks, as pure decisions: what a hook's environment says, what a job requests, which devices it has, and
//! whether the hook fails.
//!
//! ```text
//! Prolog's environment ──environment──► Job ─┬─request──► share, refusal, or none
//!                        gres.conf ──────────┴─devices──► UUIDs, minors
//!                                             │
//!                     ask gpushd ◄── concerns ┘
//!                         │
//!                      decide ──► exit status, and the file of the job (`file`) for TaskProlog
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `environment` | variables of Prolog and Epilog |
//! | `request` | the share that a job requests, by all channels |
//! | `devices` | the devices that Slurm allocated |
//! | `decide` | the exit status of a hook |
//! | `file` | the file of a job, and what TaskProlog prints |

pub mod decide;
pub mod devices;
pub mod environment;
pub mod file;
pub mod request;

pub use environment::Job;
