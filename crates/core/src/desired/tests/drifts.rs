//! Drift from the config, as sentences.

use super::*;

#[test]
fn drift_is_described_in_sentences() {
    type Case =
        (&'static str, &'static str, &'static [(&'static str, u8, &'static [&'static str])], &'static [&'static str]);
    let cases: &[Case] = &[
        ("as wanted", "3g.40gb*2", &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])], &[]),
        ("none wanted, none there", "none", &[], &[]),
        ("lacks", "3g.40gb,1g.10gb*2", &[], &["missing 3g.40gb, 1g.10gb*2"]),
        ("lacks one of two", "3g.40gb*2", &[("3g.40gb", 4, &[])], &["missing 3g.40gb"]),
        ("has another", "3g.40gb", &[("2g.20gb", 2, &[])], &["missing 3g.40gb", "extra 2g.20gb@2"]),
        ("has too many", "1g.10gb", &[("1g.10gb", 0, &[]), ("1g.10gb", 3, &[])], &["extra 1g.10gb (1 of 2)"]),
        (
            "has too many of two kinds",
            "3g.40gb@0,1g.10gb",
            &[("3g.40gb", 0, &[]), ("1g.10gb", 4, &[]), ("1g.10gb", 5, &[]), ("1g.10gb", 6, &[])],
            &["extra 1g.10gb (2 of 3)"],
        ),
        ("a fixed place stays", "3g.40gb@0", &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])], &["extra 3g.40gb@4"]),
        ("has at the wrong place", "3g.40gb@0", &[("3g.40gb", 4, &[])], &["missing 3g.40gb@0", "extra 3g.40gb@4"]),
        ("a fixed place first", "1g.10gb,1g.10gb@4", &[("1g.10gb", 4, &[]), ("1g.10gb", 0, &[])], &[]),
        ("none wanted", "none", &[("7g.80gb", 0, &[])], &["extra 7g.80gb@0"]),
        (
            "compute instances differ",
            "1c.3g.40gb*3",
            &[("3g.40gb", 4, &["1c.3g.40gb", "2c.3g.40gb"])],
            &["3g.40gb@4: missing compute instances: 1c.3g.40gb*2", "3g.40gb@4: extra compute instances: 2c.3g.40gb"],
        ),
        (
            "the one whose compute instances agree is taken",
            "3g.40gb,1c.3g.40gb*3",
            &[("3g.40gb", 0, &["1c.3g.40gb", "1c.3g.40gb", "1c.3g.40gb"]), ("3g.40gb", 4, &[])],
            &[],
        ),
        ("profile of another model", "1g.5gb", &[], &["the layout 1g.5gb does not fit this GPU"]),
    ];
    for (what, layout, instances, expected) in cases {
        let layout = Layout::parse(layout).unwrap();
        let mut gpu = host().remove(0);
        set(&mut gpu, instances);
        let desired_state = DesiredState {
            mode: Mode::Mig,
            rule: None,
            layout: Some(layout),
            configured: None,
            dynamic_rule: false,
            dynamic: false,
            timeslice: None,
        };
        assert_eq!(drift(&desired_state, &gpu), *expected, "{what}");
    }
    println!("{} drifts", cases.len());
    let mut gpu = host().remove(0);
    set(&mut gpu, &[("3g.40gb", 4, &[])]);
    gpu.mig.as_mut().unwrap().instances[0].compute.clear();
    let desired_state = DesiredState {
        mode: Mode::Mig,
        rule: None,
        layout: Some(Layout::parse("3g.40gb").unwrap()),
        configured: None,
        dynamic_rule: false,
        dynamic: false,
        timeslice: None,
    };
    assert_eq!(drift(&desired_state, &gpu), ["3g.40gb@4: missing compute instances: 3g.40gb"]);
}

#[test]
fn reading_without_profiles_shows_no_drift() {
    let mut gpu = host().remove(0);
    gpu.mig.as_mut().unwrap().profiles = std::sync::Arc::default();
    let desired_state = DesiredState {
        mode: Mode::Mig,
        rule: None,
        layout: Some(Layout::parse("3g.40gb").unwrap()),
        configured: None,
        dynamic_rule: false,
        dynamic: false,
        timeslice: None,
    };
    assert_eq!(
        drift(&desired_state, &gpu),
        ["cannot compare the GPU with the layout 3g.40gb: the MIG profiles of the GPU are not known"]
    );
}

#[test]
fn drift_reports_mig_mode_that_differs_from_the_rule() {
    let layout = Layout::parse("3g.40gb").unwrap();
    let mut shown = String::new();
    for mode in [Mode::Mig, Mode::Exclusive, Mode::Unmanaged] {
        for (enabled, pending) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut gpu = host().remove(0);
            let mig = gpu.mig.as_mut().unwrap();
            mig.set_mode(enabled, pending);
            let desired_state = DesiredState {
                mode,
                rule: None,
                layout: (mode == Mode::Mig).then(|| layout.clone()),
                configured: None,
                dynamic_rule: false,
                dynamic: false,
                timeslice: None,
            };
            let _ = writeln!(shown, "{mode:?}, MIG {enabled}, pending {pending}: {:?}", drift(&desired_state, &gpu));
        }
        let mut gpu = preset::gpus("mixed").unwrap().remove(5);
        gpu.state = GpuState::Ready;
        let desired_state = DesiredState {
            mode,
            rule: None,
            layout: (mode == Mode::Mig).then(|| layout.clone()),
            configured: None,
            dynamic_rule: false,
            dynamic: false,
            timeslice: None,
        };
        let _ = writeln!(shown, "{mode:?}, no MIG: {:?}", drift(&desired_state, &gpu));
    }
    insta::assert_snapshot!(shown);
}

/// Fault: a compute mode that no program can use was invisible, and the GPU was leased.
#[test]
fn compute_mode_left_by_another_program_is_drift() {
    let config = |mode: &str| Config::parse(&format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"{mode}\"\n"), "test").unwrap();
    let drift_of = |mode: &str, compute: ComputeMode| {
        let mut gpus = preset::gpus("dgx-h100").unwrap();
        gpus[0].mig.as_mut().unwrap().set_mode(false, false);
        gpus[0].mig.as_mut().unwrap().instances.clear();
        gpus[0].compute_mode = Some(compute);
        let desired_state = describe(&config(mode), Some(0), &mut gpus[0]);
        gpus[0].drift.iter().cloned().chain(compute_mode_drift(&desired_state, &gpus[0])).collect::<Vec<_>>().join("; ")
    };
    // gpushd itself sets the compute mode of a time-sliced GPU.
    assert_eq!(
        drift_of("timeslice", ComputeMode::Prohibited),
        "the compute mode is `PROHIBITED`, but the config says `DEFAULT`"
    );
    let kept = "timeslice\"\ntimeslice = { compute_mode = \"keep\" }\n# \"";
    for (mode, allows_one) in [("exclusive", false), ("mps", true), (kept, true)] {
        let text = drift_of(mode, ComputeMode::Prohibited);
        assert!(text.contains("`PROHIBITED`, so no program can use the GPU") && text.contains("-c DEFAULT"), "{text}");
        let left = drift_of(mode, ComputeMode::ExclusiveProcess);
        assert_eq!(left.contains("only one process at a time"), !allows_one, "{mode}: {left}");
        assert_eq!(drift_of(mode, ComputeMode::Default), "", "{mode}");
    }
}

#[test]
fn describe_adds_the_desired_state() {
    let mut host = host();
    set(&mut host[0], &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])]);
    describe_all(&config(), &mut host);
    assert_eq!((host[0].mode, host[0].rule.as_deref()), (Mode::Mig, Some("training")));
    assert_eq!((host[0].layout.as_deref(), host[0].drift.len()), (Some(&["3g.40gb*2".to_owned()][..]), 0));
    assert_eq!(host[1].drift, ["missing 3g.40gb*2"]);
    assert_eq!(host[3].drift, ["MIG mode is on, but mode `exclusive` needs the whole GPU"]);
    assert_eq!((host[7].mode, &host[7].rule, &host[7].layout), (Mode::NoRule, &None, &None));
}
