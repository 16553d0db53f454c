//! The state of the control daemon that its commands read and change.

use crate::{
    log::Log,
    place::{Environment, Version},
    servers::{Defaults, Servers},
};

/// The state of a control daemon, without its connections.
pub(crate) struct DaemonState {
    pub(crate) place: Environment,
    pub(crate) version: Version,
    pub(crate) log: Log,
    pub(crate) defaults: Defaults,
    pub(crate) servers: Servers,
}
