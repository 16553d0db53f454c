//! Drawings of every list of gpushctl, at 60 and 120 columns.

use gpush_api::{Event, EventPayload, GpuIndex, Resync, ResyncReason};

use super::*;
use crate::render::{
    audit, bill, devices, events, holders, lease, listing::Listing, mps, processes, quota, usage_report,
};

/// Returns a sample of each list, with the command that prints it.
fn lists(look: &Appearance) -> Vec<(&'static str, Listing)> {
    let gpus = fixtures::mixed();
    let daemons = fixtures::mps::all();
    let operations =
        [OperationState::Done, OperationState::Running, OperationState::Failed, OperationState::RolledBack];
    let mut operations = operations.map(|state| OperationSummary::from(&fixtures::operation(state)));
    // In the sample, the last operation ended before it began.
    operations[3].begun = false;
    let actor = Actor { uid: 1000, user: Some("alice".to_owned()), pid: Some(4123) };
    let one = Override {
        gpu_uuid: gpus[0].uuid.clone(),
        gpu: Some(GpuIndex(0)),
        rule: Some("training".to_owned()),
        layout: vec!["7g.80gb".to_owned()],
        by: actor.clone(),
        reason: "big run".to_owned(),
        created_at: look.now - jiff::SignedDuration::from_hours(2),
        expires_at: Some(look.now + jiff::SignedDuration::from_hours(6)),
        generation: 4,
    };
    let record = gpush_api::AuditRecord {
        sequence: 1,
        at: look.now,
        by: Some(actor),
        account: None,
        action: "mig.apply".to_owned(),
        object: "op-3".to_owned(),
        result: "accepted".to_owned(),
        detail: serde_json::json!({"reason": "for the workshop"}),
    };
    let event = Event {
        id: "e-7".to_owned(),
        at: look.now,
        what: EventPayload::Resync(Resync { reason: ResyncReason::OtherRun }),
    };
    let leases = fixtures::lease::all();
    let granted = gpush_api::LeaseGrant {
        lease: fixtures::lease::mps(),
        environment: Default::default(),
        warnings: vec!["percentage and memory limit are ceilings of MPS clients".to_owned()],
        quota_notes: Vec::new(),
        binding_reason: None,
    };
    let overridden = Overrides { generation: 4, overrides: vec![one] };
    vec![
        ("gpu list", gpu_list::gpus(&gpus, look)),
        ("gpu holders", holders::list(&[fixtures::holders()], look)),
        ("mig list", devices::list(&gpush_core::devices::list(&gpus, &[], &[]), &gpus, look)),
        ("mig profiles", profiles::profiles(&gpush_core::preset::gpus("a30x4").unwrap(), look)),
        ("mps list", mps::list::list(&daemons, &[], look)),
        ("mps clients", mps::clients::all(&daemons, look)),
        ("ps", processes::list(&fixtures::mps::processes(), false, look)),
        ("lease list", lease::list(&leases, &gpus, look)),
        ("lease show", lease::show(&leases[..2], &gpus, &lease::Surroundings::default(), look)),
        ("lease request", lease::granted(&granted, &gpus, look)),
        ("lease idle", lease::idle_report(&fixtures::lease::idle_report(), look)),
        ("quota --all", quota::list(&quota::tests::samples(), look)),
        ("usage", usage_report::list(&usage_report::tests::report(), &gpus, look)),
        ("bill", bill::list(&bill::tests::bill(), &gpus, look)),
        ("slurm usage 812", lease::of_job(&leases[..2], look)),
        ("operation list", operation_list::operations(&operations, look)),
        ("config overrides", overrides::list(&overridden, look)),
        ("events", events::list(&[gpush_client::ReceivedEvent::Known(Box::new(event))], &gpus, look)),
        ("audit", audit::records(&[record], &gpus, look)),
    ]
}

/// Returns the time that the lists show; `None` if it has another width than in the snapshots, because the name of the
/// host's time zone does not have three letters.
fn clock_of_snapshots(look: &Appearance) -> Option<String> {
    let clock = look.clock(look.now);
    let fits = appearance::width(&clock) == "TTTT-TT-TT TT:TT:TT ZZZ".len();
    if !fits {
        println!("SKIPPED: the snapshots need a time zone with a name of three letters: set TZ=UTC");
    }
    fits.then_some(clock)
}

#[test]
fn every_list_is_drawn_at_60_and_120_columns() {
    for width in [60, 120] {
        let look = fixtures::look(width, UTF8);
        let Some(clock) = clock_of_snapshots(&look) else { return };
        let pages: Vec<String> = lists(&look)
            .iter()
            .map(|(command, list)| format!("$ gpushctl {command}\n{}", fixtures::plain(list.text())))
            .collect();
        assert_snapshot!(format!("lists-{width}"), pages.join("\n").replace(&clock, "TTTT-TT-TT TT:TT:TT ZZZ"));
    }
}

#[test]
fn every_list_shows_more_with_wide() {
    let look = Appearance { wraps: false, ..fixtures::look(120, UTF8) };
    let wide = Appearance { wide: true, ..look };
    let mut pages = Vec::new();
    for ((command, list), (_, wide)) in lists(&look).iter().zip(lists(&wide)) {
        let longest = |list: &Listing| fixtures::plain(list.text()).lines().map(appearance::width).max().unwrap();
        // A page about each lease already shows everything, and the sentences below a report fill the width.
        let is_page = ["lease show", "lease request", "usage", "bill", "slurm usage 812"].contains(command);
        assert!(is_page || longest(&wide) > longest(list), "{command}:\n{}", wide.text());
        pages.push(format!("$ gpushctl {command} -o wide\n{}", fixtures::plain(wide.text())));
    }
    let Some(clock) = clock_of_snapshots(&look) else { return };
    assert_snapshot!("lists-wide", pages.join("\n").replace(&clock, "TTTT-TT-TT TT:TT:TT ZZZ"));
}

/// Earlier fault: `-o csv` had cells such as `in 1h` and `0.6/80.0`, which a program must take apart.
#[test]
fn csv_has_points_in_time_and_one_number_in_a_cell() {
    let look = Appearance { wraps: false, exact: true, ..fixtures::look(120, UTF8) };
    for (command, list) in lists(&look) {
        let csv = list.csv(true);
        for line in csv.lines() {
            assert!(!line.contains(" ago") && !line.contains("in 1h") && !line.contains("GiB"), "{command}:\n{csv}");
            assert!(!line.contains(['━', '·']), "{command} has a drawing:\n{csv}");
        }
    }
    let csv = crate::render::mps::list::list(&fixtures::mps::all()[..1], &[], &look).csv(true);
    insta::assert_snapshot!(csv, @r"
    target,state,clients,max_clients,leased,max_leased,user,percent,memory,pid
    0,ready,3,48,38,100,alice,50,8G,4100
    ");
    let csv = gpu_list::gpus(&fixtures::mixed(), &look).csv(true);
    insta::assert_snapshot!(csv.lines().take(2).collect::<Vec<_>>().join("\n"), @r#"
    gpu,product,pci,used_gib,gib,mode,mig,state,uuid
    0,A100-SXM4-80GB,0000:07:00.0,12.9,80.0,mig,"on, 3",ready,GPU-00000000-1111-2222-3333-444444444444
    "#);
}

/// If this test fails, add the list of the new command to [`lists`].
#[test]
fn every_list_has_a_snapshot() {
    fn count(directory: &std::path::Path) -> usize {
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| {
                if path.is_dir() {
                    count(&path)
                } else {
                    std::fs::read_to_string(path).unwrap().matches("out.list(").count()
                }
            })
            .sum()
    }
    let commands = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/commands");
    assert_eq!(count(&commands), lists(&fixtures::look(80, UTF8)).len());
}
