//! Pure functions for leases: they parse requests, apply quotas, choose targets, and compute the states of a lease.
//!
//! ```text
//! flags, Slurm spec ──request──► LeaseRequest ──quota──► placement ──► machine ──► environment
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `request` | the textual grammar of requests, and their validation |
//! | `access` | the devices that the processes of a lease may open |
//! | `capacity` | which leases occupy a target |
//! | `placement` | chooses targets for a request; a gang gets all of its targets or none |
//! | `quota` | limits by user and group |
//! | `machine` | states of one lease |
//! | `notice` | what gpushd tells the holder of a lease, and when |
//! | `unused` | what gpushd tells the holder of a lease that is not used |
//! | `time_left` | the time until something happens, in words |
//! | `usage` | leases that block a change |
//! | `user_limits` | limits of a user's slice for the slice of the user's leases |
//! | `environment` | the environment variables of a lease's processes |

pub mod access;
pub mod capacity;
pub mod environment;
pub mod machine;
pub mod notice;
pub mod over_limit;
pub mod placement;
pub mod quota;
pub mod request;
mod time_left;
pub mod unused;
pub mod usage;
pub mod user_limits;
