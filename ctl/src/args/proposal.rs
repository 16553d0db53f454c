//! The hint that proposes a command line. A proposed request asks for a share that the caller may lease on this host.

use gpush_api::LeaseKind;

use super::{
    phrases::Meant,
    slurm_job, typed,
    words::{PROFILE, is_number, lease},
};

/// What the host offers to the caller.
#[derive(Debug, Clone, Default)]
pub(crate) struct Offers {
    /// Shares that the caller may lease, one of each kind, the best first.
    pub(crate) shares: Vec<OfferedShare>,
    /// What a request without a share means, by the caller's quota.
    pub(crate) default: Option<OfferedShare>,
    /// Whether only Slurm jobs can lease the GPUs. The shares are then those of jobs.
    pub(crate) only_slurm: bool,
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

/// Returns the hint for a refused command line. `offers` asks what the host offers; it is called only if the hint depends
/// on that, and returns `None` if gpushd does not answer.
pub(crate) fn as_hint(meant: &Meant, offers: impl FnOnce() -> Option<Offers>) -> Option<String> {
    let words = match meant {
        Meant::Other(command) => return Some(format!("did you mean `{command}`?")),
        Meant::Gpushctl(words) => words,
    };
    let (words, remark) = match Choice::of(words) {
        Some(choice) => match offers() {
            Some(offers) if offers.only_slurm && choice != Choice::MigGpus => {
                let (words, remark) = choice.made(words, &offers);
                // The other shares of the host are named with options of gpushctl.
                let remark = if matches!(choice, Choice::Share { .. }) { String::new() } else { remark };
                return Some(slurm_job::hint(&words, &remark));
            }
            Some(offers) => choice.made(words, &offers),
            None => (words.clone(), choice.remark_without_offers(words).to_owned()),
        },
        None => (words.clone(), String::new()),
    };
    let line = typed::command_line(["gpushctl"].into_iter().chain(words.iter().map(String::as_str)))?;
    Some(format!("did you mean `{line}`?{remark}"))
}

/// What a proposed command line leaves to the offers of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The share. Options can be added at this position.
    Share { at: usize },
    /// Whether the caller may lease the share that `number` words at this position request.
    Kind { at: usize, number: usize, kind: LeaseKind },
    /// Which part of a GPU has this amount of memory. Contains the position of `--memory`.
    Memory { at: usize },
    /// The GPUs whose instances are removed.
    MigGpus,
}

impl Choice {
    fn of(all: &[String]) -> Option<Self> {
        let end = all.iter().position(|word| word == "--").unwrap_or(all.len());
        let words: Vec<&str> = all[..end].iter().map(String::as_str).collect();
        if words.windows(5).any(|five| five == MIG_GPUS) {
            return Some(Self::MigGpus);
        }
        let is_request =
            words.contains(&"run") || words.windows(2).any(|two| matches!(two, ["lease", "request" | "env"]));
        let names_lease = words.contains(&"env") && words.iter().any(|word| lease(word).is_some());
        let names = |flag: &str| words.iter().position(|word| word.split('=').next() == Some(flag));
        // A lease, a target and a request as text are more than the choice of a share.
        let is_complete = ["--help", "--lease", "--target", "--request"].into_iter().any(|flag| names(flag).is_some());
        if !is_request || names_lease || is_complete {
            return None;
        }
        let kind = |at: usize, has_value: bool, kind: LeaseKind| {
            let number = 1 + usize::from(has_value && !words[at].contains('='));
            Some(Self::Kind { at, number, kind })
        };
        let has_number = |at: usize| words.get(at + 1).is_some_and(|word| is_number(word.trim_end_matches('%')));
        if let Some(at) = names("--mps") {
            return kind(at, has_number(at), LeaseKind::Mps);
        }
        if let Some(at) = names("--mig").or_else(|| names("--slices")) {
            return kind(at, true, LeaseKind::Mig);
        }
        if let Some(at) = names("--timeslice") {
            return kind(at, false, LeaseKind::Timeslice);
        }
        if let Some(at) = names("--whole") {
            return kind(at, false, LeaseKind::Whole);
        }
        if let Some(at) = names("--memory") {
            return Some(Self::Memory { at });
        }
        let at = words.iter().position(|word| matches!(*word, "run" | "request" | "env"))?;
        Some(Self::Share { at: at + 1 })
    }

    /// Returns the remark about the proposed command line if gpushd does not say what the host offers.
    fn remark_without_offers(self, words: &[String]) -> &'static str {
        match self {
            Self::Share { .. } => " Add a share if the host offers several kinds, such as --memory 10G",
            Self::Kind { at, .. } if words.get(at + 1).is_some_and(|word| word == PROFILE) => {
                " `gpushctl mig list --free` lists free devices"
            }
            Self::Kind { .. } | Self::Memory { .. } | Self::MigGpus => "",
        }
    }

    /// Returns the command line with the choice made, and a remark about it.
    fn made(self, words: &[String], offers: &Offers) -> (Vec<String>, String) {
        let plain = || (words.to_vec(), String::new());
        let replaced = |at: usize, number: usize, new: &[String]| {
            let after = words.get(at + number..).unwrap_or_default();
            [&words[..at], new, after].concat()
        };
        let of_kind = |wanted: LeaseKind| offers.shares.iter().find(|share| share.kind == wanted);
        let first = offers.default.as_ref().or_else(|| offers.shares.first());
        match self {
            Self::MigGpus if offers.mig_gpus.is_empty() => plain(),
            Self::MigGpus => {
                let at = words.windows(5).position(|five| five == MIG_GPUS).map_or(0, |at| at + 4);
                (replaced(at, 1, &[offers.mig_gpus.join(",")]), String::new())
            }
            Self::Kind { at, number, kind } => match (of_kind(kind), first) {
                (Some(share), _) if words.get(at + 1).is_some_and(|word| word == PROFILE) => {
                    (replaced(at, number, &share.flags), String::new())
                }
                (Some(_), _) | (None, None) => plain(),
                (None, Some(other)) => {
                    let words = replaced(at, number, &other.flags);
                    let words = if other.kind == LeaseKind::Mig { words } else { without_count(words) };
                    (words, format!(" You cannot lease {} on this host", name(kind)))
                }
            },
            // A MIG device has a minimum of memory, and a process with an MPS share a maximum.
            Self::Memory { at } => match (of_kind(LeaseKind::Mig), of_kind(LeaseKind::Mps)) {
                (None, Some(share)) => (replaced(at, 0, &share.flags), String::new()),
                _ => plain(),
            },
            Self::Share { .. } if offers.default.is_some() => plain(),
            Self::Share { at } => match offers.shares.as_slice() {
                [] | [_] => plain(),
                [first, others @ ..] => {
                    let others: Vec<String> =
                        others.iter().map(|share| format!("`{}`", share.flags.join(" "))).collect();
                    (replaced(at, 0, &first.flags), format!(" This host also has {}", others.join(" or ")))
                }
            },
        }
    }
}

/// The command line that removes the instances of all GPUs.
const MIG_GPUS: [&str; 5] = ["mig", "apply", "none", "-g", "all"];

fn name(kind: LeaseKind) -> &'static str {
    match kind {
        LeaseKind::Mig => "a MIG device",
        LeaseKind::Mps => "an MPS share",
        LeaseKind::Timeslice => "a time-sliced GPU",
        LeaseKind::Whole => "a whole GPU",
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
        let mig_gpus = vec!["0".to_owned(), "3".to_owned()];
        Offers { shares: shares.iter().map(share).collect(), mig_gpus, ..Offers::default() }
    }

    fn hint(meant: &str, offers: Option<Offers>) -> String {
        let meant = Meant::Gpushctl(meant.split(' ').map(str::to_owned).collect());
        let hint = as_hint(&meant, || offers).unwrap();
        hint.replace("did you mean `gpushctl ", "").replacen("`?", "", 1)
    }

    const MIG: (LeaseKind, &str) = (LeaseKind::Mig, "--mig 1g.10gb");
    const MPS: (LeaseKind, &str) = (LeaseKind::Mps, "--mps 25");
    const WHOLE: (LeaseKind, &str) = (LeaseKind::Whole, "--whole");

    /// Faults: hints named shares that the host does not have, or that the caller may not lease.
    #[test]
    fn proposed_request_has_a_share_that_the_host_offers() {
        for (meant, shares, expected) in [
            ("run -- x", &[WHOLE][..], "run -- x"),
            ("run -- x", &[], "run -- x"),
            ("run -- x", &[MIG, MPS], "run --mig 1g.10gb -- x This host also has `--mps 25`"),
            ("--json run -- x", &[MPS, WHOLE], "--json run --mps 25 -- x This host also has `--whole`"),
            (
                "lease request --for 2h",
                &[MIG, MPS],
                "lease request --mig 1g.10gb --for 2h This host \
                also has `--mps 25`",
            ),
            ("run --whole -- x", &[MIG, WHOLE], "run --whole -- x"),
            (
                "run --whole --count 2 -- x",
                &[MIG],
                "run --mig 1g.10gb --count 2 -- x You cannot \
                lease a whole GPU on this host",
            ),
            (
                "run --whole --count 2 -- x",
                &[MPS],
                "run --mps 25 -- x You cannot lease a whole GPU \
                on this host",
            ),
            ("run --memory 8G -- x", &[MIG, MPS], "run --memory 8G -- x"),
            ("run --memory 8G -- x", &[MPS], "run --mps 25 --memory 8G -- x"),
            ("run --mps 50 -- x", &[MPS], "run --mps 50 -- x"),
            ("run --mig PROFILE -- x", &[MPS, MIG], "run --mig 1g.10gb -- x"),
            (
                "run --mig PROFILE -- x",
                &[WHOLE],
                "run --whole -- x You cannot lease a MIG device on \
                this host",
            ),
            ("run --mps 25 -- x", &[MIG, WHOLE], "run --mig 1g.10gb -- x You cannot lease an MPS share on this host"),
            ("run --timeslice -- x", &[WHOLE], "run --whole -- x You cannot lease a time-sliced GPU on this host"),
            ("run --lease L1 -- x", &[MIG, WHOLE], "run --lease L1 -- x"),
            ("mig apply none -g all", &[], "mig apply none -g 0,3"),
        ] {
            assert_eq!(hint(meant, Some(offers(shares))), expected, "{meant}");
        }
    }

    /// Fault: hints on a host of Slurm named `gpushctl run`, which gpushd refuses there.
    #[test]
    fn request_on_a_host_of_slurm_becomes_a_job() {
        let why = "Only Slurm jobs can lease the GPUs of this host.";
        for (meant, shares, expected) in [
            ("run -- x", &[MPS, WHOLE][..], format!("srun --gres=gpu:1 --comment=gpush:mps=25 x`? {why}")),
            ("run --whole -- x", &[WHOLE], format!("srun --gres=gpu:1 x`? {why}")),
            (
                "run --mps 50 -- x",
                &[WHOLE],
                format!("srun --gres=gpu:1 x`? {why} You cannot lease an MPS share on this host"),
            ),
        ] {
            let meant = Meant::Gpushctl(meant.split(' ').map(str::to_owned).collect());
            let hint = as_hint(&meant, || Some(Offers { only_slurm: true, ..offers(shares) }));
            assert_eq!(hint.unwrap(), format!("did you mean `{expected}"));
        }
    }

    #[test]
    fn hint_without_an_answer_of_gpushd_says_what_may_be_missing() {
        assert!(hint("run -- x", None).starts_with("run -- x Add a share"));
        assert!(hint("run --mig PROFILE -- x", None).contains("`gpushctl mig list --free`"));
        assert_eq!(hint("run --whole -- x", None), "run --whole -- x");
    }

    #[test]
    fn command_that_requests_nothing_does_not_ask_gpushd() {
        for line in ["status", "lease env L17", "run --lease L1 -- x", "run --request mps=25 -- x", "lease list"] {
            let meant = Meant::Gpushctl(line.split(' ').map(str::to_owned).collect());
            let expected = format!("did you mean `gpushctl {line}`?");
            assert_eq!(as_hint(&meant, || panic!("asked")), Some(expected), "{line}");
        }
    }
}
