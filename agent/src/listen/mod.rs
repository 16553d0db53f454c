//! The listening sockets: creation, peer credentials, and limits for each caller.
//!
//! ```text
//! socket   creates or takes over the listening sockets; stale files replaced, live ones refused
//! accept   the loop: credentials, caps, one task per connection
//! accounts that a connection counts for: owners of subordinate uids, admin groups
//! caps     limits of connections by account and in all
//! pace     the time limits of one connection: its head, its idle time
//! ```
//!
//! The accept loop is gpushd's own, because these decisions precede the first byte of a request, and no
//! available crate passes peer credentials to requests.

pub(crate) mod accept;
pub(crate) mod accounts;
mod caps;
pub(crate) mod pace;
pub(crate) mod socket;
