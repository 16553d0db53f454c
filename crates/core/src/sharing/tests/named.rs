//! Names of targets, and how texts of users are resolved to targets.

use gpush_api::{GpuIndex, MpsDaemon, MpsState};

use super::*;

fn daemon(uuid: &str, gpu: Option<u32>, device: Option<&str>) -> MpsDaemon {
    MpsDaemon {
        target: short_name(&uuid.into(), &BTreeSet::new()),
        uuid: uuid.into(),
        gpu: gpu.map(GpuIndex),
        device: device.map(str::to_owned),
        state: MpsState::Ready,
        reasons: Vec::new(),
        findings: Vec::new(),
        wanted: MpsPolicy::default(),
        in_force: None,
        pid: None,
        since: jiff::Timestamp::UNIX_EPOCH,
        next_start_at: None,
        clients_end_at: None,
        failures: 0,
        ends: None,
        protocol: None,
        pipe_directory: None,
        log_directory: None,
        uid: None,
        servers: Vec::new(),
        clients_known: true,
        rule: None,
        user: None,
        clients: Vec::new(),
        leases: Vec::new(),
        granted_percent: 0,
        stays_stopped: false,
    }
}

fn daemons() -> Vec<MpsDaemon> {
    vec![
        daemon("GPU-5d1b03a2-1111-2222-3333-444444444444", Some(0), None),
        daemon("MIG-c0ffee00-1111-2222-3333-444444444444", Some(1), Some("2g.20gb@2")),
        daemon("MIG-c0ffee11-1111-2222-3333-444444444444", Some(1), Some("1c.3g.40gb@4/2")),
        daemon("GPU-77777777-1111-2222-3333-444444444444", None, None),
    ]
}

/// Fault: a request that named such a target was refused, because no daemon had the name.
#[test]
fn target_of_a_pending_change_resolves() {
    let mut gpus = whole_host("dgx-a100");
    let aims = [
        PendingAim::Mode { from: Mode::Exclusive, mode: Mode::Mps },
        PendingAim::Mode { from: Mode::Mps, mode: Mode::Exclusive },
        PendingAim::ShareDevice { uuid: "MIG-2".into(), device: "3g.40gb@4".to_owned() },
    ];
    for (gpu, aim) in gpus.iter_mut().zip(aims) {
        gpu.pending = vec![gpush_api::PendingChange { aim, leases: Vec::new() }];
    }
    let found = |text: &str| pending_target(text, &gpus);
    assert_eq!(found(" 0 "), Some(gpus[0].uuid.clone().into()));
    assert_eq!(found(&gpus[0].uuid.as_str().to_lowercase()), Some(gpus[0].uuid.clone().into()));
    assert_eq!(found("2:3G.40GB@4"), Some("MIG-2".into()));
    assert_eq!([found("1"), found("2"), found("2:3g.40gb@0"), found("")], [None, None, None, None]);
}

#[test]
fn target_names_resolve() {
    let daemons = daemons();
    for (typed, meant) in [
        ("g5d1b03a2", 0),
        ("G5D1B03A2", 0),
        ("0", 0),
        (" 0 ", 0),
        ("GPU-5d1b03a2-1111-2222-3333-444444444444", 0),
        ("gpu-5", 0),
        ("1:2g.20gb@2", 1),
        ("1:2G.20GB@2", 1),
        ("MIG-c0ffee00", 1),
        ("1:1c.3g.40gb@4/2", 2),
        ("mc0ffee11", 2),
        ("g77777777", 3),
    ] {
        assert_eq!(resolve(typed, &daemons), Ok(meant), "{typed}");
    }
    for (at, daemon) in daemons.iter().enumerate() {
        assert_eq!(resolve(&name_of(daemon), &daemons), Ok(at));
    }
}

#[test]
fn unknown_target_names_are_refused() {
    let all = daemons();
    let mut shown = String::new();
    for (typed, daemons) in [
        ("0", &[][..]),
        ("1", &all),
        ("7", &all),
        ("1:2g.20gb@4", &all),
        ("g5d1b03a", &all),
        ("MIG-c0ffee", &all),
        ("MIG-", &all),
        ("GPU-\u{1b}[31m", &all),
        ("", &all),
        ("ü", &all),
    ] {
        let ApiError { code, message, causes, hint, .. } = resolve(typed, daemons).unwrap_err();
        let _ = writeln!(shown, "{code:?}: {message}\n  {}\n  {}\n", causes.join("\n  "), hint.unwrap());
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn short_names_are_distinct() {
    let none = BTreeSet::new();
    let uuid = "GPU-5D1B03A2-1111-2222-3333-444444444444";
    assert_eq!(short_name(&uuid.into(), &none), "g5d1b03a2");
    assert_eq!(short_name(&"MIG-c0ffee00-1111-2222-3333-444444444444".into(), &none), "mc0ffee00");
    assert_eq!(short_name(&"MIG-GPU-c0ffee00-1111-2222-3333-444444444444/1/0".into(), &none), "mc0ffee00");
    assert_eq!(short_name(&uuid.into(), &BTreeSet::from(["g5d1b03a2".to_owned()])), "g5d1b03a21");
    assert_eq!(short_name(&"".into(), &none), "gx2");
    let mut taken = BTreeSet::new();
    for n in 0..40 {
        // The UUIDs of preset GPUs differ only in their last digits, so all digits that a short
        // name can contain are equal.
        let name = short_name(&format!("GPU-00000000-0000-0000-0000-{n:012x}").into(), &taken);
        assert!(taken.insert(name));
    }
    assert!(taken.contains("g0000000000000000000") && taken.contains("g00000000x2"));
}

proptest! {
    #[test]
    fn any_uuid_gets_a_unique_name(uuids in prop::collection::vec("(GPU|MIG)-[0-2]{8}-[0-1]{4}-.{0,4}", 1..30)) {
        let mut taken = BTreeSet::new();
        for uuid in &uuids {
            let name = short_name(&uuid.as_str().into(), &taken);
            prop_assert!(name.len() <= 20 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()), "{}", name);
            prop_assert!(taken.insert(name));
        }
    }

    #[test]
    fn target_resolution_never_panics(text in ".{0,60}") {
        let _ = (resolve(&text, &daemons()), short_name(&text.into(), &BTreeSet::new()));
    }
}
