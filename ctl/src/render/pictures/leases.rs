//! Drawings of leases.

use gpush_api::{
    EndReason, Enforcement, Lease, LeaseGrant, LeaseId, LeaseKind, LeaseState, LeaseUsageSummary, LeaseUse,
    MemberShare, UseState,
};

use super::*;
use crate::render::{lease, status::Status};

const NONE: lease::Surroundings<'_> = lease::Surroundings { usage: &[], leases: &[], has_memory_limits: false };

/// Returns the GPUs of the sample host.
fn host() -> Vec<Gpu> {
    fixtures::mixed()
}

#[test]
fn lease_list_at_every_width() {
    let (all, gpus) = (fixtures::lease::all(), host());
    for width in [60, 80, 120] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("lease-list-{width}"), fits(lease::list(&all, &gpus, &look).text(), &look));
    }
    let ascii = fixtures::look(80, Charset::Ascii);
    assert!(fits(lease::list(&all, &gpus, &ascii).text(), &ascii).is_ascii());
    let pipe = Appearance { wraps: false, ..fixtures::look(60, UTF8) };
    let listing = lease::list(&all, &gpus, &pipe);
    assert_eq!(fixtures::plain(listing.text()).lines().count(), all.len() + 1, "one line for each lease");
    assert_eq!(listing.name_lines().lines().count(), all.len());
    assert!(listing.csv(true).starts_with("lease,user,state,share,target,ends,detail\nL17,alice,active,mps 25% 8G"));
    let look = fixtures::look(80, UTF8);
    assert_eq!(lease::list(&[], &gpus, &look).text(), "No lease.\n");
}

#[test]
fn lease_show_of_every_kind_and_state() {
    let gpus = host();
    for width in [60, 80, 120] {
        let look = fixtures::look(width, UTF8);
        let text = fixtures::plain(lease::show(&fixtures::lease::all(), &gpus, &NONE, &look).text());
        // Skip lines with UUIDs: gpushctl does not shorten UUIDs, because users copy them.
        for line in text.lines().filter(|line| !line.contains("MIG-") && !line.contains("GPU-")) {
            assert!(appearance::width(line) <= width, "{line}");
        }
        assert_snapshot!(format!("lease-show-{width}"), text);
    }
    let look = fixtures::look(80, UTF8);
    let without = fixtures::plain(lease::show(&[fixtures::lease::mig()], &[], &NONE, &look).text());
    assert!(without.contains("MIG-00070000-aaaa-5bbb-8ccc-0123456789ab"), "without readings: {without}");
}

#[test]
fn lease_changes_in_a_line() {
    let look = fixtures::look(80, UTF8);
    let gpus = host();
    let granted = |lease| LeaseGrant {
        lease,
        environment: Vec::new(),
        warnings: Vec::new(),
        quota_notes: Vec::new(),
        binding_reason: None,
    };
    let mut text = fixtures::plain(lease::granted(&granted(fixtures::lease::mps()), &gpus, &look).text());
    text += "---\n";
    for one in fixtures::lease::all() {
        text += &format!("started  {}", lease::started(&one, &look));
    }
    text += "---\n";
    for one in [fixtures::lease::queued(), fixtures::lease::granting()] {
        text += &lease::waits(&one, &look);
    }
    text += "---\n";
    text += &lease::renewed(&fixtures::lease::mig(), None, &look);
    let at_end = fixtures::lease::expired().ended_at.unwrap();
    for one in [fixtures::lease::revoked(), fixtures::lease::expired()] {
        text += &lease::ended(&one, at_end, &look);
    }
    // Fault: the command said that it had released a lease that had ended earlier.
    text += &lease::ended(&fixtures::lease::expired(), look.now, &look);
    assert_snapshot!("lease-changes", fixtures::plain(&text));
}

/// Fault: `lease renew --for 1h` shortened a lease of 4 hours, and did not say so.
#[test]
fn renewal_that_shortens_a_lease_is_mentioned() {
    let look = fixtures::look(80, UTF8);
    let one = fixtures::lease::mig();
    let end = one.expires_at.unwrap();
    let renewed = |before| fixtures::plain(&lease::renewed(&one, before, &look));
    let hour = jiff::SignedDuration::from_hours(1);
    assert!(renewed(Some(end + hour)).contains("! earlier than before, which was"), "{}", renewed(Some(end + hour)));
    for before in [None, Some(end), Some(end - hour)] {
        assert!(!renewed(before).contains("earlier"), "{before:?}");
    }
}

#[test]
fn every_word_of_a_lease_is_distinct() {
    let look = fixtures::look(120, UTF8);
    let mut texts: Vec<String> = EndReason::ALL
        .into_iter()
        .map(|reason| {
            let one = gpush_api::Lease { reason: Some(reason), ..fixtures::lease::expired() };
            fixtures::plain(&lease::ended(&one, look.now, &look))
        })
        .collect();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), EndReason::ALL.len(), "{texts:?}");
    assert!(LeaseState::ALL.into_iter().all(|state| lease::state(state).0 == state.name()));
    let held = [Enforcement::Hardware, Enforcement::MpsCeiling, Enforcement::Exclusive, Enforcement::None];
    assert!(held.into_iter().all(|one| lease::enforced_by(one).split_once(['.', ':', ',', ';']).is_some()));
}

/// Fault: `gpu show` did not show the leases of an exclusive or a time-sliced GPU.
#[test]
fn gpu_show_lists_the_leases_of_a_whole_gpu() {
    let look = fixtures::look(80, UTF8);
    let (all, gpus) = (fixtures::lease::all(), host());
    let leases = |gpu: &Gpu| {
        let text = fixtures::plain(&show::gpu(gpu, &[], &[], &all, &look));
        text.split_once("Leases\n").map(|(_, rest)| rest.split("\n\n").next().unwrap_or_default().to_owned())
    };
    let text: Vec<String> =
        gpus.iter().filter_map(|gpu| Some(format!("GPU {}\n{}\n", gpu.index, leases(gpu)?.trim_end()))).collect();
    assert_snapshot!("gpu-show-leases", text.join("\n"));
}

/// Leases of whole devices, more than fit below a GPU, and their use.
fn used() -> Vec<Lease> {
    let of = |state, lease: Lease| {
        let usage = LeaseUsageSummary { state: Some(state), ..fixtures::lease::usage() };
        Lease { usage: Some(usage), ..lease }
    };
    let device = |id, uuid: &str| {
        let share = MemberShare::Mig { profile: "x".to_owned() };
        let gpu = u32::from(uuid.starts_with("MIG-0001"));
        Lease {
            members: vec![fixtures::lease::member(gpu, Some(uuid), share, 9856)],
            ..fixtures::lease::lease(id, LeaseKind::Mig)
        }
    };
    let whole = Lease {
        members: vec![fixtures::lease::member(4, None, MemberShare::Whole, 24_576)],
        ..fixtures::lease::lease(40, LeaseKind::Whole)
    };
    let mut leases = vec![
        of(UseState::Busy, device(31, "MIG-00020000-aaaa-5bbb-8ccc-0123456789ab")),
        of(UseState::Idle, device(32, "MIG-00030000-aaaa-5bbb-8ccc-0123456789ab")),
        of(UseState::Unknown, device(33, "MIG-00010000-aaaa-5bbb-8ccc-0123456789ab")),
        of(UseState::Empty, fixtures::lease::mig()),
        of(UseState::Empty, whole),
    ];
    leases.extend((50..61).map(|id| of(UseState::Busy, Lease { id: LeaseId(id), ..fixtures::lease::mps() })));
    leases
}

fn with_leases(leases: Vec<Lease>) -> Status {
    let mut shown = fixtures::status(host(), false);
    shown.leases = leases;
    for gpu in &mut shown.gpus {
        gpu.leases = shown.leases.iter().flat_map(|lease| LeaseUse::of(lease, &gpu.uuid)).collect();
    }
    shown.devices = gpush_core::devices::list(&shown.gpus, &shown.mps, &shown.leases);
    shown
}

/// Fault: the row of a granted device was blank behind its memory, and the line with the leases was cut.
#[test]
fn row_of_a_device_shows_its_lease() {
    let shown = with_leases(used());
    for width in [60, 80, 120] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("status-rows-{width}"), drawn(&shown, false, &look));
    }
    let pipe = Appearance { wraps: false, ..fixtures::look(60, UTF8) };
    let text = fixtures::plain(&status::status(&shown, false, &pipe));
    assert!((50..61).all(|id| text.contains(&format!("L{id} alice"))), "a pipe gets all leases: {text}");
}

#[test]
fn status_shows_the_leases_of_each_gpu() {
    let shown = with_leases(fixtures::lease::all());
    for width in [72, 80, 120] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("status-leases-{width}"), drawn(&shown, false, &look));
    }
}
