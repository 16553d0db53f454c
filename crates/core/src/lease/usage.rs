//! Leases that block a change. A leased target counts as in use even if it is idle.

use gpush_api::LeaseId;

/// Maximum number of leases that a hint names.
const MOST_NAMED: usize = 8;

/// Returns a hint about what an administrator can do about the leases; `None` if there are no
/// leases.
#[must_use]
pub fn hint(leases: impl IntoIterator<Item = LeaseId>) -> Option<String> {
    let mut ids: Vec<LeaseId> = leases.into_iter().collect();
    ids.sort_unstable();
    ids.dedup();
    // Without `--kill`, an ended lease still waits until its processes end.
    let (lease, its) = match ids.len() {
        0 => return None,
        1 => ("lease", "its"),
        _ => ("leases", "their"),
    };
    let named: Vec<String> = ids.iter().take(MOST_NAMED).map(LeaseId::to_string).collect();
    let more = match ids.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!("; {more} more leases block it"),
    };
    let command = format!("`gpushctl lease end {} --kill --reason TEXT`", named.join(" "));
    Some(format!("to end the {lease} and {its} processes: {command} (administrator){more}"))
}

#[cfg(test)]
mod tests {
    use gpush_api::{LeaseHolder, LeaseKind, LeaseUse};

    use super::*;

    fn lease(id: u64, user: Option<&str>) -> LeaseUse {
        LeaseUse {
            id: LeaseId(id),
            target: "MIG-1".into(),
            kind: LeaseKind::Mig,
            share: gpush_api::MemberShare::Mig { profile: "1g.10gb".to_owned() },
            holder: LeaseHolder { uid: 1000, user: user.map(str::to_owned) },
            until: (id == 17).then(|| "2026-12-01T08:00:00.5Z".parse().unwrap()),
        }
    }

    #[test]
    fn blocking_lease_names_holder_and_end() {
        let until = gpush_api::text::local_time("2026-12-01T08:00:00Z".parse().unwrap());
        assert_eq!(lease(17, Some("alice")).to_string(), format!("lease L17 of alice, until {until}"));
        assert_eq!(lease(18, None).to_string(), "lease L18 of uid 1000, without an end");
    }

    #[test]
    fn hint_offers_revocation() {
        assert_eq!(hint([]), None);
        let one = hint([LeaseId(17), LeaseId(17)]).unwrap();
        assert_eq!(
            one,
            "to end the lease and its processes: `gpushctl lease end L17 --kill --reason TEXT` (administrator)"
        );
        let two = hint([LeaseId(21), LeaseId(17)]).unwrap();
        assert_eq!(
            two,
            "to end the leases and their processes: `gpushctl lease end L17 L21 --kill --reason TEXT` (administrator)"
        );
        let many = hint((1..=20).map(LeaseId)).unwrap();
        assert!(many.ends_with("(administrator); 12 more leases block it"), "{many}");
    }
}
