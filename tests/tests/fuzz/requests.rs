//! Requests of users: bodies, lease requests, selectors, layouts and values.

use std::{fmt::Debug, str::FromStr};

use gpush_api::{
    ApplyRequest, LeaseId, LeaseRenewRequest, LeaseRequest, LeaseRevokeRequest, MaintenanceRequest, MemoryLimit,
    MpsActionRequest, MpsSetRequest, Percentage, PlanRequest, Priority, ReasonRequest, ReloadRequest, SlurmJobEnd,
    SlurmJobStart,
};
use gpush_core::{
    duration,
    layout::{Layout, source_of},
    lease::request::{from_comment, normalized, parse, spec},
    selector::Selector,
};
use serde::{Serialize, de::DeserializeOwned};

use super::runner::{assert_bounded, fuzz};

/// Parses a body. If that works, checks that the printed value is parsed as the same value.
fn body<T: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) -> Option<T> {
    let parsed: T = serde_json::from_slice(bytes).ok()?;
    let printed = serde_json::to_vec(&parsed).expect("a request can be printed");
    assert_bounded(printed.len(), bytes, 4, 1024);
    let again: T = serde_json::from_slice(&printed).expect("the printed request can be parsed");
    assert_eq!(format!("{again:?}"), format!("{parsed:?}"));
    Some(parsed)
}

/// Checks that gpushd stores a lease request in a bounded form, which does not change any more.
fn lease(request: LeaseRequest) {
    let Ok(normal) = normalized(request) else { return };
    assert_eq!(normalized(normal.clone()), Ok(normal.clone()));
    let longest = normal.gpus.iter().map(String::len).max().unwrap_or(0);
    assert!(longest <= 256, "a selector of {longest} bytes");
    let text = spec(&normal);
    assert!(text.is_ascii() || !normal.gpus.is_empty(), "{text}");
}

#[test]
fn request_bodies() {
    fuzz("request_bodies", |bytes| {
        if let Some(request) = body::<LeaseRequest>(bytes) {
            lease(request);
        }
        if let Some(job) = body::<SlurmJobStart>(bytes)
            && let Some(request) = job.request
        {
            lease(request);
        }
        body::<SlurmJobEnd>(bytes);
        body::<ApplyRequest>(bytes);
        body::<PlanRequest>(bytes);
        body::<MpsSetRequest>(bytes);
        body::<MpsActionRequest>(bytes);
        body::<MaintenanceRequest>(bytes);
        body::<LeaseRenewRequest>(bytes);
        body::<LeaseRevokeRequest>(bytes);
        body::<ReasonRequest>(bytes);
        body::<ReloadRequest>(bytes);
    });
}

#[test]
fn lease_requests_in_text() {
    fuzz("lease_requests", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        match parse(&text) {
            Ok(request) => {
                let printed = spec(&request);
                assert_bounded(printed.len(), bytes, 4, 64);
                assert_eq!(parse(&printed).as_ref(), Ok(&request), "{printed}");
                lease(request);
            }
            Err(error) => assert!(error.to_string().len() < 2048, "{error}"),
        }
        if let Err(error) = from_comment(&text) {
            assert!(error.to_string().len() < 2048, "{error}");
        }
    });
}

#[test]
fn selectors() {
    fuzz("selectors", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        match text.parse::<Selector>() {
            Ok(selector) => {
                let printed = selector.to_string();
                assert_bounded(printed.len(), bytes, 4, 64);
                assert_eq!(printed.parse::<Selector>().map(|again| again.to_string()), Ok(printed));
            }
            Err(error) => assert!(format!("{error:?}").len() < 4096, "{error:?}"),
        }
    });
}

#[test]
fn layouts() {
    fuzz("layouts", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        match Layout::parse(&text) {
            Ok(layout) => {
                let printed = layout.to_string();
                assert_bounded(printed.len(), bytes, 4, 64);
                let again = Layout::parse(&printed).map(|again| again.to_string());
                assert_eq!(again.ok(), Some(printed));
            }
            Err(error) => assert!(error.to_string().len() < 4096, "{error}"),
        }
        let source = format!("{:?}", source_of(&text));
        assert_bounded(source.len(), bytes, 16, 64);
    });
}

/// Checks that the printed form of a value is parsed as the same value.
fn value<T: FromStr + ToString + PartialEq + Debug>(text: &str) {
    if let Ok(parsed) = text.parse::<T>() {
        let printed = parsed.to_string();
        assert!(printed.len() < 64, "{printed}");
        assert_eq!(printed.parse::<T>().ok(), Some(parsed), "{printed}");
    }
}

#[test]
fn values() {
    fuzz("values", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        value::<Percentage>(&text);
        value::<MemoryLimit>(&text);
        value::<Priority>(&text);
        value::<LeaseId>(&text);
        match duration::parse(&text) {
            Ok(parsed) => {
                let printed = duration::format(parsed);
                assert!(printed.len() < 64, "{printed}");
                assert!(duration::parse(&printed).is_ok(), "{printed}");
            }
            Err(error) => assert!(error.to_string().len() < 256, "{error}"),
        }
        let now = jiff::Timestamp::UNIX_EPOCH.to_zoned(jiff::tz::TimeZone::UTC);
        if let Ok(end) = duration::parse_end(&text, &now) {
            assert!(end > now.timestamp(), "{text}");
        }
        let _ = duration::parse_start(&text, &now);
    });
}
