use gpush_api::{Actor, GpuIndex, GpuLayout, GpuUuid, Override};

use super::*;

fn an_override(gpu: &Gpu, layout: &[String]) -> Override {
    Override {
        gpu_uuid: gpu.uuid.clone(),
        gpu: Some(gpu.index),
        rule: None,
        layout: layout.to_vec(),
        by: Actor { uid: 1000, user: None, pid: None },
        reason: String::new(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        expires_at: None,
        generation: 1,
    }
}

fn over(gpus: &mut [Gpu], at: usize, text: &str) {
    let layout = Layout::parse(text).unwrap().canonical();
    gpus[at].overridden = Some(an_override(&gpus[at], &layout));
}

/// Handles a request as gpushd does: plans the request, applies the plans, and updates the
/// overrides.
fn apply(gpus: &mut [Gpu], request: &PlanRequest) -> Option<Vec<OverrideEffect>> {
    let plans = plan_host(&config(), gpus, request).ok()?.plans;
    if plans.iter().any(|plan| plan.error.is_some()) {
        return None;
    }
    let standing = override_effects(&config(), gpus, request, &plans);
    for (plan, standing) in plans.iter().zip(&standing) {
        let gpu = gpus.iter_mut().find(|gpu| gpu.uuid == plan.gpu_uuid).unwrap();
        carry_out(gpu, plan);
        match standing {
            OverrideEffect::Stays => {}
            OverrideEffect::Made { layout, .. } => gpu.overridden = Some(an_override(gpu, layout)),
            OverrideEffect::Ended => gpu.overridden = None,
        }
    }
    Some(standing)
}

fn drifting(gpus: &[Gpu]) -> Vec<GpuIndex> {
    let mut gpus = gpus.to_vec();
    describe_all(&config(), &mut gpus);
    gpus.iter().filter(|gpu| !gpu.drift.is_empty() && gpu.mode == Mode::Mig).map(|gpu| gpu.index).collect()
}

#[test]
fn override_is_effective_only_under_a_mig_rule() {
    let mut gpus = host();
    for at in 0..8 {
        over(&mut gpus, at, "7g.80gb");
    }
    let desired_states = desired_states(&config(), &gpus);
    let plain = super::desired_states(&config(), &host());
    for at in 0..8 {
        assert_eq!((desired_states[at].mode, &desired_states[at].rule), (plain[at].mode, &plain[at].rule));
        assert_eq!(desired_states[at].configured, plain[at].layout, "GPU {at}");
        let wanted = desired_states[at].layout.as_ref().map(ToString::to_string);
        let expected = if [0, 1, 2, 5].contains(&at) { Some("7g.80gb".to_owned()) } else { None };
        assert_eq!(wanted, expected, "GPU {at}");
    }
    // This version cannot parse the override of a newer gpushd. The rule's layout must not replace
    // that override, so nothing changes.
    gpus[0].overridden.as_mut().unwrap().layout = vec!["9x.unheard-of".to_owned()];
    describe_all(&config(), &mut gpus);
    assert_eq!(gpus[0].drift, ["this version of gpushd does not know the layout of the override on this GPU"]);
    let error = plan_host(&config(), &gpus, &request(&["0"], LayoutSource::Wanted)).unwrap_err();
    assert!(error.hint.unwrap().contains("config overrides clear 0"));
    assert_eq!(one(&config(), &gpus, &request(&["0"], LayoutSource::Config)).layout, ["3g.40gb*2"]);
}

#[test]
fn only_named_gpu_returns_to_its_rules_layout() {
    let mut gpus = host();
    over(&mut gpus, 0, "7g.80gb");
    let layouts = |gpus: &[Gpu], selectors: &[&str], source| -> Vec<Vec<String>> {
        let plans = plan_host(&config(), gpus, &request(selectors, source)).unwrap().plans;
        plans.into_iter().map(|plan| plan.layout).collect()
    };
    let whole = vec!["7g.80gb".to_owned()];
    assert_eq!(layouts(&gpus, &[], LayoutSource::Config)[0], whole);
    assert_eq!(layouts(&gpus, &[], LayoutSource::Wanted)[0], whole);
    assert_eq!(layouts(&gpus, &["0"], LayoutSource::Wanted)[0], whole);
    assert_eq!(layouts(&gpus, &["0"], LayoutSource::Config)[0], ["3g.40gb*2"]);
    assert_eq!(apply(&mut gpus, &request(&[], LayoutSource::Config)).unwrap(), vec![OverrideEffect::Stays; 4]);
    assert_eq!(apply(&mut gpus, &request(&["0-1"], LayoutSource::Config)).unwrap(), vec![OverrideEffect::Ended; 2]);
    // The rule's layout in another notation is still the same layout.
    for same in ["3g.40gb*2", "3g.40gb,3g.40gb", "3G.40GB * 2"] {
        assert_eq!(apply(&mut gpus, &request(&["0"], entries(same))), Some(vec![OverrideEffect::Ended]), "{same}");
    }
    assert_eq!(apply(&mut gpus, &request(&["2"], entries("1c.3g.40gb*3,3g.40gb"))), Some(vec![OverrideEffect::Ended]));
    assert_eq!(
        apply(&mut gpus, &request(&["0"], LayoutSource::Named("halves".into()))),
        Some(vec![OverrideEffect::Ended])
    );
    let made = |rule: &str, layout: &str| OverrideEffect::Made { rule: Some(rule.into()), layout: vec![layout.into()] };
    assert_eq!(
        apply(&mut gpus, &request(&["0", "5", "7"], entries("none"))),
        Some(vec![made("training", "none"), OverrideEffect::Ended, OverrideEffect::Stays]),
        "no rule claims GPU 7"
    );
}

#[test]
fn request_without_mig_sets_no_override() {
    let mut gpus = host();
    gpus[0].mig.as_mut().unwrap().enabled = false;
    let each = |gpu: &str, mig, layout: &[&str]| GpuLayout {
        gpu: gpu.into(),
        mig,
        layout: layout.iter().map(|entry| (*entry).to_owned()).collect(),
    };
    let source = LayoutSource::PerGpu(vec![each("0", false, &[]), each("1", true, &["7g.80gb"])]);
    let standing = apply(&mut gpus, &request(&[], source)).unwrap();
    assert_eq!(standing[0], OverrideEffect::Stays);
    assert!(matches!(&standing[1], OverrideEffect::Made { layout, .. } if *layout == ["7g.80gb"]));
}

#[test]
fn config_changes_under_overrides_are_found() {
    let gpus = host();
    let uuids: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let changed = |text: &str, gpus: &[Gpu]| -> Vec<usize> {
        let new = Config::parse(text, "config.toml").unwrap_or_else(|e| panic!("{e}"));
        let changed = changed_under(&config(), &new, gpus, &uuids);
        changed.iter().map(|uuid| uuids.iter().position(|other| other == uuid.as_str()).unwrap()).collect()
    };
    assert_eq!(changed(CONFIG, &gpus), [0; 0]);
    assert_eq!(changed(&CONFIG.replace("training", "learning"), &gpus), [0; 0], "a name is no change");
    assert_eq!(changed(&CONFIG.replace("\"3g.40gb*2\"", "\"7g.80gb\""), &gpus), [0, 1]);
    assert_eq!(changed(&CONFIG.replace("exclusive", "unmanaged"), &gpus), [3]);
    assert_eq!(changed("", &gpus), [0, 1, 2, 3, 5]);
    // For a GPU that is not listed, the matching rule is unknown. Without a driver, no GPU is
    // listed.
    assert_eq!(changed(&CONFIG.replace("exclusive", "unmanaged"), &gpus[..7]), [3, 7]);
    assert_eq!(changed(&CONFIG.replace("\"3g.40gb*2\"", "\"7g.80gb\""), &[]), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(changed(&format!("auto_reconcile = true\n{CONFIG}"), &[]), [0; 0]);
}

fn any_request() -> impl Strategy<Value = PlanRequest> {
    let gpus = prop_oneof![
        Just(vec![]),
        Just(vec!["0".to_owned()]),
        Just(vec!["0-2".to_owned()]),
        Just(vec!["2".to_owned(), "5".to_owned()]),
    ];
    let explicit = || any_layout().prop_map(|text| LayoutSource::Entries(Layout::parse(&text).unwrap().canonical()));
    let source = prop_oneof![
        2 => Just(LayoutSource::Config),
        1 => Just(LayoutSource::Wanted),
        1 => Just(LayoutSource::Named("halves".to_owned())),
        4 => explicit(),
    ];
    (gpus, source).prop_map(|(gpus, layout)| PlanRequest { gpus, layout })
}

/// Fault: if the driver did not report the placements of compute instances, gpushd assumed that the first instance
/// occupied the first slices. But the second instance fits only there. So each apply destroyed an instance and created
/// it again.
#[test]
fn compute_instances_with_unknown_placements_are_kept() {
    let mut gpus = host();
    let entries = |all: &[&str]| LayoutSource::Entries(all.iter().map(|one| (*one).to_owned()).collect());
    let layouts = [LayoutSource::Config, entries(&["1c.3g.40gb*6"]), entries(&["2c.3g.40gb", "1c.3g.40gb*3"])];
    for layout in layouts {
        apply(&mut gpus, &PlanRequest { gpus: vec!["0".to_owned()], layout }).expect("the layout is possible");
    }
    let again = PlanRequest { gpus: vec!["0".to_owned()], layout: LayoutSource::Wanted };
    let plans = plan_host(&config(), &gpus, &again).unwrap().plans;
    assert!(plans[0].steps.is_empty(), "{:?}", plans[0].steps);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// After any requests, the GPUs that the requests named have no drift. Other GPUs and their
    /// overrides are unchanged.
    #[test]
    fn applied_requests_leave_no_drift(requests in prop::collection::vec(any_request(), 1..6)) {
        let mut gpus = host();
        for request in requests {
            let before = gpus.clone();
            let Some(standing) = apply(&mut gpus, &request) else {
                prop_assert_eq!(&before, &gpus);
                continue;
            };
            let meant: Vec<GpuUuid> =
                plan_host(&config(), &before, &request).unwrap().plans.into_iter().map(|plan| plan.gpu_uuid).collect();
            prop_assert_eq!(meant.len(), standing.len());
            let drifting = drifting(&gpus);
            for (gpu, was) in gpus.iter().zip(&before) {
                if meant.contains(&gpu.uuid) {
                    prop_assert!(!drifting.contains(&gpu.index), "{:?} on GPU {}", request, gpu.index);
                } else {
                    prop_assert_eq!(gpu, was);
                }
            }
            // After the requests, a repair of drift changes nothing on these GPUs, and keeps every
            // override.
            let wanted = PlanRequest { gpus: meant.iter().map(GpuUuid::to_string).collect(), layout: LayoutSource::Wanted };
            let plans = plan_host(&config(), &gpus, &wanted).unwrap().plans;
            prop_assert!(plans.iter().all(|plan| plan.steps.is_empty()), "{:?}", plans);
            let after = gpus.clone();
            prop_assert_eq!(apply(&mut gpus, &wanted), Some(vec![OverrideEffect::Stays; plans.len()]));
            prop_assert_eq!(after, gpus.clone());
        }
    }

    /// An override does not affect other GPUs, and does not change the rule of its GPU.
    #[test]
    fn override_affects_one_gpu(at in 0usize..8, text in any_layout()) {
        let mut gpus = host();
        over(&mut gpus, at, &text);
        let with = desired_states(&config(), &gpus);
        let without = desired_states(&config(), &host());
        for (other, (with, without)) in with.iter().zip(&without).enumerate() {
            prop_assert_eq!(&with.configured, &without.configured);
            if other != at {
                prop_assert_eq!(with, without);
            }
        }
    }
}
