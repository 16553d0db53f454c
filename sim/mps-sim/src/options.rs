//! The command line of the control program.
//!
//! | version | arguments |
//! |---|---|
//! | 535, 550 | one argument: `-d`, `-f` or `-h`. Anything else starts the front-end |
//! | 555 | several of `-d`, `-f` and `-multiuser-server` (root only), or only `-h` |
//!
//! If version 555 gets any other argument, it prints the help and exits with 1.

use std::ffi::OsString;

use crate::place::Version;

/// With this option, one server serves clients of all users. The server runs as root.
pub(crate) const MULTI_USER: &str = "-multiuser-server";
/// Internal argument: `-d` starts the daemon's background process with it.
pub(crate) const BEHIND: &str = "--behind";

/// The action that a command line requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Foreground {
        multi_user: bool,
    },
    Background {
        multi_user: bool,
    },
    /// Run as the background process that `-d` starts.
    Behind {
        multi_user: bool,
    },
    FrontEnd,
    Help,
    /// Print the help, and exit with an error.
    Usage,
    /// Fail, because the user is not root and requests `-multiuser-server`.
    OnlyRoot,
}

impl Action {
    /// Parses the arguments as this version of the control program does.
    pub(crate) fn of(version: Version, arguments: &[OsString]) -> Self {
        let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
        let is_root = nix::unistd::geteuid().is_root();
        if version < Version::V555 { Self::of_one(&words) } else { Self::of_several(&words, is_root) }
    }

    fn of_one(words: &[&str]) -> Self {
        match words {
            ["-f"] => Self::Foreground { multi_user: false },
            ["-d"] => Self::Background { multi_user: false },
            [BEHIND] => Self::Behind { multi_user: false },
            ["-h"] => Self::Help,
            [] | [_, ..] => Self::FrontEnd,
        }
    }

    fn of_several(words: &[&str], is_root: bool) -> Self {
        if let ["-h" | "--help"] = words {
            return Self::Help;
        }
        if words.iter().any(|word| !["-d", "-f", BEHIND, MULTI_USER].contains(word)) {
            return Self::Usage;
        }
        let multi_user = words.contains(&MULTI_USER);
        let daemon = if words.contains(&"-f") {
            Self::Foreground { multi_user }
        } else if words.contains(&"-d") {
            Self::Background { multi_user }
        } else if words.contains(&BEHIND) {
            Self::Behind { multi_user }
        } else {
            return Self::FrontEnd;
        };
        if multi_user && !is_root { Self::OnlyRoot } else { daemon }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_parse_exactly_one_argument() {
        assert_eq!(Action::of_one(&["-f"]), Action::Foreground { multi_user: false });
        for words in [&["-f", MULTI_USER][..], &[MULTI_USER], &["-x"], &[]] {
            assert_eq!(Action::of_one(words), Action::FrontEnd, "{words:?}");
        }
    }

    /// This behaviour was observed with the control program of version 555.58.02.
    #[test]
    fn version_555_rejects_unknown_arguments() {
        let of = |words: &[&str]| Action::of_several(words, true);
        assert_eq!(of(&["-f", MULTI_USER]), Action::Foreground { multi_user: true });
        assert_eq!(of(&[MULTI_USER, "-d"]), Action::Background { multi_user: true });
        assert_eq!((of(&[MULTI_USER]), of(&[])), (Action::FrontEnd, Action::FrontEnd));
        assert_eq!((of(&["-h"]), of(&["-h", MULTI_USER]), of(&["-x"])), (Action::Help, Action::Usage, Action::Usage));
        assert_eq!(Action::of_several(&["-f", MULTI_USER], false), Action::OnlyRoot);
        assert_eq!(Action::of_several(&[MULTI_USER], false), Action::FrontEnd);
    }
}
