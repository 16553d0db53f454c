//! The share that a job requests. A request can come from three sources. If several of them contain
//! a request, the first one applies:
//!
//! 1. the option `--gpush` of the SPANK plugin;
//! 2. the comment of the job ([`crate::lease::request::from_comment`]);
//! 3. gres/mps, whose percentage is a thread percentage.
//!
//! In Prolog, gres/shard looks like gres/gpu. So gpush treats neither of the two as a request for a
//! share. A job that needs a shard must use `--gpush` or the comment of the job.

use std::fmt;

use gpush_api::{LeaseRequest, LeaseShare, Percentage};

use super::Job;
use crate::{
    lease::request::{RequestError, from_comment, parse},
    quote::Quoted,
};

/// Why a hook refuses the request of a job without asking gpushd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadRequest {
    /// The request is wrong.
    Request {
        /// Source of the request: `--gpush` or `--comment`.
        channel: &'static str,
        /// What is wrong with the request.
        error: RequestError,
    },
    /// The percentage from gres/mps is not valid.
    GresPercentage {
        /// The percentage from Slurm, quoted.
        text: String,
    },
    /// The request has a higher thread percentage than gres/mps allows.
    OverGres {
        /// Requested percentage.
        requested: Percentage,
        /// Percentage from gres/mps.
        given: Percentage,
    },
}

impl fmt::Display for BadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request { channel, error } => write!(f, "the request in {channel} is wrong: {error}"),
            Self::GresPercentage { text } => {
                write!(f, "gres/mps gives the job {text} %: a thread percentage must be more than 0 and at most 100")
            }
            Self::OverGres { requested, given } => {
                write!(f, "the request is for {requested} %, but gres/mps gives the job only {given} %")
            }
        }
    }
}

impl std::error::Error for BadRequest {}

impl BadRequest {
    /// Returns a hint: what the user can do.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Request { error, .. } => error.hint(),
            // If a node has both gres/shard and gres/mps, Slurm 22.05 computes an invalid
            // percentage.
            Self::GresPercentage { .. } => {
                "tell the administrator: a node must not have both gres/mps and gres/shard".to_owned()
            }
            Self::OverGres { given, .. } => {
                format!("request {given} % or less, or submit the job with a larger --gres=mps")
            }
        }
    }
}

/// Returns the request of a job; `None` if the job has no request.
///
/// # Errors
/// The request is wrong.
pub fn requested(job: &Job) -> Result<Option<LeaseRequest>, BadRequest> {
    let wrong = |channel| move |error| BadRequest::Request { channel, error };
    let explicit = match (&job.option, &job.comment) {
        (Some(option), _) => Some(parse(option).map_err(wrong("--gpush"))?),
        (None, Some(comment)) => from_comment(comment).map_err(wrong("--comment"))?,
        (None, None) => None,
    };
    let Some(given) = &job.thread_percentage else { return Ok(explicit) };
    let given = match given.trim().parse::<Percentage>() {
        Ok(given) => given,
        // Only a request for MPS needs the percentage, so ignore an invalid percentage for other
        // requests.
        Err(_) if explicit.as_ref().is_some_and(|request| !matches!(request.share, LeaseShare::Mps { .. })) => {
            return Ok(explicit);
        }
        Err(_) => return Err(BadRequest::GresPercentage { text: Quoted(given).to_string() }),
    };
    match explicit {
        None => {
            let share = LeaseShare::Mps { percentage: Some(given), memory_limit_mib: None, priority: None };
            Ok(Some(LeaseRequest { share, ..LeaseRequest::default() }))
        }
        Some(request) => match request.share {
            LeaseShare::Mps { percentage: Some(requested), .. } if requested > given => {
                Err(BadRequest::OverGres { requested, given })
            }
            LeaseShare::Mps { percentage, memory_limit_mib, priority } => {
                let share = LeaseShare::Mps { percentage: percentage.or(Some(given)), memory_limit_mib, priority };
                Ok(Some(LeaseRequest { share, ..request }))
            }
            LeaseShare::Default {}
            | LeaseShare::MigProfile { .. }
            | LeaseShare::MigSize { .. }
            | LeaseShare::Timeslice {}
            | LeaseShare::Whole {} => Ok(Some(request)),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn job(option: Option<&str>, comment: Option<&str>, gres: Option<&str>) -> Job {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Job { id: 1, option: own(option), comment: own(comment), thread_percentage: own(gres), ..Job::default() }
    }

    fn percentage(job: &Job) -> Option<String> {
        match requested(job).unwrap()?.share {
            LeaseShare::Mps { percentage, .. } => Some(percentage.map_or_else(String::new, |one| one.to_string())),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn strongest_channel_wins() {
        assert_eq!(percentage(&job(Some("mps=10"), Some("gpush:mps=20"), None)).as_deref(), Some("10"));
        assert_eq!(percentage(&job(None, Some("a gpush:mps=20 b"), Some("50"))).as_deref(), Some("20"));
        assert_eq!(percentage(&job(None, Some("note"), Some("50"))).as_deref(), Some("50"));
        assert_eq!(percentage(&job(None, Some("mps"), Some("50"))).as_deref(), Some("50"));
        assert_eq!(percentage(&job(None, Some("note $(reboot)\n"), None)), None);
        // A wrong option is an error even if the comment is correct.
        assert!(requested(&job(Some("mps=0"), Some("gpush:mps=20"), None)).is_err());
    }

    #[test]
    fn gres_percentage_limits_the_request() {
        let over = requested(&job(Some("mps=60"), None, Some("50"))).unwrap_err();
        assert!(matches!(over, BadRequest::OverGres { .. }), "{over}");
        // If a node has both gres/shard and gres/mps, Slurm 22.05 gives this percentage.
        let wrong = requested(&job(None, None, Some("1250"))).unwrap_err();
        assert!(matches!(wrong, BadRequest::GresPercentage { .. }) && !wrong.hint().is_empty());
        assert!(requested(&job(Some("whole"), None, Some("1250"))).unwrap().is_some());
    }

    proptest! {
        #[test]
        fn any_text_gives_an_answer(option in proptest::option::of(any::<String>()), comment in any::<String>()) {
            if let Err(error) = requested(&job(option.as_deref(), Some(&comment), None)) {
                prop_assert!(!error.to_string().contains('\n') && !error.hint().contains('\n'));
            }
        }
    }
}
