//! The signal with which gpushd announces notices to the processes of a lease.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::BadValue;

/// A signal that announces notices. A process gets it only if it has a handler for it, so no process ends because of it
/// unless its handler says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum NoticeSignal {
    /// SIGUSR1
    Usr1,
    /// SIGUSR2
    Usr2,
    /// SIGHUP
    Hup,
    /// SIGINT
    Int,
    /// SIGTERM
    Term,
    /// SIGURG
    Urg,
    /// SIGWINCH
    Winch,
}

impl NoticeSignal {
    /// All signals.
    pub const ALL: [Self; 7] = [Self::Usr1, Self::Usr2, Self::Hup, Self::Int, Self::Term, Self::Urg, Self::Winch];

    /// Returns the name in JSON and in commands.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Usr1 => "USR1",
            Self::Usr2 => "USR2",
            Self::Hup => "HUP",
            Self::Int => "INT",
            Self::Term => "TERM",
            Self::Urg => "URG",
            Self::Winch => "WINCH",
        }
    }
}

impl fmt::Display for NoticeSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NoticeSignal {
    type Err = BadValue;

    /// Parses a name, with or without `SIG`, in any case.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        Self::ALL.into_iter().find(|signal| signal.name() == name).ok_or_else(|| BadValue {
            text: text.to_owned(),
            what: "signal for notices",
            why: "write USR1, USR2, HUP, INT, TERM, URG or WINCH",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_their_names_in_json_and_are_parsed_with_and_without_sig() {
        for signal in NoticeSignal::ALL {
            assert_eq!(serde_json::to_value(signal).unwrap(), signal.name());
            for text in [signal.name().to_owned(), format!("SIG{signal}"), signal.name().to_lowercase()] {
                assert_eq!(text.parse::<NoticeSignal>(), Ok(signal));
            }
        }
        for wrong in ["", "KILL", "10", "SIG", "USR3", "RTMIN"] {
            assert!(wrong.parse::<NoticeSignal>().is_err(), "{wrong}");
        }
    }
}
