//! The listening sockets: creation, peer credentials, and limits for each caller.
//!
//! ```text
//! socket            creates or takes over the listening sockets; replaces only stale socket files
//! accept            the loop: credentials, caps, one task per connection
//! caps              limits of connections per account and in total
//! connection_timer  time limits of one connection: for a request head, and for idle time
//! ```
//!
//! gpushd does not use axum's accept loop, because gpushd must decide about a connection before the first byte is read.
//! Also, no available crate passes peer credentials to requests.

pub(crate) mod accept;
mod caps;
pub(crate) mod connection_timer;
pub(crate) mod socket;
