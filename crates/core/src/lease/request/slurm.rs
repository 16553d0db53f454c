//! Requests in the comment of a Slurm job.
//!
//! The user chooses the comment, so it can contain any text. Only these texts are requests:
//!
//! - a word that begins with `gpush:` in any case, such as `gpush:mps=25,memory=8G`. Spaces after the colon and at the
//!   commas do not end the request;
//! - the whole comment `mps` or `mps-per-gpu`, which sites already use: MPS with the rule's settings. gpush has one
//!   daemon for each target, so `mps` and `mps-per-gpu` have the same meaning.
//!
//! A text that is probably a misspelt request is an error, because the job would otherwise run with another share than
//! its user expects: a valid request with a wrong prefix (`gpus:mps=25`, `gpush=mps=25`), or a whole comment that is a
//! request for MPS or MIG without the prefix (`mps=25`). All other text is ignored.

use gpush_api::{LeaseRequest, LeaseShare};

use super::{RequestError, parse};
use crate::nearest::nearest;

/// Prefix of a request in a comment.
const PREFIX: &str = "gpush:";

/// Finds the request in a comment; `None` if the comment contains no request.
///
/// # Errors
/// The request is wrong or misspelt, or the comment contains several requests.
pub fn from_comment(comment: &str) -> Result<Option<LeaseRequest>, RequestError> {
    if let "mps" | "mps-per-gpu" = comment.trim() {
        let share = LeaseShare::Mps { percentage: None, memory_limit_mib: None, priority: None };
        return Ok(Some(LeaseRequest { share, ..LeaseRequest::default() }));
    }
    let words = joined(comment);
    let mut specs = words.iter().filter_map(|word| prefixed(word));
    match (specs.next(), specs.next()) {
        (None, _) => {
            let found = words.iter().find_map(|word| misspelt(word));
            match found.or_else(|| without_colon(&words)).or_else(|| without_prefix(comment)) {
                Some(spec) => Err(RequestError::MisspeltInComment { spec }),
                None => Ok(None),
            }
        }
        (Some(spec), None) => parse(spec).map(Some),
        (Some(_), Some(_)) => Err(RequestError::SeveralInComment),
    }
}

/// Splits a comment into words. In a word with the prefix, a space after the colon or next to a comma does not end the
/// word.
fn joined(comment: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in comment.split_whitespace() {
        match words.last_mut() {
            Some(last) if prefixed(last).is_some() && (last.ends_with([',', ':']) || word.starts_with(',')) => {
                last.push_str(word);
            }
            Some(_) | None => words.push(word.to_owned()),
        }
    }
    words
}

/// Returns the request in a word with the prefix, in any case.
fn prefixed(word: &str) -> Option<&str> {
    let (prefix, spec) = word.split_at_checked(PREFIX.len())?;
    prefix.eq_ignore_ascii_case(PREFIX).then_some(spec)
}

/// Returns the request in a word whose prefix is probably misspelt: the rest of the word is a valid request.
fn misspelt(word: &str) -> Option<String> {
    let at = word.find([':', '=', ';', '/'])?;
    let (prefix, spec) = (&word[..at], word[at + 1..].trim_end_matches(','));
    let is_near = nearest(prefix, [PREFIX.trim_end_matches(':')]).is_some();
    (is_near && parse(spec).is_ok()).then(|| spec.to_owned())
}

/// Returns the request in the two words `gpush mps=25`.
fn without_colon(words: &[String]) -> Option<String> {
    let is_request = |two: &&[String]| {
        two[0].eq_ignore_ascii_case(PREFIX.trim_end_matches(':')) && two[1].contains('=') && parse(&two[1]).is_ok()
    };
    words.windows(2).find(is_request).map(|two| two[1].clone())
}

/// Returns the request if the whole comment is a request for a percentage of MPS or for a MIG profile.
fn without_prefix(comment: &str) -> Option<String> {
    let comment = comment.trim();
    let is_share = ["mps=", "mig="].iter().any(|start| comment.starts_with(start));
    (is_share && parse(comment).is_ok()).then(|| comment.to_owned())
}
