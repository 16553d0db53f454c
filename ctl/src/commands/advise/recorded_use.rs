//! `gpushctl advise from-use`: smaller shares and other layouts, from recorded use.

use gpush_advice::{
    LayoutAdvice, SizeAdvice, SizeTotals, SizeVerdict, Totaled, layout_advice, right_sizes, size_totals,
};
use gpush_api::{ApiError, Code, Gpu, Lease, LeaseId, UsageHistory};
use gpush_client::{Client, Kind};
use gpush_core::quote::Quoted;

use crate::{
    args::{AdviseFromUseArgs, AdviseSubject},
    commands::{lease::uid_of, select},
    exit::{Failure, Outcome},
    output::Output,
    render::advise::recorded_use::{FromUse, from_use},
};

pub(super) async fn run(client: &mut Client, args: &AdviseFromUseArgs, out: &Output) -> Outcome {
    if args.subject == AdviseSubject::Host && !args.names.is_empty() {
        let error = ApiError::new(Code::BadRequest, "the advice about layouts is for all GPUs of the host");
        return Err(error.hint("leave out the names, or see `gpushctl advise from-use --help`").into());
    }
    // gpushd refuses to show the use of another user to users.
    let is_one_user = args.subject == AdviseSubject::User && args.names.len() == 1;
    let user = args.names.first().filter(|_| is_one_user).map(String::as_str);
    let history = client.usage_history(args.since, user).await?;
    let gpus = client.gpus(true).await?;
    if args.subject == AdviseSubject::Lease {
        refuse_absent(client, &history, &lease_ids(&args.names)?).await?;
    }
    let found = match args.subject {
        AdviseSubject::Host => of_host(&history, &gpus)?,
        AdviseSubject::Lease => of_leases(&history, &gpus, &args.names)?,
        AdviseSubject::User | AdviseSubject::Gpu => of_groups(&history, &gpus, args)?,
    };
    out.show(&found, |look| from_use(&found, &gpus, look))?;
    Ok(0)
}

/// Refuses named leases that the recorded use does not have. Says whether there is no such lease, whether it belongs to
/// another user, or whether it was not held in the period.
async fn refuse_absent(client: &mut Client, history: &UsageHistory, named: &[LeaseId]) -> Result<(), Failure> {
    let is_absent = |id: &&LeaseId| history.used_leases.iter().all(|lease| lease.lease_id != **id);
    let Some(absent) = named.iter().find(is_absent) else { return Ok(()) };
    match client.lease_of(*absent).await {
        Err(error) if error.kind == Kind::Answer => Err(error.into()),
        Ok(lease) => Err(absent_lease(&lease, history).into()),
        Err(_) => Err(unrecorded(&format!("lease {absent}"), history).into()),
    }
}

/// Returns the error for a lease without recorded use.
fn absent_lease(lease: &Lease, history: &UsageHistory) -> ApiError {
    // Only the holder and administrators see who requested a lease.
    if history.user.is_none() || lease.asked_by.is_some() {
        return unrecorded(&format!("lease {}", lease.id), history);
    }
    let error = ApiError::new(Code::Denied, format!("lease {} belongs to another user", lease.id));
    error.hint("for your leases, run `gpushctl advise from-use`; administrators see those of all users")
}

/// Returns the ids that names mean, each once: `L5` and `5`.
fn lease_ids(names: &[String]) -> Result<Vec<LeaseId>, ApiError> {
    let mut ids: Vec<LeaseId> = Vec::new();
    for name in names {
        let number = name.parse::<u64>().map(LeaseId).ok();
        let id = name.parse::<LeaseId>().ok().or(number).ok_or_else(|| not_a_lease(name))?;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

fn empty(history: &UsageHistory, subject: &'static str) -> FromUse {
    FromUse {
        from: history.from,
        until: history.until,
        subject,
        has_older_leases: history.has_older_leases,
        is_named: false,
        is_own: history.user.is_some(),
        size_advice: Vec::new(),
        size_totals: Vec::new(),
        layout_advice: None,
    }
}

/// Returns the advice for the layouts of the host.
///
/// # Errors
/// The caller sees only their own leases.
fn of_host(history: &UsageHistory, gpus: &[Gpu]) -> Result<FromUse, Failure> {
    if history.user.is_some() {
        let error = ApiError::new(Code::Denied, "the advice about layouts needs the requests of all users");
        let error = error.cause("you see only your own leases");
        return Err(error.hint("for your leases, run `gpushctl advise from-use`").into());
    }
    let advice: LayoutAdvice = layout_advice(history, gpus);
    Ok(FromUse { layout_advice: Some(advice), ..empty(history, "host") })
}

/// Returns the advice for leases, those that free the most first.
fn of_leases(history: &UsageHistory, gpus: &[Gpu], names: &[String]) -> Result<FromUse, Failure> {
    let named = lease_ids(names)?;
    let mut advice = right_sizes(&history.used_leases, gpus);
    if !named.is_empty() {
        if let Some(absent) = named.iter().find(|id| advice.iter().all(|one| one.lease_id != **id)) {
            return Err(unrecorded(&format!("lease {absent}"), history).into());
        }
        advice.retain(|one| named.contains(&one.lease_id));
    }
    advice.sort_by_key(|one| std::cmp::Reverse((one.is_smaller(), freed(one))));
    Ok(FromUse { size_advice: advice, is_named: !named.is_empty(), ..empty(history, "lease") })
}

/// Returns what an advice frees, for the order of the list: memory times time.
fn freed(advice: &SizeAdvice) -> u64 {
    match &advice.verdict {
        SizeVerdict::SmallerDevice { freed_slices, .. } => u64::from(*freed_slices) * 8192 * advice.held_s,
        SizeVerdict::SmallerLimit { freed_mib, .. } => freed_mib.saturating_mul(advice.held_s),
        SizeVerdict::None { .. } => 0,
    }
}

/// Returns the advice for users or GPUs.
fn of_groups(history: &UsageHistory, gpus: &[Gpu], args: &AdviseFromUseArgs) -> Result<FromUse, Failure> {
    let advice = right_sizes(&history.used_leases, gpus);
    let (by, subject) = match args.subject {
        AdviseSubject::Gpu => (Totaled::ByGpu, "gpu"),
        AdviseSubject::User | AdviseSubject::Lease | AdviseSubject::Host => (Totaled::ByUser, "user"),
    };
    let mut totals: Vec<SizeTotals> = size_totals(&advice, by);
    if !args.names.is_empty() {
        let keys: Vec<String> = match by {
            Totaled::ByUser => args.names.clone(),
            Totaled::ByGpu => {
                select(gpus.to_vec(), &args.names)?.into_iter().map(|gpu| gpu.uuid.as_str().to_owned()).collect()
            }
        };
        let is_absent = |key: &&String| by == Totaled::ByUser && totals.iter().all(|one| one.key != **key);
        if let Some(absent) = keys.iter().find(is_absent) {
            uid_of(absent)?;
            return Err(unrecorded(&format!("a lease of {}", Quoted(absent)), history).into());
        }
        totals.retain(|one| keys.contains(&one.key));
    }
    let position = |totals: &SizeTotals| gpus.iter().position(|gpu| gpu.uuid.as_str() == totals.key);
    // The totals are in the order of the UUIDs. Users know the indexes.
    totals.sort_by_key(|one| position(one).unwrap_or(usize::MAX));
    Ok(FromUse { size_totals: totals, ..empty(history, subject) })
}

fn not_a_lease(name: &str) -> ApiError {
    let error = ApiError::new(Code::BadRequest, format!("{} is not a lease id", Quoted(name)));
    error.hint("write L and a number, such as L17; for a user or a GPU, `gpushctl advise from-use user` or `… gpu`")
}

fn unrecorded(what: &str, history: &UsageHistory) -> ApiError {
    let since = gpush_api::text::local_time(history.from);
    let error = ApiError::new(Code::NotFound, format!("{what} was not held since {since}"));
    error.hint("name an earlier start, such as `--since 30d`, or leave out the name")
}

#[cfg(test)]
pub(in crate::commands) mod tests {
    use super::*;
    use crate::render::advise::recorded_use::tests::{history, host};

    fn arguments(subject: AdviseSubject, names: &[&str]) -> AdviseFromUseArgs {
        AdviseFromUseArgs { subject, names: names.iter().map(|&name| name.to_owned()).collect(), since: None }
    }

    /// Returns advice whose JSON documents have all fields together.
    pub(in crate::commands) fn all() -> FromUse {
        let leases = of_leases(&history(), &host(), &[]).unwrap();
        let users = of_groups(&history(), &host(), &arguments(AdviseSubject::User, &[])).unwrap();
        let layouts = of_host(&history(), &host()).unwrap();
        FromUse { size_advice: leases.size_advice, size_totals: users.size_totals, ..layouts }
    }

    fn message(outcome: Result<FromUse, Failure>) -> String {
        match outcome.unwrap_err() {
            Failure::Error(error) => error.message.clone(),
            Failure::BrokenPipe => panic!("no error"),
        }
    }

    #[test]
    fn named_leases_users_and_gpus_are_selected() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let found = of_leases(&history(), &host(), &names(&["L18"])).unwrap();
        assert_eq!(found.size_advice.len(), 1);
        let found = of_groups(&history(), &host(), &arguments(AdviseSubject::User, &["ben"])).unwrap();
        assert!(found.size_totals.iter().all(|one| one.key == "ben") && !found.size_totals.is_empty());
        let found = of_groups(&history(), &host(), &arguments(AdviseSubject::Gpu, &["0"])).unwrap();
        assert!(found.size_totals.iter().all(|one| one.key == host()[0].uuid.as_str()));
        let all = of_leases(&history(), &host(), &[]).unwrap().size_advice;
        assert!(all.is_sorted_by_key(|one| std::cmp::Reverse((one.is_smaller(), freed(one)))));
    }

    #[test]
    fn wrong_names_are_refused() {
        let names = |name: &str| vec![name.to_owned()];
        assert_eq!(message(of_leases(&history(), &host(), &names("anna"))), "`anna` is not a lease id");
        let absent = message(of_leases(&history(), &host(), &names("L99")));
        assert!(absent.starts_with("lease L99 was not held since"), "{absent}");
        let of_user = |name| message(of_groups(&history(), &host(), &arguments(AdviseSubject::User, &[name])));
        assert!(of_user("root").starts_with("a lease of `root` was not held since"), "{}", of_user("root"));
        // Fault: the error for a user who does not exist was about the period.
        assert_eq!(of_user("zoe-nobody"), "this host has no user \"zoe-nobody\"");
        assert!(of_groups(&history(), &host(), &arguments(AdviseSubject::Gpu, &["99"])).is_err());
    }

    /// Faults: `5` was refused, and repeated ids were listed twice.
    #[test]
    fn ids_of_leases_may_lack_the_letter_and_count_once() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(lease_ids(&names(&["5", "L5", "l18"])).unwrap(), [LeaseId(5), LeaseId(18)]);
    }

    /// Fault: the error for a lease of another user said that it was not held.
    #[test]
    fn lease_without_recorded_use_belongs_to_another_user_or_was_not_held() {
        let own = UsageHistory { user: Some("anna".to_owned()), ..history() };
        let foreign = crate::render::fixtures::lease::foreign();
        assert!(absent_lease(&foreign, &own).message.contains("belongs to another user"));
        assert!(absent_lease(&foreign, &history()).message.contains("was not held since"));
    }

    #[test]
    fn layouts_need_the_requests_of_all_users() {
        let own = UsageHistory { user: Some("anna".to_owned()), request_days: Vec::new(), ..history() };
        assert!(message(of_host(&own, &host())).contains("requests of all users"));
    }
}
