//! The errors for requests that cannot be placed.

use gpush_api::{Code, GpuIndex};

use super::*;

#[test]
fn refusal_names_the_largest_free_size() {
    let refused = |host: Host, share: RequestedShare, count: usize| {
        let wanted = wanted(share, count);
        let error = refusal(&host, &wanted);
        (error.causes.join("; "), error.hint.unwrap_or_default())
    };
    let (why, hint) = refused(Host { gpus: vec![mps(0, 900, None), mps(1, 755, None)] }, some_mps("50"), 1);
    assert!(why.contains("GPU 1 has the most free capacity: 24.5 %"), "{why}");
    assert_eq!(hint, "request 24.5 % or less");
    let devices = || Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0 used, 2g.20gb@4, 1g.10gb@6")] };
    let (why, hint) = refused(devices(), profile("3g.40gb"), 1);
    assert!(why.contains("the largest free MIG device is 2g.20gb, on GPU 0"), "{why}");
    assert_eq!(hint, "request `--mig 2g.20gb`");
    let full = || Host { gpus: vec![mps(0, 1000, None)] };
    assert_eq!(refused(full(), some_mps("1"), 1).1, "");
}

/// Fault: while a lease delayed a change of MIG mode, a request for the new kind of share ended with `unsupported`.
#[test]
fn gpu_that_offers_leases_later_is_blocked_and_not_unsupported() {
    for (why, code) in [
        (Unoffered::Pending(Mode::Mig), Code::Blocked),
        (Unoffered::Reboot(Mode::Mig), Code::Blocked),
        (Unoffered::NotReady(Mode::Mig), Code::Blocked),
        (Unoffered::OtherMode(Mode::Mig), Code::Unsupported),
        (Unoffered::NoRule, Code::Unsupported),
    ] {
        let only = GpuOffer { index: GpuIndex(2), unoffered: Some(why), ..GpuOffer::default() };
        for gpus in [vec![only.clone()], vec![whole(0, true), only]] {
            let error = refusal(&Host { gpus }, &wanted(profile("3g.40gb"), 1));
            assert_eq!((error.code, error.retryable), (code, code == Code::Blocked), "{why:?}: {error:?}");
        }
    }
}

/// Fault: a target with as many leases as `max_clients` allows, but with 90 % free, had "no room".
#[test]
fn lease_limit_is_not_reported_as_missing_room() {
    let mut host = Host { gpus: vec![mps(5, 100, None)] };
    (host.gpus[0].mps[0].leases, host.gpus[0].mps[0].most_leases) = (2, 2);
    let error = refusal(&host, &wanted(some_mps("10"), 1));
    assert_eq!(error.message, "cannot grant an MPS share: the number of leases has reached its limit");
    assert_eq!(error.causes, ["GPU 5 has 2 leases: `max_clients` of its rule allows no more"]);
    // Without room for the share, the limit does not matter.
    host.gpus[0].mps[0].taken_tenths = 950;
    let error = refusal(&host, &wanted(some_mps("10"), 1));
    assert_eq!(error.causes[0], "GPU 5 has no room");
}

/// Fault: with an old driver, the refusal blamed a key that had the right value.
#[test]
fn daemon_for_one_user_against_its_rule_is_not_blamed_on_the_rule() {
    let mut host = Host { gpus: vec![mps(2, 0, Some(2000))] };
    host.gpus[0].mps[0].wants_many_users = true;
    let error = refusal(&host, &wanted(some_mps("10"), 1));
    let cause = "the MPS daemon of GPU 2 serves another user, and only one at a time although its rule has users = \
                 \"many\": `gpushctl mps show 2` says why";
    assert_eq!(error.causes[0], cause);
}

#[test]
fn error_names_each_gpu_and_why_it_does_not_fit() {
    let cordoned = GpuOffer { closed: Some(Closed::Cordoned), ..mps(4, 0, None) };
    let host = Host { gpus: vec![mps(2, 0, Some(2000)), mps(3, 950, None), cordoned] };
    let request = wanted(some_mps("10"), 1);
    let error = refusal(&host, &request);
    assert_eq!(error.message, "cannot grant an MPS share: the capacity is in use");
    let causes = [
        "the MPS daemon of GPU 2 serves another user, and only one at a time (`mps.users` of its rule)",
        "GPU 3 has no room",
        "GPU 4 is cordoned",
        "GPU 3 has the most free capacity: 5 %",
    ];
    assert_eq!((error.causes.as_slice(), error.retryable), (causes.map(str::to_owned).as_slice(), true));

    let host = Host { gpus: vec![mig(0, "a100-80", true, "4g.40gb@0 used")] };
    let message = |share, count| {
        let request = wanted(share, count);
        let error = refusal(&host, &request);
        format!("{} / {}", error.message, error.hint.unwrap())
    };
    let text = "cannot grant a MIG device: no GPU has the profile 1g.12gb / did you mean 1g.10gb or 1g.20gb or 2g.20gb? \
                List the profiles with `gpushctl mig profiles`";
    assert!(message(profile("1g.12gb"), 1).starts_with(&text[..90]), "{}", message(profile("1g.12gb"), 1));
    let text = "cannot grant 3 MIG devices: the GPUs have room for only 2, even when idle / request 2 or fewer";
    assert_eq!(message(profile("3g.40gb"), 3), text);
    let text = "cannot grant a whole GPU: the GPUs offer only leases of kind mig / request `--mig 1g.10gb`, as \
                with `gpushctl run --mig 1g.10gb -- COMMAND`";
    assert_eq!(message(RequestedShare::Whole, 1), text);
    let refused = place(&host, &wanted(RequestedShare::Whole, 1), PlacementPolicy::Pack).unwrap_err();
    assert_eq!(
        refused.hint_for_job(&request, context(&host)).as_deref(),
        Some("submit the job with `--comment=gpush:mig=1g.10gb`")
    );
    let unoffered = |index, why| GpuOffer { unoffered: Some(why), ..gpu(index) };
    let all = [unoffered(0, Unoffered::OtherMode(Mode::Mig)), unoffered(1, Unoffered::NoRule)];
    let request = wanted(RequestedShare::Whole, 1);
    let refused = |gpus: &[GpuOffer]| refusal(&Host { gpus: gpus.to_vec() }, &request);
    let error = refused(&all);
    assert_eq!(
        error.causes,
        ["GPU 0 is not in mode `mig`, which its rule requires", "no rule of the config claims GPU 1"]
    );
    assert_eq!(
        error.hint.as_deref(),
        Some("to bring the GPUs to the mode of their rules: `gpushctl apply 0` (administrator)")
    );
    assert_eq!(refused(&all[1..]).hint.as_deref(), Some("choose other GPUs: `gpushctl status` shows the modes"));
}

/// Fault: the GPUs were limited before the filter for pending changes. The change of a GPU after the first 16 GPUs was
/// not named.
#[test]
fn pending_change_of_the_last_gpu_is_named() {
    let device = |leases| gpush_api::PendingChange {
        aim: gpush_api::PendingAim::ShareDevice { uuid: "MIG-1".into(), device: "3g.40gb@4".to_owned() },
        leases,
    };
    let change = "17:3g.40gb@4 becomes shared through MPS when L3 ends";
    let mut host = Host { gpus: (0..18).map(|index| mig(index, "a100-80", false, "3g.40gb@4 used")).collect() };
    host.gpus[17].pending = vec![device(vec![gpush_api::LeaseId(3)])];
    let busy = refusal(&host, &wanted(profile("3g.40gb"), 1));
    assert!(busy.causes.iter().any(|cause| cause == change), "{busy:?}");
    let other_kind = refusal(&host, &wanted(RequestedShare::Whole, 1));
    assert_eq!(other_kind.causes, [change]);
    for gpu in &mut host.gpus {
        gpu.pending = vec![device(Vec::new())];
    }
    assert_eq!(refusal(&host, &wanted(RequestedShare::Whole, 1)).causes.len(), 16);
}

/// Fault: the error said neither why the GPU accepts no programs, nor what to do.
#[test]
fn prohibited_compute_mode_error_names_the_command() {
    let closed = |index| GpuOffer { closed: Some(Closed::Prohibited), ..whole(index, true) };
    let error = refusal(&Host { gpus: vec![closed(3)] }, &wanted(RequestedShare::Whole, 1));
    assert_eq!(error.message, "cannot grant a whole GPU: GPU 3 does not accept programs");
    assert_eq!(error.causes, ["no program can use GPU 3: its compute mode is PROHIBITED"]);
    let hint = "`nvidia-smi -i GPU-3 -c DEFAULT` lets programs use GPU 3 again (administrator)";
    assert_eq!(error.hint.as_deref(), Some(hint));
    let error = refusal(&Host { gpus: vec![closed(3), whole(4, false), closed(5)] }, &wanted(RequestedShare::Whole, 1));
    let hint = "`nvidia-smi -i GPU-3,GPU-5 -c DEFAULT` lets programs use GPUs 3, 5 again (administrator)";
    assert_eq!(error.hint.as_deref(), Some(hint));
}

fn on_gpus(indexes: &[u32], share: RequestedShare) -> PlacementRequest {
    PlacementRequest { gpus: Some(indexes.iter().copied().map(GpuIndex).collect()), ..wanted(share, 1) }
}

/// Fault: a refused 1g.10gb got the hint to request 3g.40gb, while a 2g.20gb was free.
#[test]
fn hint_names_the_smallest_free_device_that_is_large_enough() {
    let host = Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0, 2g.20gb@4, 1g.10gb@6 used")] };
    let error = refusal(&host, &wanted(profile("1g.10gb"), 1));
    assert_eq!(error.causes[1], "the smallest free MIG device that is large enough is 2g.20gb, on GPU 0");
    assert_eq!(error.hint.as_deref(), Some("request `--mig 2g.20gb`"));
}

/// Fault: only a cordon blocked the request, but the message said that the capacity is in use, and
/// the causes and the hint were about other GPUs.
#[test]
fn error_for_a_target_on_a_cordoned_gpu_is_about_this_gpu_only() {
    let cordoned = GpuOffer { closed: Some(Closed::Cordoned), ..mig(0, "a100-80", false, "3g.40gb@4, 2g.20gb@0") };
    let mut other = mig(1, "a100-80", false, "3g.40gb@0");
    other.mig.as_mut().unwrap().instances[0].devices[0].uuid = "other".into();
    let mut host = Host { gpus: vec![cordoned, other] };
    let targets = Some(["3g.40gb@4".into()].into());
    let request = PlacementRequest { targets, ..wanted(profile("3g.40gb"), 1) };
    let mut gpus = crate::preset::gpus("dgx-a100").unwrap();
    gpus[0].reasons = vec!["cordoned by root: fan".to_owned()];
    let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
    let error = why.error(&request, ErrorContext { gpus: &gpus, ..context(&host) });
    assert_eq!(error.message, "cannot grant a MIG device: GPU 0 is cordoned");
    assert_eq!((error.causes, error.hint), (vec!["cordoned by root: fan".to_owned()], None));
    assert!(error.retryable);
    let error = refusal(&host, &on_gpus(&[0], profile("3g.40gb")));
    assert_eq!((error.message.as_str(), error.causes.len()), ("cannot grant a MIG device: GPU 0 is cordoned", 0));
    // Fault: the error about a lost GPU was retryable, so its hint said to wait.
    host.gpus[0].closed = Some(Closed::NotReady);
    gpus[0].state = gpush_api::GpuState::Lost;
    let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
    let error = why.error(&request, ErrorContext { gpus: &gpus, ..context(&host) });
    assert_eq!(error.message, "cannot grant a MIG device: GPU 0 is lost");
    assert!(!error.retryable);
}

/// Fault: the refusal said that the capacity is in use.
#[test]
fn device_that_mps_shares_is_named_with_the_request_that_gets_it() {
    let mut host = Host { gpus: vec![mig(7, "a100-80", false, "3g.40gb@0 used, 2g.20gb@4")] };
    let device = &mut host.gpus[0].mig.as_mut().unwrap().instances[0].devices[0];
    (device.shared, device.leased) = (true, false);
    let request = on_gpus(&[7], profile("3g.40gb"));
    let error = refusal(&host, &request);
    assert_eq!(error.message, "cannot grant a MIG device: MIG device 7:3g.40gb@0 is shared through MPS");
    let hint = "request a share of the device: `gpushctl lease request --mps 25 --target 7:3g.40gb@0`";
    assert_eq!((error.hint.as_deref(), error.retryable), (Some(hint), false));
    let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
    let duration = Some(std::time::Duration::from_secs(3600));
    let error = why.error(&request, ErrorContext { duration, ..context(&host) });
    assert!(error.hint.unwrap().contains("--target 7:3g.40gb@0 --for 1h`"), "the hint keeps the end of the lease");
    assert_eq!(host.reservation(&request, PlacementPolicy::Pack), None, "a request does not wait for it");
    // Fault: if the device is shared only after the end of a lease, the error said that it is shared, and had no hint.
    let aim = gpush_api::PendingAim::ShareDevice { uuid: "MIG-1".into(), device: "3g.40gb@0".to_owned() };
    let mut pending = host.clone();
    pending.gpus[0].pending = vec![gpush_api::PendingChange { aim, leases: vec![gpush_api::LeaseId(6)] }];
    let error = refusal(&pending, &request);
    assert_eq!(error.message, "cannot grant a MIG device: MIG device 7:3g.40gb@0 will be shared through MPS");
    assert_eq!(error.hint, Some(hint.replace("3g.40gb@0`", "3g.40gb@0 --wait`")));
    assert_eq!(error.causes, ["7:3g.40gb@0 becomes shared through MPS when L6 ends"]);
    host.gpus.push(mig(8, "a100-80", false, "3g.40gb@0 used"));
    let error = refusal(&host, &wanted(profile("3g.40gb"), 1));
    let causes = ["GPU 7 shares such a device through MPS: request it with --mps", "GPU 8 has no room"];
    assert_eq!(error.causes[..2], causes.map(str::to_owned));
}

/// Fault: without `-g`, the refusal named only the kinds that other GPUs offer.
#[test]
fn gpu_that_is_not_in_the_mode_for_the_request_is_named() {
    let drifted = GpuOffer { unoffered: Some(Unoffered::OtherMode(Mode::Exclusive)), ..gpu(5) };
    let other = GpuOffer { unoffered: Some(Unoffered::OtherMode(Mode::Timeslice)), ..gpu(4) };
    let host = Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0"), other, drifted] };
    let error = refusal(&host, &wanted(RequestedShare::Whole, 1));
    assert_eq!(error.message, "cannot grant a whole GPU: no GPU offers leases of kind whole now");
    let causes =
        ["GPU 5 is not in mode `exclusive`, which its rule requires", "the other GPUs offer only leases of kind mig"];
    assert_eq!(error.causes, causes);
    let hint = "to bring the GPUs to the mode of their rules: `gpushctl apply 5` (administrator)";
    assert_eq!(error.hint.as_deref(), Some(hint));
}

/// Fault: the refusal said only that the GPU does not meet the request, and advised the user to request less.
#[test]
fn request_that_a_layout_cannot_meet_gets_the_layout_and_other_gpus() {
    let standing = mig(0, "a100-80", false, "3g.40gb@0, 2g.20gb@4, 1g.10gb@6 used");
    let dynamic = mig(2, "a100-80", true, "7g.80gb@0 used");
    let host = Host { gpus: vec![standing, dynamic] };
    let mut gpus = crate::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(3);
    gpus[0].mode = Mode::Mig;
    gpus[0].layout = Some(vec!["3g.40gb".to_owned(), "2g.20gb".to_owned(), "1g.10gb*2".to_owned()]);
    gpus[2].mode = Mode::Mig;
    gpus[2].layout = Some(vec!["dynamic".to_owned()]);
    let request = on_gpus(&[0], profile("4g.40gb"));
    let refused = |gpus: &[gpush_api::Gpu], allowed: Option<&BTreeSet<GpuIndex>>| {
        let why = place(&host, &request, PlacementPolicy::Pack).unwrap_err();
        let error = why.error(&request, ErrorContext { gpus, allowed, ..context(&host) });
        assert_eq!(error.message, "cannot grant a MIG device: GPU 0 does not meet the request, even when idle");
        (error.causes.join("; "), error.hint.unwrap())
    };
    let (why, hint) = refused(&gpus, None);
    assert_eq!(why, "the layout of GPU 0 is 3g.40gb, 2g.20gb, 1g.10gb*2");
    assert_eq!(hint, "choose a GPU that can meet the request: `-g 2`");
    assert_eq!(
        refused(&gpus, Some(&BTreeSet::from([GpuIndex(0)]))).1,
        "request `--mig 3g.40gb` or `--mig 2g.20gb` or `--mig 1g.10gb`"
    );
    gpus[0].overridden = Some(gpush_api::Override {
        gpu_uuid: gpus[0].uuid.clone(),
        gpu: Some(GpuIndex(0)),
        rule: None,
        layout: vec!["7g.80gb".to_owned()],
        by: gpush_api::Actor { uid: 0, user: Some("root".to_owned()), pid: None },
        reason: String::new(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        expires_at: None,
        generation: 1,
    });
    gpus[0].layout = Some(vec!["7g.80gb".to_owned()]);
    let (why, _) = refused(&gpus, None);
    let text = "an override of root sets the layout 7g.80gb on GPU 0; `gpushctl config overrides` shows it";
    assert_eq!(why, text);
}

/// Fault: a request for 7g.80gb waited because "GPU 0 has no room", although the layout of GPU 0 has no such device.
#[test]
fn gpu_that_cannot_meet_the_request_is_not_named_as_full() {
    let host =
        Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0 used"), mig(1, "a100-80", true, "7g.80gb@0 used")] };
    let error = refusal(&host, &wanted(profile("7g.80gb"), 1));
    assert_eq!(error.causes, ["GPU 1 has no room"]);
}

/// Fault: with GPU 0 cordoned and GPU 1 free, the refusal of `-g 0` did not name GPU 1.
#[test]
fn refusal_on_a_cordoned_gpu_names_a_free_one() {
    let used = "1g.10gb@0 used";
    let cordoned = |devices| GpuOffer { closed: Some(Closed::Cordoned), ..mig(0, "a100-80", false, devices) };
    let not_ready = GpuOffer { unoffered: Some(Unoffered::NotReady(Mode::Mig)), ..gpu(0) };
    let request = PlacementRequest { gpus: Some([GpuIndex(0)].into()), ..wanted(profile("1g.10gb"), 1) };
    for closed in [cordoned("1g.10gb@0"), not_ready] {
        let hint = |other| refusal(&Host { gpus: vec![closed.clone(), other] }, &request).hint.unwrap_or_default();
        assert_eq!(hint(mig(1, "a100-80", false, "1g.10gb@0")), "choose a GPU that is free: `-g 1`");
        assert!(!hint(mig(1, "a100-80", false, used)).contains("-g 1"));
        let also_closed = GpuOffer { closed: Some(Closed::Cordoned), ..mig(1, "a100-80", false, "1g.10gb@0") };
        assert!(!hint(also_closed).contains("-g 1"));
    }
}

/// Fault: a cordon counted as missing capacity.
#[test]
fn refusal_because_of_cordons_alone_is_not_about_capacity() {
    let cordoned = GpuOffer { closed: Some(Closed::Cordoned), ..mps(0, 0, None) };
    let why = |gpus: Vec<GpuOffer>| {
        place(&Host { gpus }, &wanted(some_mps("10"), 1), PlacementPolicy::Pack).unwrap_err().is_not_ready()
    };
    assert!(why(vec![cordoned.clone()]));
    assert!(!why(vec![cordoned, mps(1, 950, None)]), "GPU 1 is full");
    assert!(!why(vec![mps(1, 950, None)]) && !why(vec![whole(0, true)]));
    let not_ready = GpuOffer { unoffered: Some(Unoffered::NotReady(Mode::Mps)), ..gpu(0) };
    assert!(why(vec![not_ready]));
}

/// Fault: the hint named profiles that the static layout does not have.
#[test]
fn profile_that_no_layout_has_is_not_proposed() {
    let hint = |dynamic| {
        let host = Host { gpus: vec![mig(0, "a100-80", dynamic, "1g.10gb@0")] };
        refusal(&host, &wanted(profile("1g.10g"), 1)).hint.unwrap()
    };
    assert!(hint(false).starts_with("did you mean 1g.10gb? List"), "{}", hint(false));
    assert!(hint(true).contains("1g.20gb"), "{}", hint(true));
}
