//! The API on the sockets: connections, handlers, authorization, health.

pub(crate) mod authorization;
pub(crate) mod health;
pub(crate) mod http;
pub(crate) mod listen;
