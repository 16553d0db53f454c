//! The textual grammar of lease requests, for the flags of `gpushctl run` and for Slurm requests.
//!
//! ```text
//! SPEC = TERM ("," TERM)*        TERM = KEY | KEY "=" VALUE
//! ```
//!
//! | key | flag | value | meaning |
//! |---|---|---|---|
//! | `mig` | `--mig` | `1g.10gb` | a MIG device of this profile |
//! | `memory` | `--memory` | `10G`, `512M` | MIG: at least this memory; with `mps`: at most this memory |
//! | `slices` | `--slices` | `2` | MIG: at least this many compute slices |
//! | `mps` | `--mps` | `25`, or none | a part of an MPS target: this percentage, or the rule's |
//! | `priority` | `--priority` | `below-normal` | with `mps`: priority of kernels |
//! | `timeslice` | `--timeslice` | none | a time-slice replica |
//! | `whole` | `--whole` | none | a whole GPU |
//! | `gpu` | `--gpu` | selector, repeatable | GPUs that may be used |
//! | `count` | `--count` | `2` | number of MIG devices or whole GPUs; all are granted or none |
//! | `for` | `--for` | `2h` | duration of the lease |
//! | `wait` | `--wait` | `5m`, or none | wait for capacity, at most this long |
//!
//! Slurm chooses the GPUs and the time of its jobs, so Slurm requests cannot contain the last four
//! keys. Of these keys, the default request of a quota can contain only `for`.
//!
//! The text can come from any user. Its length is limited, and control characters and shell syntax
//! are errors. The module returns only typed values.

use std::time::Duration;

use gpush_api::{LeaseRequest, LeaseShare, LeaseWait, MemoryLimit};

use crate::{duration, quote::Quoted, selector::Selector};

mod check;
mod default;
mod error;
mod key;
mod normal;
mod profile;
mod share;
mod slurm;
mod term;
mod text;

pub use check::check;
pub use default::{DefaultRequest, faults_of_default, parse_default};
pub use error::RequestError;
pub use key::{Key, Spelling};
pub use normal::normalized;
pub use slurm::from_comment;
pub use text::{flags, spec};

/// Maximum length of a request's text in bytes.
pub const LONGEST_SPEC: usize = 1024;

/// One term of a request: a key, with or without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term<'a> {
    /// Key.
    pub key: Key,
    /// Value, if one was given.
    pub value: Option<&'a str>,
}

/// Parses a Slurm request, such as `mps=25,memory=8G`.
///
/// # Errors
/// The first wrong term. The error shows the correct notation.
pub fn parse(text: &str) -> Result<LeaseRequest, RequestError> {
    build(&terms(text)?, Spelling::Slurm)
}

/// Splits a text into terms.
fn terms(text: &str) -> Result<Vec<Term<'_>>, RequestError> {
    if text.len() > LONGEST_SPEC {
        return Err(RequestError::TooLong { bytes: text.len() });
    }
    if let Some((at, _)) = text.char_indices().find(|(_, c)| !c.is_ascii_graphic() && *c != ' ') {
        return Err(RequestError::BadCharacter { at: text[..at].chars().count() + 1 });
    }
    let mut terms = Vec::new();
    for term in text.split(',') {
        let term = term.trim_matches(' ');
        let (key, value) = match term.split_once('=') {
            Some((key, value)) => (key.trim_end_matches(' '), Some(value.trim_start_matches(' '))),
            None => (term, None),
        };
        if key.is_empty() {
            return Err(RequestError::EmptyTerm);
        }
        terms.push(Term { key: Key::parse(key)?, value });
    }
    Ok(terms)
}

/// Builds a request from terms in any order. `spelling` determines which keys are allowed, and how
/// errors write a key.
///
/// # Errors
/// The first wrong term, or the first terms that contradict each other.
pub fn build(terms: &[Term<'_>], spelling: Spelling) -> Result<LeaseRequest, RequestError> {
    let mut given: Vec<Key> = Vec::with_capacity(terms.len());
    let mut request = LeaseRequest::default();
    let mut share = share::ShareTerms::default();
    for term in terms {
        let key = term.key;
        if spelling == Spelling::Slurm && key.is_chosen_by_slurm() {
            return Err(RequestError::ChosenBySlurm { key });
        }
        if spelling == Spelling::Quota && key.is_chosen_by_slurm() && key != Key::For {
            return Err(RequestError::NotInDefault { key });
        }
        if given.contains(&key) && key != Key::Gpu {
            return Err(RequestError::Repeated { key, spelling });
        }
        given.push(key);
        let value = key.check_value(term.value, spelling)?;
        let bad = |why: String| RequestError::BadValue {
            key,
            spelling,
            value: Quoted(value.unwrap_or_default()).to_string(),
            why,
        };
        match key {
            Key::Gpu => {
                let selector = value.unwrap_or_default();
                selector.parse::<Selector>().map_err(|error| bad(error.hint))?;
                request.gpus.push(selector.trim().to_owned());
            }
            Key::Count => request.count = number(value).map_err(bad)?,
            Key::For => request.duration_s = Some(seconds(value).map_err(bad)?),
            Key::Wait if value.is_none() => request.wait = LeaseWait::Unlimited,
            Key::Wait => request.wait = LeaseWait::Seconds(seconds(value).map_err(bad)?),
            Key::Mig | Key::Memory | Key::Slices | Key::Mps | Key::Priority | Key::Timeslice | Key::Whole => {
                share.add(key, value).map_err(bad)?;
            }
        }
    }
    request.share = share.build(spelling)?;
    check(&request)?;
    Ok(request)
}

/// Parses a whole number without a sign.
fn number(value: Option<&str>) -> Result<u32, String> {
    let text = value.unwrap_or_default();
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = is_number.then(|| text.parse().ok()).flatten();
    number.ok_or_else(|| "write a whole number, such as 2".to_owned())
}

/// Parses a duration to whole seconds. Returns at least one second.
fn seconds(value: Option<&str>) -> Result<u64, String> {
    let parsed: Duration = duration::parse_positive(value.unwrap_or_default()).map_err(|error| error.to_string())?;
    Ok(parsed.as_secs().max(1))
}

/// Parses an amount of memory.
fn mebibytes(value: Option<&str>) -> Result<MemoryLimit, String> {
    value.unwrap_or_default().parse::<MemoryLimit>().map_err(|error| error.why.to_owned())
}

/// Returns the share for a request that does not choose a kind: the only kind that the GPUs offer.
///
/// # Errors
/// The GPUs offer several kinds, or no kind.
pub fn default_share(offered: &[gpush_api::LeaseKind]) -> Result<LeaseShare, RequestError> {
    use gpush_api::LeaseKind;
    let mut kinds = offered.to_vec();
    kinds.sort_unstable();
    kinds.dedup();
    match kinds.as_slice() {
        [LeaseKind::Mig] => Ok(LeaseShare::MigSize { memory_mib: None, slices: None }),
        [LeaseKind::Mps] => Ok(LeaseShare::Mps { percentage: None, memory_limit_mib: None, priority: None }),
        [LeaseKind::Timeslice] => Ok(LeaseShare::Timeslice {}),
        [LeaseKind::Whole] => Ok(LeaseShare::Whole {}),
        _ => Err(RequestError::NoDefault { offered: kinds }),
    }
}

#[cfg(test)]
mod tests;
