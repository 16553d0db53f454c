//! The socket: how it is made, who connects, and how much of us one caller may have.
//!
//! ```text
//! socket   makes or takes over the listening sockets; stale files replaced, live ones refused
//! accept   the loop: credentials, caps, one task a connection
//! accounts that a connection counts for: owners of subordinate uids, admin groups
//! caps     limits of connections by account and in all
//! pace     the deadlines of one connection: its head, its idleness
//! ```
//!
//! The loop is our own because all of it is decided before the first byte is read, and nothing
//! ready-made hands credentials to requests.

pub(crate) mod accept;
pub(crate) mod accounts;
mod caps;
pub(crate) mod pace;
pub(crate) mod socket;
