//! The key `default` of a quota: the request that the quota's users make if they name no share.

use std::collections::BTreeSet;

use gpush_api::{LeaseKind, LeaseShare};
use toml::de::DeTable;

use super::{fix, reader::Reader};
use crate::{
    diagnostic::Problem,
    duration,
    lease::{
        placement::nominal_mib,
        request::{DefaultRequest, RequestError, faults_of_default, parse_default},
    },
    quote::Quoted,
};

/// The limits of a quota, which its default must not exceed; `None` means no limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct DefaultBounds<'a> {
    /// Maximum number of leases.
    pub(super) leases: Option<u32>,
    /// Allowed kinds of leases.
    pub(super) kinds: Option<&'a BTreeSet<LeaseKind>>,
    /// Maximum duration in seconds.
    pub(super) longest_s: Option<u64>,
    /// Maximum MPS percentage.
    pub(super) mps_percentage: Option<u32>,
    /// Maximum memory in MiB, if the quota gives a fixed amount.
    pub(super) memory_mib: Option<u64>,
}

/// Reads the key.
pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>, bounds: DefaultBounds<'_>) -> Option<DefaultRequest> {
    let text = reader.word(table, "default", "\"mig=1g.10gb,for=4h\"")?;
    let problem = match parse_default(&text.value) {
        Ok(default) => match exceeded(&default, bounds) {
            None => return Some(default),
            Some((message, hint)) => Problem::new(text.span, message, hint),
        },
        Err(error) => {
            let faults = faults_of_default(&text.value);
            let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
            let message = format!("`default` can't be {}: {}", Quoted(&text.value), texts.join("; "));
            let meant = fix::default_request(&text.value).map(|meant| format!("write default = \"{meant}\""));
            let hints = || faults.iter().map(RequestError::hint).collect::<Vec<_>>();
            let hint = match meant.unwrap_or_else(|| if faults.len() > 1 { hints().join("; ") } else { error.hint() }) {
                hint if hint.starts_with("the keys are ") => {
                    format!("{hint}; for example, default = \"mig=1g.10gb,for=4h\"")
                }
                hint => hint,
            };
            Problem::new(text.span, message, hint)
        }
    };
    reader.report(problem);
    None
}

/// Returns why the quota would always refuse its default, and what to write instead; `None` if it would not.
fn exceeded(default: &DefaultRequest, bounds: DefaultBounds<'_>) -> Option<(String, String)> {
    let kind = default.share.kind()?;
    if bounds.leases == Some(0) {
        let hint = "leave `default` out, or allow leases";
        return Some(("`default` has no effect, because the quota has `leases = 0`".to_owned(), hint.to_owned()));
    }
    if let Some(kinds) = bounds.kinds.filter(|kinds| !kinds.contains(&kind)) {
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        let message = format!("`default` requests a lease of kind {kind}, which `kinds` of the quota does not allow");
        return Some((message, format!("request {}, or add \"{kind}\" to `kinds`", names.join(" or "))));
    }
    if let (Some(wanted), Some(most)) = (default.duration_s, bounds.longest_s)
        && wanted > most
    {
        let span = |seconds| duration::format(std::time::Duration::from_secs(seconds));
        let message = format!("`default` requests {}, but `longest` of the quota is {}", span(wanted), span(most));
        return Some((message, format!("write for={}, or leave `for` out", span(most))));
    }
    if let (LeaseShare::Mps { percentage: Some(wanted), .. }, Some(most)) = (&default.share, bounds.mps_percentage)
        && u32::from(wanted.tenths()) > most.saturating_mul(10)
    {
        let message = format!("`default` requests an MPS share of {wanted} %, but the quota allows {most} %");
        return Some((message, format!("write mps={most} or less")));
    }
    let wanted_mib = match &default.share {
        // A device has up to 15 % less memory than its name says.
        LeaseShare::MigProfile { profile } => nominal_mib(profile).map(|mib| mib / 100 * 85),
        LeaseShare::MigSize { memory_mib, .. } => *memory_mib,
        LeaseShare::Mps { memory_limit_mib, .. } => memory_limit_mib.map(gpush_api::MemoryLimit::mib),
        LeaseShare::Default {} | LeaseShare::Timeslice {} | LeaseShare::Whole {} => None,
    };
    if let (Some(wanted), Some(most)) = (wanted_mib, bounds.memory_mib)
        && wanted > most
    {
        let message = format!("`default` requests {wanted} MiB of memory, but `memory` of the quota is {most} MiB");
        return Some((message, "request less memory, or increase `memory`".to_owned()));
    }
    None
}
