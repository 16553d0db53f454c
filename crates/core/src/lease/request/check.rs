//! Checks the limits of a request. A request in text and a request in JSON have the same limits.

use gpush_api::{LONGEST_LEASE_S, LeaseKind, LeaseRequest, LeaseShare, LeaseWait, MOST_MEMBERS, MemoryLimit};

use super::{RequestError, profile::profile};
use crate::{
    quote::Quoted,
    selector::{self, Selector},
};

/// Checks the limits of a request.
///
/// # Errors
/// The first value that is outside its limits.
pub fn check(request: &LeaseRequest) -> Result<(), RequestError> {
    let LeaseRequest {
        share,
        gpus,
        count,
        duration_s,
        wait,
        target: _,
        holder: _,
        process: _,
        bind_to: _,
        notice_signal: _,
    } = request;
    match share {
        LeaseShare::MigProfile { profile } => {
            self::profile(profile)
                .map_err(|why| RequestError::BadProfile { name: Quoted(profile).to_string(), why })?;
        }
        LeaseShare::MigSize { memory_mib, slices } => {
            if memory_mib.is_some_and(|mib| MemoryLimit::of_mib(mib).is_none()) {
                return Err(RequestError::BadMemory);
            }
            if *slices == Some(0) {
                return Err(RequestError::NoSlices);
            }
        }
        LeaseShare::Default {} | LeaseShare::Mps { .. } | LeaseShare::Timeslice {} | LeaseShare::Whole {} => {}
    }
    if !(1..=MOST_MEMBERS).contains(count) {
        return Err(RequestError::BadCount { count: *count });
    }
    if let (Some(kind @ (LeaseKind::Mps | LeaseKind::Timeslice)), 2..) = (share.kind(), *count) {
        return Err(RequestError::NotCountable { kind });
    }
    let waits = match wait {
        LeaseWait::Seconds(seconds) => Some(*seconds),
        LeaseWait::No | LeaseWait::Unlimited => None,
    };
    if [*duration_s, waits].into_iter().flatten().any(|seconds| !(1..=LONGEST_LEASE_S).contains(&seconds)) {
        return Err(RequestError::BadDuration);
    }
    if gpus.len() > selector::MOST {
        return Err(RequestError::TooManySelectors { count: gpus.len() });
    }
    for text in gpus {
        text.parse::<Selector>().map_err(RequestError::BadSelector)?;
    }
    Ok(())
}
