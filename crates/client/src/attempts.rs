//! Answers to repeated changes: which of them counts in the end.
//!
//! ```text
//! Nothing ──refused──► Refused ──connection ended*──► Lost
//!    └────────────────connection ended─────────────────┘
//! ```
//!
//! \* A stopping gpushd begins nothing more that it receives on the same connection, so its refusal remains valid.

use gpush_api::{ApiError, Code};
use hyper::{StatusCode, body::Bytes};

use crate::error::{Error, Kind};

/// A status with its body.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

impl Answer {
    /// Returns whether gpushd refused for a temporary reason: it is stopping or overloaded.
    pub(crate) fn is_passing(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
            && serde_json::from_slice::<ApiError>(&self.body)
                .is_ok_and(|error| matches!(error.code, Code::Unavailable | Code::Stopping) && error.retryable)
    }

    /// Returns whether gpushd refused because it is stopping. A stopping gpushd refuses every further
    /// request on this connection.
    pub(crate) fn is_stopping(&self) -> bool {
        serde_json::from_slice::<ApiError>(&self.body).is_ok_and(|error| error.code == Code::Stopping)
    }
}

/// The last relevant outcome of a repeated change.
pub(crate) enum EarlierOutcome {
    /// There is no relevant outcome yet.
    Nothing,
    /// A gpushd may have begun the change. The outcome remains uncertain unless a later attempt
    /// gets an answer other than "stopping" or "overloaded".
    Lost(Error),
    /// A gpushd reported that it did not begin the change.
    Refused(Answer),
}

impl EarlierOutcome {
    /// Updates the outcome after another attempt. If the connection ends before the answer, the
    /// outcome is uncertain, even if gpushd refused the change earlier. Exception: if a stopping
    /// gpushd refused the change on the same connection, this refusal remains valid.
    pub(crate) fn after_attempt(self, last: &Result<Answer, Error>, same_connection: bool) -> Self {
        match (last, self) {
            // The repeated request reached a restarted gpushd. Even if that gpushd refuses the
            // change, it is still unknown what the first gpushd did.
            (Ok(_), Self::Lost(doubt)) => Self::Lost(doubt),
            (Ok(answer), Self::Nothing | Self::Refused(_)) => Self::Refused(answer.clone()),
            (Err(error), Self::Refused(answer))
                if error.kind == Kind::Lost && same_connection && answer.is_stopping() =>
            {
                Self::Refused(answer)
            }
            (Err(error), _) if error.kind == Kind::Lost => Self::Lost(error.clone()),
            (Err(_), before) => before,
        }
    }

    /// Returns the result for the caller after the last attempt.
    pub(crate) fn final_result(self, last: Result<Answer, Error>) -> Result<Answer, Error> {
        match (last, self) {
            (Err(error), Self::Lost(doubt)) if error.kind == Kind::Connect => {
                Err(doubt.with_cause(error.error.message))
            }
            (Ok(answer), Self::Lost(doubt)) if answer.is_passing() => {
                let printed = serde_json::from_slice::<ApiError>(&answer.body).map(|error| error.message);
                Err(doubt.with_cause(printed.unwrap_or_default()))
            }
            (Err(error), Self::Refused(answer)) if matches!(error.kind, Kind::Connect | Kind::Lost) => Ok(answer),
            (last, Self::Nothing | Self::Lost(_) | Self::Refused(_)) => last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopping() -> Answer {
        let body = serde_json::to_vec(&ApiError::new(Code::Stopping, "gpushd is stopping").retryable()).unwrap();
        Answer { status: StatusCode::SERVICE_UNAVAILABLE, body: body.into() }
    }

    fn failed(kind: Kind) -> Result<Answer, Error> {
        Err(Error::new(kind, ApiError::new(Code::Unreachable, "no answer")))
    }

    /// Returns the kind of error after these attempts, or `None` if the refusal of gpushd counts.
    fn result_of(attempts: Vec<(Result<Answer, Error>, bool)>) -> Option<Kind> {
        let last = attempts.last().unwrap().0.clone();
        let step = |earlier: EarlierOutcome, (attempt, same)| earlier.after_attempt(&attempt, same);
        let earlier = attempts.into_iter().fold(EarlierOutcome::Nothing, step);
        earlier.final_result(last).err().map(|error| error.kind)
    }

    #[test]
    fn outcome_is_uncertain_once_a_connection_ended_before_the_answer() {
        let (refused, lost, absent) = (Ok(stopping()), failed(Kind::Lost), failed(Kind::Connect));
        assert_eq!(result_of(vec![(refused.clone(), false), (absent.clone(), false)]), None);
        assert_eq!(result_of(vec![(refused.clone(), false), (lost.clone(), true)]), None, "the same connection");
        assert_eq!(result_of(vec![(refused.clone(), false), (lost.clone(), false)]), Some(Kind::Lost));
        assert_eq!(result_of(vec![(lost.clone(), false), (refused, false)]), Some(Kind::Lost));
        assert_eq!(result_of(vec![(lost.clone(), false), (absent, false)]), Some(Kind::Lost));
        let done = Answer { status: StatusCode::OK, body: Bytes::new() };
        assert_eq!(result_of(vec![(lost, false), (Ok(done), false)]), None, "a repeated change has its answer");
    }
}
