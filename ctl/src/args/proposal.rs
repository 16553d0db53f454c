//! The hint that proposes a command line. A proposed request asks for a share that the caller may lease on this host.

use gpush_api::LeaseKind;
use gpush_core::lease::request;

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
    /// The kinds that the caller may lease, also those of GPUs that are not ready.
    pub(crate) kinds: Vec<LeaseKind>,
    /// What a request without a share means, by the caller's quota.
    pub(crate) default: Option<OfferedShare>,
    /// Whether only Slurm jobs can lease the GPUs. The shares are then those of jobs.
    pub(crate) only_slurm: bool,
    /// Number of GPUs that only Slurm jobs can lease.
    pub(crate) slurm_gpus: usize,
    /// Indexes of the GPUs in mode `mig`.
    pub(crate) mig_gpus: Vec<String>,
    /// Whether a GPU is in MIG mode, perhaps without a rule.
    pub(crate) has_mig: bool,
    /// The largest MPS percentage that the quota allows now, in percent; `None` without such a limit.
    pub(crate) mps_percent: Option<u32>,
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
            Some(offers) if offers.only_slurm && choice.is_request() => {
                let (words, remark) = choice.made(words, &offers);
                // Drop a remark with options of gpushctl, which `srun` does not have.
                let remark = if matches!(choice, Choice::Share { .. }) { String::new() } else { remark };
                return Some(slurm_job::hint(&words, &remark, offers.slurm_gpus));
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
    /// What lists free capacity: MIG devices, or GPUs on a host without MIG. The list begins at this position.
    Free { at: usize },
    /// Nothing. But on a host of Slurm, the request is one for a job.
    Complete,
}

impl Choice {
    fn of(all: &[String]) -> Option<Self> {
        let end = all.iter().position(|word| word == "--").unwrap_or(all.len());
        let words: Vec<&str> = all[..end].iter().map(String::as_str).collect();
        if words.windows(5).any(|five| five == MIG_GPUS) {
            return Some(Self::MigGpus);
        }
        if let Some(at) = words.windows(3).position(|three| three == ["mig", "list", "--free"]) {
            return Some(Self::Free { at });
        }
        let is_request =
            words.contains(&"run") || words.windows(2).any(|two| matches!(two, ["lease", "request" | "env"]));
        let names_lease = words.contains(&"env") && words.iter().any(|word| lease(word).is_some());
        let names = |flag: &str| words.iter().position(|word| word.split('=').next() == Some(flag));
        if !is_request || names_lease || names("--help").or_else(|| names("--lease")).is_some() {
            return None;
        }
        if names("--target").is_some() {
            return Some(Self::Complete);
        }
        if let Some(at) = names("--request") {
            let attached = words[at].split_once('=').map(|(_, text)| text);
            let text = attached.or_else(|| words.get(at + 1).copied()).unwrap_or_default();
            let kind = request::parse(text).ok().and_then(|request| request.share.kind());
            let number = 1 + usize::from(attached.is_none());
            return Some(kind.map_or(Self::Complete, |kind| Self::Kind { at, number, kind }));
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

    /// Returns whether the command line requests a share.
    fn is_request(self) -> bool {
        match self {
            Self::Share { .. } | Self::Kind { .. } | Self::Memory { .. } | Self::Complete => true,
            Self::MigGpus | Self::Free { .. } => false,
        }
    }

    /// Returns the remark about the proposed command line if gpushd does not say what the host offers.
    fn remark_without_offers(self, words: &[String]) -> &'static str {
        match self {
            Self::Share { .. } => " Add a share if the host offers several kinds, such as --memory 10G",
            Self::Kind { at, .. } if words.get(at + 1).is_some_and(|word| word == PROFILE) => {
                " `gpushctl mig list --free` lists free devices"
            }
            Self::Kind { .. } | Self::Memory { .. } | Self::MigGpus | Self::Free { .. } | Self::Complete => "",
        }
    }

    /// Returns the command line with the choice made, and a remark about it.
    fn made(self, words: &[String], offers: &Offers) -> (Vec<String>, String) {
        let plain = || (words.to_vec(), String::new());
        let of_kind = |wanted: LeaseKind| offers.shares.iter().find(|share| share.kind == wanted);
        let is_possible = |share: &&OfferedShare| offers.kinds.contains(&share.kind);
        let first = offers.default.as_ref().filter(is_possible).or_else(|| offers.shares.first());
        let cannot = |what: &str| format!(" You cannot lease {what} on this host");
        match self {
            Self::Complete => plain(),
            Self::MigGpus if offers.mig_gpus.is_empty() => plain(),
            Self::MigGpus => {
                let at = words.windows(5).position(|five| five == MIG_GPUS).map_or(0, |at| at + 4);
                let after = words.get(at + 1..).unwrap_or_default();
                ([&words[..at], &[offers.mig_gpus.join(",")], after].concat(), String::new())
            }
            Self::Free { .. } if offers.has_mig => plain(),
            Self::Free { at } => {
                let list = ["status", "--summary"].map(str::to_owned);
                ([&words[..at], &list].concat(), " No GPU of this host is in MIG mode".to_owned())
            }
            Self::Kind { at, number, kind } => match (of_kind(kind), first) {
                (Some(share), _) if words.get(at + 1).is_some_and(|word| word == PROFILE) => {
                    (with_share(words, at, number, share), String::new())
                }
                // Without a percentage, the lease would take the whole target.
                (Some(share), _) if kind == LeaseKind::Mps && exceeds(words, at, offers.mps_percent) => {
                    let most = offers.mps_percent.unwrap_or_default();
                    (with_share(words, at, number, share), format!(" Your quota allows {most} % at most"))
                }
                (None, Some(other)) if !offers.kinds.contains(&kind) => {
                    (with_share(words, at, number, other), cannot(name(kind)))
                }
                (Some(_), _) | (None, None | Some(_)) => plain(),
            },
            // For a MIG device, `--memory` is the minimum memory of the device; for MPS, the maximum memory of each process.
            Self::Memory { at } => match (of_kind(LeaseKind::Mig), of_kind(LeaseKind::Mps), first) {
                (None, Some(share), _) => (with_share(words, at, 0, share), String::new()),
                (None, None, Some(other)) => (with_share(words, at, 0, other), cannot("a part of a GPU by its memory")),
                (Some(_), ..) | (None, None, None) => plain(),
            },
            // Slurm knows no default request, and a job needs a share on most GPUs.
            Self::Share { at } if offers.only_slurm => match first {
                Some(share) => (with_share(words, at, 0, share), String::new()),
                None => plain(),
            },
            Self::Share { .. } if offers.default.is_some() => plain(),
            Self::Share { at } => match offers.shares.as_slice() {
                // Without a percentage, a request for MPS means the whole target.
                [share] if share.kind == LeaseKind::Mps && offers.mps_percent.is_some() => {
                    (with_share(words, at, 0, share), String::new())
                }
                [] | [_] => plain(),
                [first, others @ ..] => {
                    let others: Vec<String> =
                        others.iter().map(|share| format!("`{}`", share.flags.join(" "))).collect();
                    let remark = format!(" This host also has {}", others.join(" or "));
                    (with_share(words, at, 0, first), remark)
                }
            },
        }
    }
}

/// Replaces `number` words at a position by the options of a share. Removes the other options that this share does not have.
fn with_share(words: &[String], at: usize, number: usize, share: &OfferedShare) -> Vec<String> {
    let not_taken: &[&str] = match share.kind {
        LeaseKind::Mps => &["--slices", "--count"],
        LeaseKind::Mig => &["--memory", "--slices", "--priority"],
        LeaseKind::Timeslice => &["--memory", "--slices", "--priority", "--count"],
        LeaseKind::Whole => &["--memory", "--slices", "--priority"],
    };
    let after = words.get(at + number..).unwrap_or_default();
    let (mut before, mut after) = (words[..at].to_vec(), after.to_vec());
    for flag in not_taken {
        (before, after) = (without(before, flag), without(after, flag));
    }
    let names_end = |words: &[String]| words.iter().take_while(|word| *word != "--").any(|word| is_flag(word, "--for"));
    let flags = share.flags.clone();
    // The user's duration comes before that of the quota.
    let flags = if names_end(&before) || names_end(&after) { without(flags, "--for") } else { flags };
    [before, flags, after].concat()
}

/// Returns whether the MPS share that `--mps` or `--request` at this position requests is larger than `most` percent.
fn exceeds(words: &[String], at: usize, most: Option<u32>) -> bool {
    let Some(most) = most else { return false };
    let value = words[at].split_once('=').map(|(_, value)| value).or_else(|| words.get(at + 1).map(String::as_str));
    let text = value.unwrap_or_default().trim_start_matches("mps=");
    let percent: f64 = text.split(',').next().unwrap_or_default().trim_end_matches('%').parse().unwrap_or(100.0);
    percent > f64::from(most)
}

fn is_flag(word: &str, flag: &str) -> bool {
    word.split('=').next() == Some(flag)
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

/// Removes an option with its value before `--`.
fn without(mut words: Vec<String>, flag: &str) -> Vec<String> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    if let Some(at) = words[..end].iter().position(|word| is_flag(word, flag)) {
        let number = if words[at].contains('=') { 1 } else { 2 };
        words.drain(at..(at + number).min(end));
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
        let kinds = shares.iter().map(|(kind, _)| *kind).collect();
        let shares = shares.iter().map(share).collect();
        Offers { shares, kinds, mig_gpus, slurm_gpus: 4, has_mig: true, ..Offers::default() }
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
            (
                "run --memory 8G --for 2h -- x",
                &[WHOLE],
                "run --whole --for 2h -- x You cannot lease a part of a GPU by its memory on this host",
            ),
            (
                "run --mps 50 --memory 8G --priority normal -- x",
                &[WHOLE],
                "run --whole -- x You cannot lease an MPS share on this host",
            ),
            ("run --whole --count=2 -- x", &[MPS], "run --mps 25 -- x You cannot lease a whole GPU on this host"),
            (
                "run --mps 50 --for 2h -- x",
                &[(LeaseKind::Mig, "--mig 1g.10gb --for 4h")],
                "run --mig 1g.10gb --for 2h -- x You cannot lease an MPS share on this host",
            ),
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

    /// Fault: while a GPU was cordoned, a correct kind was replaced, with an untrue remark.
    #[test]
    fn kind_of_a_gpu_that_is_not_ready_is_kept() {
        let offers = Offers { kinds: vec![LeaseKind::Mps, LeaseKind::Whole], ..offers(&[WHOLE]) };
        assert_eq!(hint("run --mps 50 -- x", Some(offers)), "run --mps 50 -- x");
    }

    /// Fault: where only Slurm jobs can lease GPUs, hints proposed `gpushctl run`, which gpushd refuses.
    #[test]
    fn request_on_a_host_of_slurm_becomes_a_job() {
        let why = "Only Slurm jobs can lease the GPUs of this host.";
        for (meant, shares, expected) in [
            ("run -- x", &[MPS, WHOLE][..], format!("srun --gres=gpu:1 --comment=gpush:mps=25 x`? {why}")),
            ("run --whole -- x", &[WHOLE], format!("srun --gres=gpu:1 x`? {why}")),
            ("run -- x", &[MPS], format!("srun --gres=gpu:1 --comment=gpush:mps=25 x`? {why}")),
            (
                "run --request mps=30,memory=4G -- x",
                &[WHOLE],
                format!("srun --gres=gpu:1 x`? {why} You cannot lease an MPS share on this host"),
            ),
            ("run --whole --count 5 -- x", &[WHOLE], format!("srun --gres=gpu:4 x`? {why}")),
            (
                "run --request mps=30,memory=4G -- x",
                &[MPS],
                format!("srun --gres=gpu:1 --comment=gpush:mps=30,memory=4G x`? {why}"),
            ),
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

    /// Faults: hints named an MPS share without a percentage, or with one that the quota does not allow.
    #[test]
    fn proposed_mps_share_fits_the_quota() {
        let share: (LeaseKind, &str) = (LeaseKind::Mps, "--mps 20");
        let limited = |shares: &[_]| Some(Offers { mps_percent: Some(20), ..offers(shares) });
        let remark = " Your quota allows 20 % at most";
        for (meant, expected) in [
            ("run -- x", "run --mps 20 -- x".to_owned()),
            ("run --mps -- x", format!("run --mps 20 -- x{remark}")),
            ("run --mps 50 --memory 4G -- x", format!("run --mps 20 --memory 4G -- x{remark}")),
            ("run --mps 10 -- x", "run --mps 10 -- x".to_owned()),
        ] {
            assert_eq!(hint(meant, limited(&[share])), expected, "{meant}");
        }
        assert_eq!(hint("run --mps -- x", Some(offers(&[MPS]))), "run --mps -- x");
    }

    #[test]
    fn free_capacity_without_mig_is_that_of_gpus() {
        let without = Offers { has_mig: false, ..offers(&[WHOLE]) };
        let remark = " No GPU of this host is in MIG mode";
        assert_eq!(hint("--json mig list --free", Some(without)), format!("--json status --summary{remark}"));
        assert_eq!(hint("mig list --free", Some(offers(&[MIG]))), "mig list --free");
        assert_eq!(hint("mig list --free", None), "mig list --free");
    }

    #[test]
    fn hint_without_an_answer_of_gpushd_says_what_may_be_missing() {
        assert!(hint("run -- x", None).starts_with("run -- x Add a share"));
        assert!(hint("run --mig PROFILE -- x", None).contains("`gpushctl mig list --free`"));
        assert_eq!(hint("run --whole -- x", None), "run --whole -- x");
    }

    #[test]
    fn command_that_requests_nothing_does_not_ask_gpushd() {
        for line in ["status", "lease env L17", "run --lease L1 -- x", "run --help", "lease list"] {
            let meant = Meant::Gpushctl(line.split(' ').map(str::to_owned).collect());
            let expected = format!("did you mean `gpushctl {line}`?");
            assert_eq!(as_hint(&meant, || panic!("asked")), Some(expected), "{line}");
        }
    }
}
