//! The default request of a quota: what a user gets who requests a lease without a share.

use gpush_api::{LeaseRequest, LeaseShare};

use super::{RequestError, Spelling, build, spec, terms};

/// What a request without a share means for the users of a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRequest {
    /// Share. Never [`LeaseShare::Default`].
    pub share: LeaseShare,
    /// Duration of the lease in seconds, for requests without a duration.
    pub duration_s: Option<u64>,
}

/// Parses the default request of a quota, such as `mig=1g.10gb,for=4h`.
///
/// # Errors
/// The first wrong term. Also if the text names no share.
pub fn parse_default(text: &str) -> Result<DefaultRequest, RequestError> {
    let LeaseRequest { share, duration_s, .. } = build(&terms(text)?, Spelling::Quota)?;
    match share {
        LeaseShare::Default {} => Err(RequestError::NoShare),
        LeaseShare::MigProfile { .. }
        | LeaseShare::MigSize { .. }
        | LeaseShare::Mps { .. }
        | LeaseShare::Timeslice {}
        | LeaseShare::Whole {} => Ok(DefaultRequest { share, duration_s }),
    }
}

/// Returns the errors of all terms of a text that [`parse_default`] refuses. Returns only the first error if the terms are
/// correct alone, or cannot be separated.
#[must_use]
pub fn faults_of_default(text: &str) -> Vec<RequestError> {
    let Err(first) = parse_default(text) else { return Vec::new() };
    let is_of_term = |error: &RequestError| {
        matches!(
            error,
            RequestError::BadValue { .. }
                | RequestError::MissingValue { .. }
                | RequestError::UnexpectedValue { .. }
                | RequestError::NotInDefault { .. }
        )
    };
    let all = terms(text).unwrap_or_default();
    let alone = all.iter().filter_map(|term| build(std::slice::from_ref(term), Spelling::Quota).err());
    let found: Vec<RequestError> = alone.filter(is_of_term).collect();
    if found.len() > 1 { found } else { vec![first] }
}

impl DefaultRequest {
    /// Returns the text that [`parse_default`] reads as the same default.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { share, duration_s } = self;
        spec(&LeaseRequest { share: share.clone(), duration_s: *duration_s, ..LeaseRequest::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_has_a_share_and_perhaps_a_duration() {
        for (text, normal, duration_s) in [
            ("mig=1g.10gb,for=4h", "mig=1g.10gb,for=4h", Some(14_400)),
            ("for=90m, mps=25, memory=8G", "mps=25,memory=8G,for=1h30m", Some(5400)),
            ("whole", "whole", None),
            ("memory=10G", "memory=10G", None),
        ] {
            let default = parse_default(text).unwrap();
            assert_eq!((default.text().as_str(), default.duration_s), (normal, duration_s));
            assert_eq!(parse_default(&default.text()), Ok(default));
        }
    }

    /// Fault: the second mistake appeared only after the first one was corrected.
    #[test]
    fn all_faults_of_a_default_are_found() {
        let keys = |text: &str| faults_of_default(text).iter().map(ToString::to_string).collect::<Vec<_>>();
        let found = keys("mig=1g.10gb*2,for=4");
        assert!(found.len() == 2 && found[0].contains("1g.10gb*2") && found[1].contains("`4`"), "{found:?}");
        assert_eq!(keys("for=4h").len(), 1);
        assert!(keys("mig=1g.10gb,for=4h").is_empty());
    }

    #[test]
    fn default_without_a_share_or_with_gpus_is_refused() {
        for (text, part) in [
            ("for=4h", "names no share"),
            ("", "empty entry"),
            ("mps=25,count=1", "`count` is not allowed"),
            ("whole,gpu=0", "`gpu` is not allowed"),
            ("whole,wait", "`wait` is not allowed"),
            ("mig=1g.10gb,for=0", "must be longer than 0"),
        ] {
            let error = parse_default(text).unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert!(!error.hint().contains("Slurm"), "{text}: {}", error.hint());
        }
    }
}
