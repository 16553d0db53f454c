//! The logs of a control daemon and its servers.
//!
//! | file | subject |
//! |---|---|
//! | `parser` | facts in the control daemon's log that no command reports |
//! | `tail` | the last lines, as the API shows them |
//! | `filter` | omits the lines that gpushd's own probes cause |
//! | `rotation` | limits the size of the logs |

mod filter;
mod parser;
mod rotation;
mod tail;

pub use self::tail::last;
pub(super) use self::{
    parser::LogParser,
    rotation::{LogRotation, RotationConfig},
};

/// File name of the control daemon's log.
pub(super) const CONTROL_LOG: &str = "control.log";

/// File name of the log that all servers of a daemon write to.
pub(super) const SERVER_LOG: &str = "server.log";
