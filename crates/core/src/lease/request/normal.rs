//! The normal form of a request, which gpushd stores and logs.

use gpush_api::{LeaseRequest, LeaseShare};

use super::{RequestError, check, profile::profile};
use crate::selector::Selector;

/// Maximum length of a target's name, in bytes. The longest name is a UUID of a MIG device, with 40 characters.
const LONGEST_TARGET: usize = 128;

/// Checks a request, and returns it in its normal form: each text is written as gpushd understands it. So blanks around a
/// selector or a target are never stored.
///
/// # Errors
/// The first value that is outside its limits.
pub fn normalized(mut request: LeaseRequest) -> Result<LeaseRequest, RequestError> {
    check(&request)?;
    if let LeaseShare::MigProfile { profile: name } = &mut request.share
        && let Ok(normal) = profile(name)
    {
        *name = normal;
    }
    for text in &mut request.gpus {
        *text = text.parse::<Selector>().map_err(RequestError::BadSelector)?.to_string();
    }
    // A selector that is named twice has no further effect.
    let mut seen = std::collections::BTreeSet::new();
    request.gpus.retain(|text| seen.insert(text.clone()));
    if let Some(target) = &mut request.target {
        *target = target.trim().to_owned();
        if target.len() > LONGEST_TARGET || target.chars().any(char::is_control) {
            return Err(RequestError::BadTarget);
        }
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: gpushd trimmed a selector for its check, but stored and logged the text with 63,000 blanks.
    #[test]
    fn stored_request_has_no_text_of_the_caller() {
        let padded = |text: &str| format!("{}{text}{}", " ".repeat(20_000), " ".repeat(20_000));
        let request = LeaseRequest {
            share: LeaseShare::MigProfile { profile: "1G.10GB".to_owned() },
            gpus: vec![padded("0"), padded("GPU-ABC"), padded("00:07:00"), padded("ALL"), "0".to_owned()],
            target: Some(padded("0:1g.10gb@2")),
            ..LeaseRequest::default()
        };
        let normal = normalized(request).unwrap();
        assert_eq!(normal.share, LeaseShare::MigProfile { profile: "1g.10gb".to_owned() });
        assert_eq!(normal.gpus[0], "0");
        assert_eq!(normal.gpus.len(), 4);
        assert!(normal.gpus.iter().all(|text| text.len() < 20), "{:?}", normal.gpus);
        assert_eq!(normal.target.as_deref(), Some("0:1g.10gb@2"));
        assert_eq!(normalized(normal.clone()), Ok(normal), "a normal form does not change");
        let long = LeaseRequest { target: Some("x".repeat(129)), ..LeaseRequest::default() };
        assert_eq!(normalized(long), Err(RequestError::BadTarget));
    }
}
