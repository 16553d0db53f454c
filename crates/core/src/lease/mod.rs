//! Leases, as pure decisions: what a request means, where it is placed, whether a quota allows it, in which order
//! requests are served, and how a lease lives and ends.
//!
//! ```text
//! flags, Slurm spec ──request──► LeaseRequest ──quota──► queue ──placement──► machine ──► environment
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `request` | the textual grammar of requests, and their validation |
//! | `placement` | targets for a request, all of a gang or none |
//! | `quota` | limits by user and group |
//! | `queue` | order of arrival and reservations |
//! | `machine` | states of one lease |
//! | `usage` | leases in the way of a change |
//! | `environment` | the variables that the processes of a lease get |

pub mod environment;
pub mod machine;
pub mod placement;
pub mod queue;
pub mod quota;
pub mod request;
pub mod usage;
