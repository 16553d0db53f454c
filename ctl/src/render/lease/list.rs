//! The table of leases.

use gpush_api::{Gpu, Lease, LeaseState};

use super::{NONE, end, place, reason, share, state, targets, usage, user};
use crate::render::{
    Appearance,
    appearance::paint,
    listing::{Listing, widened},
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
    let (columns, rows) = widened(
        &COLUMNS,
        rows,
        leases,
        &[
            ("REQUESTED AT", &|lease| look.clock(lease.created_at)),
            ("GRANTED AT", &|lease| time(lease.granted_at)),
            ("ENDS AT", &|lease| time(lease.expires_at)),
            ("USE", &|lease| lease.usage.as_ref().map_or_else(|| NONE.to_owned(), usage::times)),
            ("ENERGY", &|lease| {
                let energy = lease.usage.as_ref().and_then(|usage| usage.energy_j);
                energy.map_or_else(|| NONE.to_owned(), usage::energy)
            }),
            ("UUIDS", &uuids),
        ],
        look,
    );
    Listing::new(&columns, rows, Narrow::spare(&["TARGET"]).prose(), look)
        .names(leases.iter().map(|lease| lease.id.to_string()))
        .uuids(leases.iter().flat_map(|lease| &lease.members).map(|member| member.target.clone()))
        .or_empty("No lease.")
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
        LeaseState::Active => lease.usage.as_ref().map_or_else(String::new, usage::now),
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
