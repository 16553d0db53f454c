//! Quotas of users: a page about one user, and a list of users.

use gpush_api::{LeaseKind, QuotaLimit, QuotaResource, QuotaView};
use gpush_core::selector::ranges;

use super::{
    Appearance,
    appearance::gib,
    listing::{Listing, widened},
    names::gpu_numbers,
    table::{Align, Narrow, table},
};

const NONE: &str = "-";

/// Draws the quota of one user. With `only_slurm`, only Slurm jobs can lease the GPUs of the host. The built-in limit of
/// memory does not apply to them, so it is left out.
pub(crate) fn page(quota: &QuotaView, only_slurm: bool, look: &Appearance) -> String {
    let mut out = look.wrap("", &format!("{}: {}", user(quota, look), origin(quota, look))).join("\n") + "\n\n";
    let columns = [("LIMIT", Align::Left), ("USED", Align::Right), ("MAXIMUM", Align::Right), ("LEFT", Align::Right)];
    let row = |limit: &QuotaLimit| {
        let amount = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |value| amount(limit.resource, value));
        vec![
            resource(limit.resource).to_owned(),
            amount(Some(limit.used)),
            amount(limit.maximum),
            amount(limit.amount_left),
        ]
    };
    let is_built_in =
        |limit: &&QuotaLimit| only_slurm && quota.quota.is_none() && limit.resource == QuotaResource::Gpus;
    out += &table(&columns, quota.limits.iter().filter(|limit| !is_built_in(limit)).map(row).collect(), 0, look);
    let mut facts = Vec::new();
    if let Some(kinds) = &quota.allowed_kinds {
        facts.push(format!("Kinds of leases: {}.", names_of(kinds)));
    }
    if let Some(gpus) = &quota.allowed_gpus {
        facts.push(if gpus.is_empty() {
            "No GPU is allowed.".to_owned()
        } else {
            format!("Only {}.", gpu_numbers(gpus))
        });
    }
    if !quota.closed_gpus.is_empty() {
        facts.push(format!("The rules of {} permit only other users.", gpu_numbers(&quota.closed_gpus)));
    }
    if !quota.slurm_gpus.is_empty() {
        facts.push(format!("Only Slurm jobs can lease {}.", gpu_numbers(&quota.slurm_gpus)));
    }
    if let Some(seconds) = quota.longest_s {
        // The default request may set a shorter duration.
        let which = if quota.default_request.is_some() { "that names a share but no" } else { "without" };
        facts.push(format!("A lease lasts at most {0}. A request {which} --for lasts {0}.", span(seconds)));
    }
    if let Some(default) = &quota.default_request {
        facts.push(format!("A request without a share means {}.", look.clean(default)));
    }
    if !quota.ignored_quotas.is_empty() {
        let others = look.clean(&quota.ignored_quotas.join(", "));
        facts.push(format!("Without effect, because only the first quota applies: {others}."));
    }
    if !facts.is_empty() {
        out += &("\n".to_owned() + &look.wrap("", &facts.join(" ")).join("\n") + "\n");
    }
    out
}

/// Lists the quotas of several users. Each limit is shown as `used/maximum`; in CSV, as two numbers.
pub(crate) fn list(quotas: &[QuotaView], look: &Appearance) -> Listing {
    let listing = if look.exact { numbers(quotas, look) } else { shares(quotas, look) };
    listing.names(quotas.iter().map(|quota| quota.user.clone().unwrap_or_else(|| quota.uid.to_string()))).or_empty(
        "No user holds a lease, and no quota names a single user. Quotas of groups: `gpushctl quota --user USER` (administrator).",
    )
}

/// The columns of limits, with the limits that they show.
const LIMITS: [(&str, &str, &[QuotaResource]); 4] = [
    ("LEASES", "MAX LEASES", &[QuotaResource::Leases]),
    ("WAITING", "MAX WAITING", &[QuotaResource::Waiting]),
    ("MEMORY", "MAX MEMORY", &[QuotaResource::MemoryMib, QuotaResource::Gpus]),
    ("MPS", "MAX MPS", &[QuotaResource::MpsPercent]),
];

fn of_resources<'q>(quota: &'q QuotaView, resources: &[QuotaResource]) -> Option<&'q QuotaLimit> {
    quota.limits.iter().find(|limit| resources.contains(&limit.resource))
}

fn shares(quotas: &[QuotaView], look: &Appearance) -> Listing {
    let mut columns = vec![("USER", Align::Left), ("QUOTA", Align::Left)];
    columns.extend(LIMITS.map(|(name, ..)| (name, Align::Right)));
    let rows = quotas.iter().map(|quota| {
        let mut row = named(quota, look);
        row.extend(LIMITS.map(|(.., resources)| of_resources(quota, resources).map_or_else(|| NONE.to_owned(), share)));
        row
    });
    let gpus = |quota: &QuotaView| {
        let allowed = quota.allowed_gpus.as_ref().map(|gpus| ranges(gpus.iter().copied()).join(","));
        allowed.unwrap_or_else(|| "all".to_owned())
    };
    let kinds =
        |quota: &QuotaView| quota.allowed_kinds.as_ref().map_or_else(|| "all".to_owned(), |kinds| names_of(kinds));
    let (columns, rows) = widened(
        &columns,
        rows.collect(),
        quotas,
        &[
            ("UID", &|quota| quota.uid.to_string()),
            ("KINDS", &kinds),
            ("GPUS", &gpus),
            ("DEFAULT", &|quota| {
                quota.default_request.as_ref().map_or_else(|| NONE.to_owned(), |text| look.clean(text))
            }),
            ("LONGEST", &|quota| quota.longest_s.map_or_else(|| NONE.to_owned(), span)),
        ],
        look,
    );
    Listing::new(&columns, rows, Narrow::spare(&["MPS", "WAITING"]), look)
}

/// Lists the limits with one number in a cell. The unit of memory is MiB or GPUs, as the quota says.
fn numbers(quotas: &[QuotaView], look: &Appearance) -> Listing {
    let mut headings = vec!["USER", "QUOTA", "UID"];
    headings.extend(LIMITS.iter().flat_map(|(used, maximum, _)| [*used, *maximum]));
    headings.push("MEMORY UNIT");
    let rows = quotas.iter().map(|quota| {
        let mut row = named(quota, look);
        row.push(quota.uid.to_string());
        for (.., resources) in LIMITS {
            let limit = of_resources(quota, resources);
            let number = |value: Option<f64>| value.map_or_else(|| NONE.to_owned(), |value| value.to_string());
            row.extend([number(limit.map(|limit| limit.used)), number(limit.and_then(|limit| limit.maximum))]);
        }
        let is_gpus = of_resources(quota, &[QuotaResource::Gpus]).is_some();
        row.push(if is_gpus { "gpus" } else { "mib" }.to_owned());
        row
    });
    Listing::of(headings, rows.collect())
}

fn named(quota: &QuotaView, look: &Appearance) -> Vec<String> {
    vec![user(quota, look), quota.quota.as_ref().map_or_else(|| NONE.to_owned(), |quota| look.clean(quota))]
}

fn names_of(kinds: &[LeaseKind]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

fn span(seconds: u64) -> String {
    gpush_core::duration::format(std::time::Duration::from_secs(seconds))
}

fn user(quota: &QuotaView, look: &Appearance) -> String {
    quota.user.as_ref().map_or_else(|| format!("uid {}", quota.uid), |user| look.clean(user))
}

/// Says which quota applies.
fn origin(quota: &QuotaView, look: &Appearance) -> String {
    match &quota.quota {
        Some(one) => format!("the quota for {} applies", look.clean(one)),
        None if quota.limits.iter().all(|limit| limit.maximum.is_none()) => "no limits".to_owned(),
        None => "no quota of the config names this user, so the built-in limits apply".to_owned(),
    }
}

fn resource(resource: QuotaResource) -> &'static str {
    match resource {
        QuotaResource::Leases => "leases",
        QuotaResource::Waiting => "waiting requests",
        QuotaResource::MemoryMib | QuotaResource::Gpus => "GPU memory",
        QuotaResource::MpsPercent => "MPS percentage",
    }
}

/// Formats an amount with its unit.
fn amount(resource: QuotaResource, value: f64) -> String {
    match resource {
        QuotaResource::Leases | QuotaResource::Waiting => format!("{value}"),
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "amounts are not negative")]
        QuotaResource::MemoryMib => format!("{} GiB", gib(value as u64)),
        QuotaResource::Gpus => format!("{value} GPUs"),
        QuotaResource::MpsPercent => format!("{value} %"),
    }
}

/// Formats a limit as `used/maximum`.
fn share(limit: &QuotaLimit) -> String {
    let used = amount(limit.resource, limit.used);
    let Some(maximum) = limit.maximum else { return used };
    let unit = used.find(' ').map_or("", |at| &used[at..]);
    let number = used.strip_suffix(unit).unwrap_or(&used);
    format!("{number}/{}", amount(limit.resource, maximum))
}

#[cfg(test)]
pub(super) mod tests {
    use gpush_api::GpuIndex;
    use insta::assert_snapshot;

    use super::*;
    use crate::render::{Charset, fixtures};

    fn limit(resource: QuotaResource, used: f64, maximum: Option<f64>) -> QuotaLimit {
        QuotaLimit { resource, used, maximum, amount_left: maximum.map(|maximum| maximum - used) }
    }

    fn student() -> QuotaView {
        QuotaView {
            uid: 1001,
            user: Some("anna".to_owned()),
            quota: Some("group students".to_owned()),
            ignored_quotas: vec!["everybody".to_owned()],
            allowed_kinds: Some(vec![LeaseKind::Mig, LeaseKind::Mps]),
            allowed_gpus: Some(vec![GpuIndex(0), GpuIndex(1), GpuIndex(2), GpuIndex(3)]),
            closed_gpus: vec![GpuIndex(2)],
            slurm_gpus: vec![GpuIndex(3)],
            longest_s: Some(43_200),
            default_request: Some("mig=1g.10gb,for=4h".to_owned()),
            limits: vec![
                limit(QuotaResource::Leases, 1.0, Some(2.0)),
                limit(QuotaResource::Waiting, 0.0, Some(4.0)),
                limit(QuotaResource::MemoryMib, 10_240.0, Some(40_960.0)),
                limit(QuotaResource::MpsPercent, 25.0, Some(50.0)),
            ],
        }
    }

    /// Returns root, who has no limits.
    fn root() -> QuotaView {
        let limits = vec![limit(QuotaResource::Leases, 3.0, None), limit(QuotaResource::MemoryMib, 81_920.0, None)];
        let none = QuotaView { quota: None, ignored_quotas: Vec::new(), ..student() };
        QuotaView {
            uid: 0,
            user: Some("root".to_owned()),
            allowed_kinds: None,
            allowed_gpus: None,
            closed_gpus: Vec::new(),
            slurm_gpus: Vec::new(),
            longest_s: None,
            default_request: None,
            limits,
            ..none
        }
    }

    /// Returns a user that no quota names.
    fn unnamed() -> QuotaView {
        let limits = vec![
            limit(QuotaResource::Leases, 0.0, Some(32.0)),
            limit(QuotaResource::Waiting, 0.0, Some(16.0)),
            limit(QuotaResource::Gpus, 0.5, Some(6.0)),
        ];
        QuotaView { uid: 1002, user: None, limits, ..root() }
    }

    /// Returns a user with a quota, root, and a user that no quota names.
    pub(in crate::render) fn samples() -> [QuotaView; 3] {
        [student(), root(), unnamed()]
    }

    /// Fault: on a host of Slurm, the page said how much GPU memory is left, although only jobs can lease it.
    #[test]
    fn memory_that_only_jobs_can_lease_is_not_left() {
        let look = fixtures::look(80, Charset::Utf8);
        let memory = |quota: &QuotaView, only_slurm| page(quota, only_slurm, &look).contains("GPU memory");
        assert!(!memory(&unnamed(), true) && memory(&unnamed(), false) && memory(&student(), true));
    }

    #[test]
    fn quotas_of_users_are_drawn_as_pages_and_as_a_list() {
        let look = fixtures::look(80, Charset::Utf8);
        let all = samples();
        let mut pages: Vec<String> = all.iter().map(|quota| fixtures::plain(&page(quota, false, &look))).collect();
        pages.push(fixtures::plain(list(&all, &look).text()));
        assert_snapshot!(pages.join("\n---\n"));
    }
}
