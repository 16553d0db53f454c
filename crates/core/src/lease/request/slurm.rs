//! Requests in the comment of a Slurm job.
//!
//! The user chooses the comment, so it can contain any text. Only these texts are requests; all
//! other text is ignored:
//!
//! - a word that begins with `gpush:`, such as `gpush:mps=25,memory=8G`;
//! - the whole comment `mps` or `mps-per-gpu`, which sites already use: MPS with the rule's
//!   settings. gpush has one daemon for each target, so `mps` and `mps-per-gpu` have the same
//!   meaning.

use gpush_api::{LeaseRequest, LeaseShare};

use super::{RequestError, parse};

/// Prefix of a request in a comment.
const PREFIX: &str = "gpush:";

/// Finds the request in a comment; `None` if the comment contains no request.
///
/// # Errors
/// The request is wrong, or the comment contains several requests.
pub fn from_comment(comment: &str) -> Result<Option<LeaseRequest>, RequestError> {
    if let "mps" | "mps-per-gpu" = comment.trim() {
        let share = LeaseShare::Mps { percentage: None, memory_limit_mib: None, priority: None };
        return Ok(Some(LeaseRequest { share, ..LeaseRequest::default() }));
    }
    let mut specs = comment.split_whitespace().filter_map(|word| word.strip_prefix(PREFIX));
    match (specs.next(), specs.next()) {
        (None, _) => Ok(None),
        (Some(spec), None) => parse(spec).map(Some),
        (Some(_), Some(_)) => Err(RequestError::SeveralInComment),
    }
}
