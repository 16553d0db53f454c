//! Formats requests as text.

use gpush_api::{LeaseRequest, LeaseShare, LeaseWait};

use super::Key;

/// Formats a request in the grammar. [`super::build`] reads the text as the same request. Audit
/// records contain this text.
#[must_use]
pub fn spec(request: &LeaseRequest) -> String {
    let mut terms: Vec<(Key, Option<String>)> = Vec::new();
    match &request.share {
        LeaseShare::Default {} => {}
        LeaseShare::MigProfile { profile } => terms.push((Key::Mig, Some(profile.clone()))),
        LeaseShare::MigSize { memory_mib, slices } => {
            terms.extend(memory_mib.map(|mib| (Key::Memory, Some(memory(mib)))));
            terms.extend(slices.map(|slices| (Key::Slices, Some(slices.to_string()))));
        }
        LeaseShare::Mps { percentage, memory_limit_mib, priority } => {
            terms.push((Key::Mps, percentage.map(|percentage| percentage.to_string())));
            terms.extend(memory_limit_mib.map(|limit| (Key::Memory, Some(memory(limit.mib())))));
            terms.extend(priority.map(|priority| (Key::Priority, Some(priority.to_string()))));
        }
        LeaseShare::Timeslice {} => terms.push((Key::Timeslice, None)),
        LeaseShare::Whole {} => terms.push((Key::Whole, None)),
    }
    terms.extend(request.gpus.iter().map(|selector| (Key::Gpu, Some(selector.clone()))));
    if request.count != 1 {
        terms.push((Key::Count, Some(request.count.to_string())));
    }
    terms.extend(request.duration_s.map(|seconds| (Key::For, Some(duration(seconds)))));
    match request.wait {
        LeaseWait::No => {}
        LeaseWait::Seconds(seconds) => terms.push((Key::Wait, Some(duration(seconds)))),
        LeaseWait::Unlimited => terms.push((Key::Wait, None)),
    }
    let term = |(key, value): (Key, Option<String>)| match value {
        Some(value) => format!("{}={value}", key.name()),
        None => key.name().to_owned(),
    };
    terms.into_iter().map(term).collect::<Vec<_>>().join(",")
}

/// Writes a request of the grammar as flags of `gpushctl run`: `mps=25,memory=8G` as `--mps 25 --memory 8G`.
#[must_use]
pub fn flags(spec: &str) -> String {
    let flag = |term: &str| match term.split_once('=') {
        Some((key, value)) => format!("--{key} {value}"),
        None => format!("--{term}"),
    };
    spec.split(',').map(flag).collect::<Vec<_>>().join(" ")
}

fn duration(seconds: u64) -> String {
    crate::duration::format(std::time::Duration::from_secs(seconds))
}

fn memory(mib: u64) -> String {
    if mib.is_multiple_of(1024) { format!("{}G", mib / 1024) } else { format!("{mib}M") }
}
