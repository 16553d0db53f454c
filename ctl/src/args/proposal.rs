//! The hint that proposes a command line. A proposed request asks for a share that the caller may lease on this host.

use gpush_api::LeaseKind;

use super::{phrases::Meant, typed, words::PROFILE};

/// What the host offers to the caller.
#[derive(Debug, Clone, Default)]
pub(crate) struct Offers {
    /// Shares that the caller may lease, one of each kind, the best first. If the caller's quota has a default request,
    /// only this request.
    pub(crate) shares: Vec<OfferedShare>,
    /// Indexes of the GPUs in mode `mig`.
    pub(crate) mig_gpus: Vec<String>,
}

/// A share that the caller may lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfferedShare {
    pub(crate) kind: LeaseKind,
    /// The options that request the share: `--mps 25`.
    pub(crate) flags: Vec<String>,
}

/// Options of a request that say which share is meant.
const NAMES_SHARE: [&str; 9] =
    ["--mig", "--memory", "--slices", "--mps", "--timeslice", "--whole", "--request", "--target", "--lease"];

/// Returns the hint for a refused command line. `typed` are its words. `offers` asks what the host offers; it is called
/// only if the hint depends on that, and returns `None` if gpushd does not answer.
pub(crate) fn as_hint(meant: &Meant, typed: &[&str], offers: impl FnOnce() -> Option<Offers>) -> Option<String> {
    let words = match meant {
        Meant::Other(command) => return Some(format!("did you mean `{command}`?")),
        Meant::Gpushctl(words) => words,
    };
    let (words, remark) = match Choice::of(words, typed) {
        Some(choice) => choice.made(words, offers()),
        None => (words.clone(), String::new()),
    };
    let line = typed::command_line(["gpushctl"].into_iter().chain(words.iter().map(String::as_str)))?;
    Some(format!("did you mean `{line}`?{remark}"))
}

/// What a proposed command line leaves to the offers of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The share, which options at this position request.
    Share(usize),
    /// A whole GPU, which the user asked for in other words: `--gpus 1`. Contains the position of `--whole`.
    Whole(usize),
    /// The profile of a MIG device. Contains the position of `--mig`.
    Profile(usize),
    /// The GPUs whose instances are removed. Contains the position of `all`.
    MigGpus(usize),
}

impl Choice {
    fn of(words: &[String], typed: &[&str]) -> Option<Self> {
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        let words: Vec<&str> = words[..end].iter().map(String::as_str).collect();
        if let Some(at) = words.windows(5).position(|five| five == ["mig", "apply", "none", "-g", "all"]) {
            return Some(Self::MigGpus(at + 4));
        }
        let is_request =
            words.contains(&"run") || words.windows(2).any(|two| matches!(two, ["lease", "request" | "env"]));
        if !is_request || words.contains(&"--help") {
            return None;
        }
        if let Some(at) = words.windows(2).position(|two| two == ["--mig", PROFILE]) {
            return Some(Self::Profile(at));
        }
        let at = words.iter().position(|word| *word == "--whole");
        if let Some(at) = at.filter(|_| !typed.iter().any(|word| matches!(*word, "--whole" | "whole"))) {
            return Some(Self::Whole(at));
        }
        let names_share = |word: &&str| NAMES_SHARE.contains(&word.split('=').next().unwrap_or_default());
        let names_lease = words.contains(&"env") && words.iter().any(|word| super::words::lease(word).is_some());
        let at = words.iter().position(|word| matches!(*word, "run" | "request" | "env"))?;
        (!words.iter().any(names_share) && !names_lease).then_some(Self::Share(at + 1))
    }

    /// Returns the command line with the choice made, and a remark about it.
    fn made(self, words: &[String], offers: Option<Offers>) -> (Vec<String>, String) {
        let plain = |remark: &str| (words.to_vec(), remark.to_owned());
        let Some(Offers { shares, mig_gpus }) = offers else {
            return plain(match self {
                Self::Share(_) => " Add a share if the host offers several kinds, such as --memory 10G",
                Self::Profile(_) => " `gpushctl mig list --free` lists free devices",
                Self::Whole(_) | Self::MigGpus(_) => "",
            });
        };
        let replaced = |at: usize, number: usize, new: &[String]| {
            let after = words.get(at + number..).unwrap_or_default();
            [&words[..at], new, after].concat()
        };
        let of_kind = |wanted: LeaseKind| shares.iter().find(|share| share.kind == wanted);
        let instead = |at: usize, number: usize, wanted: LeaseKind, what: &str| match (of_kind(wanted), shares.first())
        {
            (Some(share), _) => (replaced(at, number, &share.flags), String::new()),
            (None, Some(other)) => {
                let words = replaced(at, number, &other.flags);
                let words = if other.kind == LeaseKind::Mig { words } else { without_count(words) };
                (words, format!(" You cannot lease {what} on this host"))
            }
            (None, None) => plain(""),
        };
        match self {
            Self::MigGpus(_) if mig_gpus.is_empty() => plain(""),
            Self::MigGpus(at) => (replaced(at, 1, &[mig_gpus.join(",")]), String::new()),
            Self::Whole(at) => instead(at, 1, LeaseKind::Whole, "a whole GPU"),
            Self::Profile(at) => instead(at, 2, LeaseKind::Mig, "a MIG device"),
            Self::Share(at) => match shares.as_slice() {
                [] | [_] => plain(""),
                [first, others @ ..] => {
                    let others: Vec<String> =
                        others.iter().map(|share| format!("`{}`", share.flags.join(" "))).collect();
                    (replaced(at, 0, &first.flags), format!(" This host also has {}", others.join(" or ")))
                }
            },
        }
    }
}

/// Removes `--count`: a lease of a share that several programs use has no count.
fn without_count(mut words: Vec<String>) -> Vec<String> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    if let Some(at) = words[..end].iter().position(|word| word == "--count") {
        words.drain(at..(at + 2).min(end));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(shares: &[(LeaseKind, &str)]) -> Offers {
        let share = |(kind, flags): &(LeaseKind, &str)| OfferedShare {
            kind: *kind,
            flags: flags.split(' ').map(str::to_owned).collect(),
        };
        Offers { shares: shares.iter().map(share).collect(), mig_gpus: vec!["0".to_owned(), "3".to_owned()] }
    }

    fn hint(typed: &str, meant: &str, offers: Option<Offers>) -> String {
        let meant = Meant::Gpushctl(meant.split(' ').map(str::to_owned).collect());
        let typed: Vec<&str> = typed.split(' ').collect();
        let hint = as_hint(&meant, &typed, || offers).unwrap();
        hint.replace("did you mean `gpushctl ", "").replacen("`?", "", 1)
    }

    const MIG: (LeaseKind, &str) = (LeaseKind::Mig, "--mig 1g.10gb");
    const MPS: (LeaseKind, &str) = (LeaseKind::Mps, "--mps 25");
    const WHOLE: (LeaseKind, &str) = (LeaseKind::Whole, "--whole");

    /// Faults: hints named shares that the host does not have, or that the caller may not lease.
    #[test]
    fn proposed_request_has_a_share_that_the_host_offers() {
        for (typed, meant, shares, expected) in [
            ("run x", "run -- x", &[WHOLE][..], "run -- x"),
            ("run x", "run -- x", &[], "run -- x"),
            ("run x", "run -- x", &[MIG, MPS], "run --mig 1g.10gb -- x This host also has `--mps 25`"),
            ("--json run x", "--json run -- x", &[MPS, WHOLE], "--json run --mps 25 -- x This host also has `--whole`"),
            (
                "create lease",
                "lease request --for 2h",
                &[MIG, MPS],
                "lease request --mig 1g.10gb --for 2h This host \
                also has `--mps 25`",
            ),
            ("run --gpus 1 x", "run --whole -- x", &[MIG, WHOLE], "run --whole -- x"),
            (
                "run --gpus 2 x",
                "run --whole --count 2 -- x",
                &[MIG],
                "run --mig 1g.10gb --count 2 -- x You cannot \
                lease a whole GPU on this host",
            ),
            (
                "run --gpus 2 x",
                "run --whole --count 2 -- x",
                &[MPS],
                "run --mps 25 -- x You cannot lease a whole GPU \
                on this host",
            ),
            ("run --whole x", "run --whole -- x", &[MIG], "run --whole -- x"),
            ("run --mig -- x", "run --mig PROFILE -- x", &[MPS, MIG], "run --mig 1g.10gb -- x"),
            (
                "run --mig -- x",
                "run --mig PROFILE -- x",
                &[WHOLE],
                "run --whole -- x You cannot lease a MIG device on \
                this host",
            ),
            ("run 25 x", "run --mps 25 -- x", &[MIG, WHOLE], "run --mps 25 -- x"),
            ("exec L1 x", "run --lease L1 -- x", &[MIG, WHOLE], "run --lease L1 -- x"),
            ("mig destroy all", "mig apply none -g all", &[], "mig apply none -g 0,3"),
        ] {
            assert_eq!(hint(typed, meant, Some(offers(shares))), expected, "{typed}");
        }
    }

    #[test]
    fn hint_without_an_answer_of_gpushd_says_what_may_be_missing() {
        assert!(hint("run x", "run -- x", None).starts_with("run -- x Add a share"));
        assert!(hint("run --mig -- x", "run --mig PROFILE -- x", None).contains("`gpushctl mig list --free`"));
        assert_eq!(hint("run --gpus 1 x", "run --whole -- x", None), "run --whole -- x");
    }

    #[test]
    fn command_that_requests_nothing_does_not_ask_gpushd() {
        for line in ["status", "lease env L17", "run --mig 1g.10gb -- x", "lease list"] {
            let meant = Meant::Gpushctl(line.split(' ').map(str::to_owned).collect());
            let expected = format!("did you mean `gpushctl {line}`?");
            assert_eq!(as_hint(&meant, &[], || panic!("asked")), Some(expected), "{line}");
        }
    }
}
