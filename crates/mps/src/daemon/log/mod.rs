//! The logs of a control daemon and its servers.
//!
//! | file | subject |
//! |---|---|
//! | `parser` | what gpushd reads from the control daemon's log, because no command reports it |
//! | `tail` | the last lines, as the API shows them |
//! | `filter` | leaves out the lines that gpushd's own probes write |
//! | `rotation` | limits the size of the logs |

mod filter;
mod parser;
mod rotation;
mod tail;

pub use self::tail::last;
pub(super) use self::{parser::LogParser, rotation::LogRotation};

/// File name of the control daemon's log.
pub(super) const CONTROL_LOG: &str = "control.log";

/// File name of the log of all servers of a daemon.
pub(super) const SERVER_LOG: &str = "server.log";
