//! The table of leases.

use gpush_api::{Gpu, Lease, LeaseBinding, LeaseState, LeaseUsageSummary};

use super::{
    NONE, end, idle, over_limit, place, reason, share, state, targets,
    usage::{self, EnergyUnit},
    user,
};
use crate::render::{
    Appearance,
    appearance::paint,
    listing::{Listing, insert, widened},
    table::{Align, Narrow},
};

const COLUMNS: [(&str, Align); 7] = [
    ("LEASE", Align::Left),
    ("USER", Align::Left),
    ("STATE", Align::Left),
    ("SHARE", Align::Left),
    ("TARGET", Align::Left),
    ("ENDS", Align::Left),
    ("DETAIL", Align::Left),
];

/// Lists the leases of `gpushctl lease list`.
pub(crate) fn list(leases: &[Lease], gpus: &[Gpu], look: &Appearance) -> Listing {
    let rows = leases.iter().map(|lease| row(lease, gpus, look)).collect();
    let time = |at: Option<jiff::Timestamp>| at.map_or_else(|| NONE.to_owned(), |at| look.clock(at));
    let uuids = |lease: &Lease| match lease.members.iter().map(|one| one.target.as_str()).collect::<Vec<_>>().join(",")
    {
        none if none.is_empty() => NONE.to_owned(),
        uuids => look.clean(&uuids),
    };
    // The figures of a column have one unit.
    let energy = |lease: &Lease| lease.usage.as_ref().and_then(|usage| usage.energy_j);
    let unit = EnergyUnit::of(leases.iter().filter_map(energy));
    let (mut columns, mut rows) = widened(
        &COLUMNS,
        rows,
        leases,
        &[
            ("REQUESTED AT", &|lease| look.clock(lease.created_at)),
            ("GRANTED AT", &|lease| time(lease.granted_at)),
            ("ENDS AT", &|lease| time(lease.expires_at)),
            ("USE", &|lease| lease.usage.as_ref().map_or_else(|| NONE.to_owned(), usage::times)),
            ("JOB NAME", &|lease| job_name(lease, look)),
            (unit.heading(), &|lease| energy(lease).map_or_else(|| NONE.to_owned(), |joules| unit.text(joules))),
            ("UNUSED DUE", &|lease| time(lease.idle.as_ref().map(|idle| idle.due_at))),
            ("LAST NOTICE", &|lease| {
                lease.notice.as_ref().map_or_else(|| NONE.to_owned(), |notice| look.clean(&notice.text))
            }),
            ("UUIDS", &uuids),
        ],
        look,
    );
    if look.exact {
        insert_use(&mut columns, &mut rows, leases, look);
    } else if leases.iter().any(|lease| job(lease).is_some()) {
        // The column of the jobs comes after that of the users.
        columns.insert(2, ("JOB", Align::Left));
        for (row, lease) in rows.iter_mut().zip(leases) {
            row.insert(2, look.fit(&shown_job(lease, look), longest_user(look)));
        }
    }
    Listing::new(&columns, rows, Narrow::spare(&["TARGET"]).prose(), look)
        .names(leases.iter().map(|lease| lease.id.to_string()))
        .uuids(leases.iter().flat_map(|lease| &lease.members).map(|member| member.target.clone()))
        .or_empty("No lease.")
}

/// Lists the leases of the caller, with the last notice of each open lease below the table.
pub(crate) fn own(leases: &[Lease], gpus: &[Gpu], look: &Appearance) -> Listing {
    let open = leases.iter().filter(|lease| lease.state != LeaseState::Ended);
    let lines = open.filter_map(|lease| Some((lease, lease.notice.as_ref()?))).flat_map(|(lease, notice)| {
        look.wrap(&format!("{}: ", lease.id), &format!("{} ({})", look.clean(&notice.text), look.ago(notice.at)))
    });
    list(leases, gpus, look).after(&lines.map(|line| line + "\n").collect::<String>())
}

/// Inserts the use of each lease for programs: one value in a column, empty if it is not known.
fn insert_use(columns: &mut Vec<(&'static str, Align)>, rows: &mut [Vec<String>], leases: &[Lease], look: &Appearance) {
    type Value = fn(&LeaseUsageSummary) -> Option<String>;
    let value = |of: Value| move |lease: &Lease| lease.usage.as_ref().and_then(of).unwrap_or_default();
    type Text = fn(SlurmJob) -> Option<String>;
    let of_job =
        |of: Text| move |lease: &Lease| job(lease).and_then(of).map_or_else(String::new, |text| look.clean(&text));
    insert(
        columns,
        rows,
        leases,
        &[
            ("USE STATE", &value(|usage| usage.state.map(|state| state.name().to_owned()))),
            ("UNUSED S", &value(|usage| usage.unused_s.map(|seconds| seconds.to_string()))),
            ("PROCESSES", &value(|usage| usage.process_count.map(|number| number.to_string()))),
            ("MEMORY MIB", &value(|usage| usage.memory_mib.map(|mib| mib.to_string()))),
            ("MEMORY PEAK MIB", &value(|usage| usage.memory_peak_mib.map(|mib| mib.to_string()))),
            ("BUSY S", &value(|usage| Some(usage.busy_s.to_string()))),
            ("IDLE S", &value(|usage| Some(usage.idle_s.to_string()))),
            ("EMPTY S", &value(|usage| Some(usage.empty_s.to_string()))),
            ("UNKNOWN S", &value(|usage| Some(usage.unknown_s.to_string()))),
            ("ENERGY J", &value(|usage| usage.energy_j.map(|joules| format!("{joules:.3}")))),
            ("ENERGY METHOD", &value(|usage| usage.energy_j.map(|_| usage.energy_method.name().to_owned()))),
            ("JOB", &of_job(|job| Some(job.id))),
            ("JOB NAME", &of_job(|job| job.name)),
            ("JOB ACCOUNT", &of_job(|job| job.account)),
            ("ENDED AT", &|lease| lease.ended_at.map_or_else(String::new, |at| at.to_string())),
        ],
    );
}

/// The Slurm job of a lease.
struct SlurmJob {
    /// Cluster and id, such as `ci/42`.
    id: String,
    name: Option<String>,
    account: Option<String>,
}

fn job(lease: &Lease) -> Option<SlurmJob> {
    match &lease.binding {
        LeaseBinding::Job { cluster, job, name, account, .. } => {
            Some(SlurmJob { id: format!("{cluster}/{job}"), name: name.clone(), account: account.clone() })
        }
        LeaseBinding::None
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time => None,
    }
}

/// Returns the job of a lease in a table: its id without the cluster, and its name.
fn shown_job(lease: &Lease, look: &Appearance) -> String {
    let Some(SlurmJob { id, name, .. }) = job(lease) else { return NONE.to_owned() };
    let id = id.rsplit_once('/').map_or(id.as_str(), |(_, id)| id);
    look.clean(&name.map_or_else(|| id.to_owned(), |name| format!("{id} {name}")))
}

fn job_name(lease: &Lease, look: &Appearance) -> String {
    job(lease).and_then(|job| job.name).map_or_else(|| NONE.to_owned(), |name| look.clean(&name))
}

/// Returns the maximum width of a user name.
fn longest_user(look: &Appearance) -> usize {
    match look.width {
        0..72 => 8,
        72..100 => 10,
        _ => 20,
    }
}

fn row(lease: &Lease, gpus: &[Gpu], look: &Appearance) -> Vec<String> {
    let (word, style) = state(lease.state);
    let mut user = user(lease, look);
    // The name of the owner is at the end of the text, so do not cut it: the table can break the cell at a blank.
    if lease.account.is_none() {
        user = look.fit(&user, longest_user(look));
    }
    let ends = match lease.state {
        LeaseState::Queued | LeaseState::Granting | LeaseState::Active => end(lease, look),
        LeaseState::Releasing | LeaseState::Ended => NONE.to_owned(),
    };
    vec![
        lease.id.to_string(),
        user,
        paint(style, word),
        share(lease, look),
        targets(lease, gpus, look),
        ends,
        detail(lease, look),
    ]
}

/// Describes what an active lease does, or why a lease is not active.
fn detail(lease: &Lease, look: &Appearance) -> String {
    let why = || lease.reason.map_or("ends", reason).to_owned();
    match lease.state {
        LeaseState::Queued => place(lease, look).unwrap_or_default(),
        LeaseState::Granting => lease.operation.as_ref().map_or_else(String::new, |id| format!("operation {id}")),
        LeaseState::Active => {
            lease.usage.as_ref().map_or_else(String::new, usage::now)
                + &idle::brief(lease, look)
                + &over_limit::brief(lease, look)
        }
        LeaseState::Releasing => match lease.waits_for.first() {
            Some(first) => look.clean(&format!("{}; waits: {first}", why())),
            None => format!("{}; waits for its processes", why()),
        },
        LeaseState::Ended => match lease.ended_at {
            Some(at) => format!("{}, {}", why(), look.ago(at)),
            None => why(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    /// Fault: the CSV had the use of a lease only as a sentence.
    #[test]
    fn csv_has_the_use_in_columns() {
        let used = Lease { usage: Some(fixtures::lease::usage()), ..fixtures::lease::mig() };
        let look = Appearance { exact: true, wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let csv = list(&[used, fixtures::lease::queued()], &[], &look).csv(true);
        let lines: Vec<&str> = csv.lines().collect();
        let names = "use_state,unused_s,processes,memory_mib,memory_peak_mib,busy_s,idle_s,empty_s,unknown_s,energy_j,energy_method,job,job_name,job_account,ended_at,";
        assert!(lines[0].contains(names), "{csv}");
        assert!(lines[1].contains(",idle,7500,2,9320,10240,3600,7500,0,60,43200.000,gpm,,,,,"), "{csv}");
        assert!(lines[2].contains(",,,,,,,,,,"), "{csv}");
    }

    #[test]
    fn own_leases_have_their_last_notice_below_the_table() {
        let look = fixtures::look(80, Charset::Ascii);
        let notice = gpush_api::LeaseNotice {
            at: look.now - jiff::SignedDuration::from_mins(3),
            kind: gpush_api::NoticeKind::Cordoned,
            text: "GPU 0 takes no new leases\u{7}".to_owned(),
            ends_at: None,
            terminals: None,
        };
        let leases = [Lease { notice: Some(notice), ..fixtures::lease::mig() }, fixtures::lease::mps()];
        let text = fixtures::plain(own(&leases, &[], &look).text());
        let last = text.lines().last().unwrap();
        assert!(last.starts_with(&format!("{}: GPU 0 takes no new leases", leases[0].id)), "{text}");
        assert!(
            last.ends_with("(3m ago)") && !fixtures::plain(list(&leases, &[], &look).text()).contains("3m ago"),
            "{text}"
        );
    }

    #[test]
    fn job_is_in_the_table_and_in_the_csv() {
        let job = LeaseBinding::Job {
            cluster: "ci".to_owned(),
            job: 812,
            node: "n1".to_owned(),
            restart: 0,
            leader: None,
            cgroup: None,
            name: Some("train, \u{1b}[31m".to_owned()),
            account: Some("physics".to_owned()),
        };
        let leases = [Lease { binding: job, ..fixtures::lease::mig() }, fixtures::lease::mps()];
        let text = fixtures::plain(list(&leases, &[], &fixtures::look(120, Charset::Ascii)).text());
        assert!(text.contains("JOB") && text.contains("812 train") && !text.contains('\u{1b}'), "{text}");
        let without = fixtures::plain(list(&leases[1..], &[], &fixtures::look(120, Charset::Ascii)).text());
        assert!(!without.contains("JOB"), "{without}");
        let look = Appearance { exact: true, wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let csv = list(&leases, &[], &look).csv(true);
        assert!(csv.contains(",ci/812,\"train, ") && csv.contains("\",physics,"), "{csv}");
    }

    #[test]
    fn owner_of_a_subordinate_uid_is_shown_on_a_narrow_terminal() {
        let mut lease = fixtures::lease::foreign();
        (lease.holder.uid, lease.account) = (100_000, Some("anna".to_owned()));
        for width in [60, 80, 120] {
            let text = fixtures::plain(list(&[lease.clone()], &[], &fixtures::look(width, Charset::Ascii)).text());
            assert!(text.lines().all(|line| line.len() <= width), "{text}");
            for word in ["100000", "(subordinate", "anna)"] {
                assert!(text.contains(word), "{width}: {text}");
            }
        }
    }
}
