//! Requests: the caller, the rights of the caller, and what gpushd records about a change.

pub(crate) mod caller;
pub(crate) mod idempotency;
pub(crate) mod request;
