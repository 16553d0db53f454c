//! The settings for the clients of a lease.

use gpush_api::{ApiError, Code, MemoryLimit, MpsSettings, Percentage, Priority};

use super::target::MpsTarget;
use crate::sharing;

/// Returns the settings for the clients of a lease on a target: the requested values, and the values of the daemon for
/// settings that were not requested.
///
/// # Errors
/// If a value exceeds a limit of the daemon or the memory of the target.
pub fn client_settings(
    target: &MpsTarget,
    percentage: Percentage,
    memory_limit: Option<MemoryLimit>,
    priority: Option<Priority>,
) -> Result<MpsSettings, ApiError> {
    let label = target.label();
    let ceiling = target.report.policy.clone().unwrap_or_default().settings;
    let bad = |what: String, hint: String| {
        Err(ApiError::new(Code::BadRequest, format!("cannot grant a lease on {label}: {what}")).hint(hint))
    };
    if percentage > ceiling.percentage {
        let most = ceiling.percentage;
        let what = format!("{percentage} % exceeds the limit for each client, {most} %");
        return bad(what, format!("request {most} % or less"));
    }
    let memory_limit_mib = memory_limit.or(ceiling.memory_limit_mib);
    if let (Some(asked), Some(most)) = (memory_limit_mib, ceiling.memory_limit_mib)
        && asked > most
    {
        let what = format!("memory limit {asked} exceeds the limit for each client, {most}");
        return bad(what, format!("request {most} or less"));
    }
    let priority = priority.unwrap_or(ceiling.priority);
    if priority < ceiling.priority {
        let most = ceiling.priority;
        let what = format!("priority `{priority}` is above the priority of the daemon, `{most}`");
        return bad(what, format!("request priority `{most}`"));
    }
    let settings = MpsSettings { percentage, memory_limit_mib, priority };
    if let Some(memory) = target.desired.as_ref().and_then(|target| target.memory_mib) {
        sharing::check_memory_limit(&settings, memory, &label)?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use gpush_api::MpsPolicy;
    use proptest::prelude::*;

    use super::*;
    use crate::mps::{
        report::DaemonReport,
        scene::{READY, gpu_target, report},
    };

    fn limit(mib: u64) -> Option<MemoryLimit> {
        format!("{mib}M").parse().ok()
    }

    fn percent(percent: u16) -> Percentage {
        percent.to_string().parse().unwrap()
    }

    /// Returns a target whose daemon has these limits for each client.
    fn target(settings: MpsSettings) -> MpsTarget {
        let policy = Some(MpsPolicy { settings, ..MpsPolicy::default() });
        gpu_target(0, DaemonReport { policy, ..report(READY) })
    }

    #[test]
    fn settings_that_were_not_requested_are_those_of_the_daemon() {
        let settings =
            MpsSettings { percentage: percent(60), memory_limit_mib: limit(4096), priority: Priority::BelowNormal };
        let granted = client_settings(&target(settings.clone()), percent(40), None, None).unwrap();
        assert_eq!(granted, MpsSettings { percentage: percent(40), ..settings });
    }

    #[test]
    fn value_above_a_limit_is_refused() {
        let settings =
            MpsSettings { percentage: percent(60), memory_limit_mib: limit(4096), priority: Priority::BelowNormal };
        let target = target(settings);
        let message =
            |percentage, memory, priority| client_settings(&target, percentage, memory, priority).unwrap_err().message;
        let begin = "cannot grant a lease on GPU 0: ";
        let found = message(percent(61), None, None);
        assert_eq!(found, format!("{begin}61 % exceeds the limit for each client, 60 %"));
        let found = message(percent(60), limit(4097), None);
        assert!(found.starts_with(&format!("{begin}memory limit 4097")), "{found}");
        let found = message(percent(60), None, Some(Priority::Normal));
        assert!(found.ends_with("is above the priority of the daemon, `below-normal`"), "{found}");
        // Fault: the hint was `request a lower value`, although the limit is known.
        let hint = |percentage, memory, priority| {
            client_settings(&target, percentage, memory, priority).unwrap_err().hint.unwrap()
        };
        assert_eq!(hint(percent(61), None, None), "request 60 % or less");
        assert_eq!(hint(percent(60), limit(4097), None), "request 4096M or less");
        assert_eq!(hint(percent(60), None, Some(Priority::Normal)), "request priority `below-normal`");
    }

    #[test]
    fn memory_limit_above_the_memory_of_the_target_is_refused() {
        let error = client_settings(&target(MpsSettings::default()), percent(10), limit(81_921), None).unwrap_err();
        assert_eq!(error.code, Code::BadRequest);
        assert!(client_settings(&target(MpsSettings::default()), percent(10), limit(81_920), None).is_ok());
    }

    proptest! {
        /// No lease gets more than the daemon allows each client.
        #[test]
        fn granted_settings_never_exceed_the_limits(
            most in 1..=100_u16, asked in 1..=100_u16,
            most_mib in prop::option::of(1..90_000_u64), asked_mib in prop::option::of(1..90_000_u64),
        ) {
            let memory_limit_mib = most_mib.and_then(limit);
            let settings = MpsSettings { percentage: percent(most), memory_limit_mib, ..MpsSettings::default() };
            if let Ok(granted) = client_settings(&target(settings), percent(asked), asked_mib.and_then(limit), None) {
                prop_assert!(granted.percentage == percent(asked) && asked <= most);
                prop_assert!(granted.memory_limit_mib.is_none_or(|limit| limit.mib() <= 81_920));
                if let Some(most) = most_mib {
                    prop_assert!(granted.memory_limit_mib.is_some_and(|limit| limit.mib() <= most));
                }
            }
        }
    }
}
