//! Errors in requests. Each error shows the correct notation.

use std::fmt;

use gpush_api::{ApiError, Code, LeaseKind, MOST_MEMBERS};

use super::{Key, LONGEST_SPEC, Spelling};
use crate::selector::SelectorError;

/// Why a request is refused, regardless of the host.
///
/// Texts from the user are quoted: control characters are replaced, and at most 80 characters are
/// shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// The text is longer than [`LONGEST_SPEC`].
    TooLong {
        /// Length of the text.
        bytes: usize,
    },
    /// A character is not allowed in a request: it is a control character or not ASCII.
    BadCharacter {
        /// Position of the character; 1 is the first.
        at: usize,
    },
    /// The comment of a Slurm job contains several requests.
    SeveralInComment,
    /// The comment of a Slurm job contains a request, but the prefix is missing or misspelt.
    MisspeltInComment {
        /// The request without the prefix. It is valid.
        spec: String,
    },
    /// There is nothing between two commas.
    EmptyTerm,
    /// A key of a Slurm request does not exist.
    UnknownKey {
        /// The key from the user, quoted.
        key: String,
        /// The key that the user probably meant.
        nearest: Option<&'static str>,
    },
    /// The request contains a key whose value Slurm chooses.
    ChosenBySlurm {
        /// The key.
        key: Key,
    },
    /// The default request of a quota contains a key that only a user can set.
    NotInDefault {
        /// The key.
        key: Key,
    },
    /// The default request of a quota names no share.
    NoShare,
    /// A key was given twice.
    Repeated {
        /// The key.
        key: Key,
        /// Notation of the key.
        spelling: Spelling,
    },
    /// A key needs a value.
    MissingValue {
        /// The key.
        key: Key,
        /// Notation of the key.
        spelling: Spelling,
    },
    /// A key takes no value.
    UnexpectedValue {
        /// The key.
        key: Key,
        /// Notation of the key.
        spelling: Spelling,
    },
    /// A value is not valid.
    BadValue {
        /// The key.
        key: Key,
        /// Notation of the key.
        spelling: Spelling,
        /// The value from the user, quoted.
        value: String,
        /// The problem, or what to write instead.
        why: String,
    },
    /// Two keys select two kinds of shares.
    Contradiction {
        /// The first key.
        first: Key,
        /// The second key.
        second: Key,
        /// Notation of the keys.
        spelling: Spelling,
    },
    /// A key does not apply to this kind of share.
    Unfit {
        /// The key.
        key: Key,
        /// The key that selects the kind, if there is one.
        kind: Option<Key>,
        /// Notation of the keys.
        spelling: Spelling,
    },
    /// A text does not have the form of a profile name.
    BadProfile {
        /// The text from the user, quoted.
        name: String,
        /// What to write.
        why: String,
    },
    /// Memory is outside the range of 1 MiB to 16 TiB.
    BadMemory,
    /// Zero compute slices were requested.
    NoSlices,
    /// The number of members is outside the range of 1 to 64.
    BadCount {
        /// The number.
        count: u32,
    },
    /// The request has several members, but its kind allows only one.
    NotCountable {
        /// The kind.
        kind: LeaseKind,
    },
    /// The duration is zero, or more than 52 weeks.
    BadDuration,
    /// The name of the target is too long, or has a control character.
    BadTarget,
    /// There are too many selectors.
    TooManySelectors {
        /// Number of selectors.
        count: usize,
    },
    /// A selector is not valid.
    BadSelector(SelectorError),
    /// The request does not choose a kind, and the GPUs offer no kind or several kinds.
    NoDefault {
        /// Kinds that the GPUs offer.
        offered: Vec<LeaseKind>,
    },
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { bytes } => {
                write!(f, "the request has {bytes} bytes; the limit is {LONGEST_SPEC}")
            }
            Self::BadCharacter { at } => write!(f, "character {at} of the request is not printable ASCII"),
            Self::SeveralInComment => f.write_str("the comment has several requests"),
            Self::MisspeltInComment { spec } => {
                write!(f, "`{spec}` looks like a request, but the word does not begin with `gpush:`")
            }
            Self::EmptyTerm => f.write_str("the request has an empty entry"),
            Self::UnknownKey { key, .. } => write!(f, "{key} is not a key of a request"),
            Self::ChosenBySlurm { key } => write!(f, "`{}` is not allowed in a Slurm request", key.name()),
            Self::NotInDefault { key } => {
                write!(f, "`{}` is not allowed in the default request of a quota", key.name())
            }
            Self::NoShare => f.write_str("the default request of a quota names no share"),
            Self::Repeated { key, spelling } => write!(f, "`{}` is given twice", key.written(*spelling)),
            Self::MissingValue { key, spelling } => write!(f, "`{}` needs a value", key.written(*spelling)),
            Self::UnexpectedValue { key, spelling } => write!(f, "`{}` takes no value", key.written(*spelling)),
            Self::BadValue { key, spelling, value, why } => {
                write!(f, "`{}`: {value} is not valid: {why}", key.written(*spelling))
            }
            Self::Contradiction { first, second, spelling } => {
                write!(f, "`{}` and `{}` exclude each other", first.written(*spelling), second.written(*spelling))
            }
            Self::Unfit { key, kind: Some(kind), spelling } => {
                write!(f, "`{}` does not apply to `{}`", key.written(*spelling), kind.written(*spelling))
            }
            Self::Unfit { key, kind: None, spelling } => {
                write!(f, "`{}` needs `{}`", key.written(*spelling), Key::Mps.written(*spelling))
            }
            Self::BadProfile { name, why } => write!(f, "{name} is not a profile name: {why}"),
            Self::BadMemory => f.write_str("the memory must be 1 MiB to 16 TiB"),
            Self::NoSlices => f.write_str("the number of compute slices must be 1 or more"),
            Self::BadCount { count } => {
                write!(f, "the count {count} is not possible: a lease has 1 to {MOST_MEMBERS} devices")
            }
            Self::NotCountable { kind } => write!(f, "a lease of kind {kind} has only one share, so it takes no count"),
            Self::BadDuration => f.write_str("a duration must be 1 second to 52 weeks"),
            Self::BadTarget => f.write_str("the target is not the name of a MIG device or MPS target"),
            Self::TooManySelectors { count } => write!(f, "the request has {count} GPU selectors; the limit is 256"),
            Self::BadSelector(error) => write!(f, "{error}"),
            Self::NoDefault { offered } if offered.is_empty() => f.write_str("no GPU can be leased"),
            Self::NoDefault { offered } => {
                let names: Vec<&str> = offered.iter().map(|kind| kind.name()).collect();
                write!(f, "the request must name a kind of lease: the GPUs offer {}", names.join(", "))
            }
        }
    }
}

impl std::error::Error for RequestError {}

impl RequestError {
    /// Returns what to write instead.
    #[must_use]
    pub fn hint(&self) -> String {
        let keys = || Key::of_slurm().map(Key::name).collect::<Vec<_>>().join(", ");
        match self {
            Self::SeveralInComment => "write only one word that begins with `gpush:` in the comment".to_owned(),
            Self::MisspeltInComment { spec } => format!("submit the job with --comment=gpush:{spec}"),
            Self::TooLong { .. } | Self::BadCharacter { .. } | Self::EmptyTerm => {
                "write a request such as mps=25,memory=8G".to_owned()
            }
            Self::UnknownKey { nearest: Some(nearest), .. } => format!("did you mean `{nearest}`?"),
            Self::UnknownKey { nearest: None, .. } => format!("the keys are {}", keys()),
            Self::ChosenBySlurm { key: Key::For | Key::Wait } => "use Slurm's --time for a time limit; Slurm queues \
            the job without an option"
                .to_owned(),
            Self::ChosenBySlurm { .. } => "use Slurm's --gres; Slurm chooses the GPUs".to_owned(),
            Self::NotInDefault { key } => format!("leave out `{}`", key.name()),
            Self::NoShare => "write a share, such as mig=1g.10gb,for=4h".to_owned(),
            Self::Repeated { key, spelling } => format!("give `{}` once", key.written(*spelling)),
            Self::MissingValue { key, spelling } => {
                format!("write for example `{}`", key.written(*spelling).with(key.example()))
            }
            Self::BadValue { key, spelling, value, .. } => {
                let typed = value.trim_matches('`');
                let example = |value: &str| key.written(*spelling).with(value);
                if let (Key::Mig, Some(hint)) = (key, layout_entry(typed, *spelling)) {
                    return hint;
                }
                match (key, profile_with_slices(typed)) {
                    (Key::Mig, Some(profile)) => format!(
                        "write the memory too, such as `{}`; `gpushctl mig profiles` lists the profiles",
                        example(profile)
                    ),
                    (Key::Memory, _) if lacks_unit(typed) => {
                        // No GPU has a TiB of memory, so a large number means MiB.
                        let unit = if typed.len() == 4 { "M" } else { "G" };
                        format!("write for example `{}`", example(&format!("{typed}{unit}")))
                    }
                    (Key::Memory, _) => match whole_mib(typed) {
                        Some(mib) => format!("write whole MiB: `{}`", example(&mib)),
                        None => format!("write for example `{}`", example(key.example())),
                    },
                    _ => format!("write for example `{}`", example(key.example())),
                }
            }
            Self::UnexpectedValue { key, spelling } => format!("write `{}` alone", key.written(*spelling)),
            Self::Contradiction { first, second, spelling } => {
                format!("give `{}` or `{}`", first.written(*spelling), second.written(*spelling))
            }
            Self::Unfit { key, spelling, .. } => format!("leave out `{}`", key.written(*spelling)),
            Self::BadProfile { .. } => "list the profiles with `gpushctl mig profiles`".to_owned(),
            Self::BadMemory => "write whole MiB or GiB, such as 10G".to_owned(),
            Self::NoSlices => "write 1 or more slices, or leave the number of slices out".to_owned(),
            Self::BadCount { .. } => format!("request 1 to {MOST_MEMBERS} devices"),
            Self::NotCountable { .. } => "request one lease for each share".to_owned(),
            Self::BadDuration => "write 90s, 15m, 1h30m or 2d".to_owned(),
            Self::BadTarget => "list them with `gpushctl mig list` and `gpushctl mps list`".to_owned(),
            Self::TooManySelectors { .. } => "use ranges of GPU indexes, such as 0-7".to_owned(),
            Self::BadSelector(error) => error.hint.clone(),
            Self::NoDefault { offered } if offered.is_empty() => "list the GPUs with `gpushctl status`".to_owned(),
            Self::NoDefault { offered } => {
                let flag = |kind: &LeaseKind| match kind {
                    LeaseKind::Mig => "--memory 10G",
                    LeaseKind::Mps => "--mps 25",
                    LeaseKind::Timeslice => "--timeslice",
                    LeaseKind::Whole => "--whole",
                };
                format!("add {}", offered.iter().map(flag).collect::<Vec<_>>().join(" or "))
            }
        }
    }
}

/// Returns the hint for an entry of a layout in the place of a profile: `1g.10gb*2` or `1g.10gb@3`. `None` for other texts.
fn layout_entry(text: &str, spelling: Spelling) -> Option<String> {
    let (profile, rest) = text.split_once(['*', '@'])?;
    super::profile::profile(profile).ok()?;
    let number = rest.parse::<u8>().ok().filter(|number| *number > 0 || text.contains('@'))?;
    let mig = Key::Mig.written(spelling).with(profile);
    Some(match (spelling, text.contains('*')) {
        (Spelling::Flags, true) => format!("write `{mig} {}`", Key::Count.written(spelling).with(&number.to_string())),
        (Spelling::Flags, false) => format!("write `{mig}`, or `--target GPU:{text}` for this device of a GPU"),
        // Slurm chooses the number and the devices. A quota has no default number.
        (Spelling::Slurm | Spelling::Quota, _) => format!("write `{mig}`"),
    })
}

/// Returns a number of GiB with a fraction in MiB: `40448M` for `39.5G`.
fn whole_mib(text: &str) -> Option<String> {
    let number = text.trim_end_matches(['B', 'b', 'i']).strip_suffix(['G', 'g'])?;
    let (gib, fraction) = number.trim_end().split_once('.')?;
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| (1..=3).contains(digits))?;
    let gib = gib.parse::<u64>().ok()?.checked_mul(1024)?;
    let mib = fraction.parse::<u64>().ok()? * 1024 / 10_u64.pow(digits);
    Some(format!("{}M", gib.checked_add(mib)?))
}

/// Returns a profile for a text that names only the number of its slices: `3g.40gb` for `3g`. The profiles are those of
/// GPUs with 80 GB.
fn profile_with_slices(text: &str) -> Option<&'static str> {
    match text {
        "1g" => Some("1g.10gb"),
        "2g" => Some("2g.20gb"),
        "3g" => Some("3g.40gb"),
        "4g" => Some("4g.40gb"),
        "7g" => Some("7g.80gb"),
        _ => None,
    }
}

/// Returns whether a text is a number without a unit.
fn lacks_unit(text: &str) -> bool {
    (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0')
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let hint = error.hint();
        Self::new(Code::BadRequest, format!("cannot request a lease: {error}")).hint(hint)
    }
}
