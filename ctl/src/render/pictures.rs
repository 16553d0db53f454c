//! Snapshots of every drawing: as people see them, at 80 and 120 columns, in UTF-8 and ASCII.

use std::sync::Arc;

use gpush_api::{
    Actor, ApiError, Code, ConfigDiff, ConfigView, Gpu, GpuDiff, GpuState, Mode, NamedLayout, OperationState,
    OperationSummary, Override, OverrideEnded, Overrides, PendingRestart, Placement, Plans, Refusal, Reloaded,
    RuleView, SettingDiff, Step, WantedView,
};
use insta::assert_snapshot;

use super::{
    Charset, Look, config, fixtures, gpu, look, operation, overrides, plan, profiles, show, status, table, trouble,
};

const UTF8: Charset = Charset::Utf8;

/// What is drawn fits its terminal: checked on every picture but those that hold text to copy whole.
fn fits(text: &str, look: &Look) -> String {
    let plain = fixtures::plain(text);
    for line in plain.lines() {
        assert!(look::width(line) <= look.width, "{} columns of {}: {line}", look::width(line), look.width);
    }
    assert!(!plain.lines().any(|l| l.ends_with(' ')), "blanks at the end of a line:\n{plain}");
    plain
}

fn drawn(status: &status::Status, brief: bool, look: &Look) -> String {
    fits(&status::status(status, brief, look), look)
}

#[test]
fn status_of_a_mixed_host() {
    let shown = fixtures::status(fixtures::mixed(), false);
    assert_snapshot!("status-80", drawn(&shown, false, &fixtures::look(80, UTF8)));
    assert_snapshot!("status-120", drawn(&shown, false, &fixtures::look(120, UTF8)));
    assert_snapshot!("status-ascii", drawn(&shown, false, &fixtures::look(80, Charset::Ascii)));
    assert_snapshot!("status-brief", drawn(&shown, true, &fixtures::look(80, UTF8)));
    // However wide the terminal: figures stand over the drawing that they belong to.
    let wide = drawn(&shown, true, &fixtures::look(200, UTF8));
    let edge = |part: &str| wide.lines().filter(|line| line.contains(part)).map(look::width).max().unwrap();
    assert_eq!((edge("/80.0 GiB"), edge("in use"), edge("╮")), (99, 99, 99));
}

#[test]
fn status_in_ascii_is_ascii() {
    let mut gpus = fixtures::mixed();
    gpus[5].processes[0].user = Some("Jürgen".into());
    let text = drawn(&fixtures::status(gpus, true), false, &fixtures::look(80, Charset::Ascii));
    assert!(text.is_ascii(), "{text}");
    assert!(text.contains("J?rgen"), "{text}");
}

#[test]
fn status_in_colour() {
    let look = fixtures::look(80, UTF8);
    let text = status::status(&fixtures::status(fixtures::mixed(), true), false, &look);
    // Escapes made visible: a diff of control characters tells nobody anything.
    assert_snapshot!("status-colour", text.replace('\x1b', "^["));
}

#[test]
fn status_of_eight_gpus_cut_into_seven() {
    let shown = fixtures::status(fixtures::full(), true);
    assert_snapshot!("status-full-80", drawn(&shown, false, &fixtures::look(80, UTF8)));
    assert_snapshot!("status-full-brief-120", drawn(&shown, true, &fixtures::look(120, UTF8)));
}

#[test]
fn status_fits_any_width() {
    let shown = fixtures::status(fixtures::mixed(), true);
    let mut tried = 0;
    for charset in [Charset::Utf8, Charset::Ascii] {
        for width in 72..=240 {
            drawn(&shown, false, &fixtures::look(width, charset));
            tried += 1;
        }
        // Below that lines may stand out, yet nothing breaks.
        for width in 1..72 {
            status::status(&shown, false, &fixtures::look(width, charset));
            tried += 1;
        }
    }
    println!("{tried} widths drawn");
    assert_eq!(tried, 480);
}

/// Every process that the asker may know, in whatever it is.
fn pids(gpus: &[gpush_api::Gpu]) -> Vec<String> {
    let compute = |i: &gpush_api::GpuInstance| i.compute.iter().flat_map(|c| c.processes.clone()).collect::<Vec<_>>();
    let instances = gpus.iter().flat_map(|g| &g.mig).flat_map(|mig| &mig.instances);
    let inside = instances.flat_map(|i| i.processes.iter().cloned().chain(compute(i)));
    let all = gpus.iter().flat_map(|g| g.processes.clone()).chain(inside);
    all.filter_map(|process| process.pid).map(|pid| pid.to_string()).collect()
}

#[test]
fn no_pid_is_cut_at_sixty_columns() {
    let gpus = fixtures::mixed();
    let text = fits(
        &status::status(&fixtures::status(gpus.clone(), false), false, &fixtures::look(60, UTF8)),
        &fixtures::look(72, UTF8),
    );
    assert_snapshot!("status-60", text);
    for gpu in &gpus {
        // Of several processes the first is named, the others are counted.
        let Some(pid) = pids(std::slice::from_ref(gpu)).first().cloned() else { continue };
        assert!(text.split([' ', ',', '\n']).any(|word| word == pid), "{pid} is not whole:\n{text}");
    }
}

#[test]
fn into_a_pipe_nothing_is_cut() {
    let mut gpus = fixtures::mixed();
    let command = format!("python train.py --data {}", "/srv/data/".repeat(20));
    gpus[5].processes = vec![fixtures::process(4711, "ada", &command, 100)];
    gpus[5].name = "NVIDIA of a name that is a good deal longer than any that there is".into();
    let pipe = Look { wraps: false, ..fixtures::look(60, UTF8) };
    let shown = [
        status::status(&fixtures::status(gpus.clone(), false), false, &pipe),
        gpus.iter().map(|gpu| show::gpu(gpu, &pipe)).collect(),
        table::gpus(&gpus, &pipe),
    ];
    for (at, text) in shown.iter().enumerate() {
        assert!(!text.contains('…'), "{text}");
        assert!(at == 2 || text.contains(&command), "{text}");
        assert!(at == 0 || gpus.iter().all(|gpu| text.contains(&gpu.uuid)), "{text}");
    }
}

#[test]
fn an_old_reading_is_called_so_when_it_is_old() {
    let look = fixtures::look(80, UTF8);
    let mut one = fixtures::mixed().remove(0);
    one.stale = true;
    let said = |age: i64, one: &mut gpush_api::Gpu| {
        one.observed_at = jiff::Timestamp::from_second(look.now.as_second() - age).unwrap();
        gpu::notes(one, &look).join("\n").contains("old reading")
    };
    assert_eq!([0, 1, 2, 3, 60].map(|age| said(age, &mut one)), [false, false, false, true, true]);
    one.stale = false;
    assert!(!said(60, &mut one), "nobody wanted a newer one");
}

#[test]
fn status_of_an_agent_without_a_driver() {
    let mut shown = fixtures::status(Vec::new(), false);
    shown.version.driver = None;
    shown.health.status = gpush_api::HealthStatus::Degraded;
    shown.health.causes = vec![
        ApiError::new(Code::DriverUnavailable, "the NVIDIA driver is not loaded")
            .cause("NVML: driver not loaded")
            .hint("modprobe nvidia, or reboot after an update of the driver; gpushd tries again by itself"),
    ];
    assert_snapshot!("status-no-driver", drawn(&shown, false, &fixtures::look(80, UTF8)));
}

#[test]
fn odd_readings_do_not_break_the_drawing() {
    let mut gpus = fixtures::mixed();
    let mig = gpus[0].mig.as_mut().unwrap();
    // Overlapping, standing out, empty, and named by a profile that nobody knows.
    mig.instances.push(fixtures::instance(20, "profile 99", 5, 4, (0, 0), &[]));
    mig.instances.push(fixtures::instance(21, "2g.20gb", 7, 2, (0, 0), &[]));
    mig.instances.push(fixtures::instance(22, "\u{1b}[31m", 7, 1, (9, 1), &[]));
    mig.instances.push(fixtures::instance(23, "x", 255, 255, (0, 0), &[]));
    gpus.truncate(1);
    assert_snapshot!("status-odd", drawn(&fixtures::status(gpus, false), false, &fixtures::look(80, UTF8)));
}

#[test]
fn gpus_as_a_table() {
    let gpus = fixtures::mixed();
    for width in [60, 80, 120, 140] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("gpu-list-{width}"), fits(&table::gpus(&gpus, &look), &look));
    }
}

#[test]
fn a_gpu_in_full() {
    let look = fixtures::look(80, UTF8);
    let mut gpus = fixtures::mixed();
    gpus[0].layout = Some(vec!["3g.40gb".into(), "2g.20gb".into(), "1g.10gb".into()]);
    gpus[0].mig.as_mut().unwrap().profiles = profiles_of("dgx-a100");
    // A MIG UUID stays whole, so this one may be wider than the terminal.
    assert_snapshot!("gpu-show-busy", fixtures::plain(&show::gpu(&gpus[0], &look)));
    assert_snapshot!("gpu-show-split", fixtures::plain(&show::gpu(&gpus[1], &look)));
    let named = |rule: &str| {
        let one = gpush_api::Gpu { rule: Some(rule.into()), ..gpus[1].clone() };
        fixtures::plain(&show::gpu(&one, &look))
    };
    assert!(named("rule 1").contains(", by rule 1\n") && named("a").contains(", by rule a\n"));
    assert_snapshot!("gpu-show-l4", fits(&show::gpu(&gpus[5], &look), &look));
}

fn profiles_of(preset: &str) -> Arc<Vec<gpush_api::GpuProfile>> {
    gpush_core::preset::gpus(preset).unwrap()[0].mig.clone().unwrap().profiles
}

#[test]
fn profiles_as_tables() {
    let look = fixtures::look(80, UTF8);
    let mut gpus = gpush_core::preset::gpus("mixed").unwrap();
    let mut twin = gpus[0].clone();
    twin.index = 6;
    for (gpu, left) in [(&mut gpus[0], 3), (&mut twin, 7)] {
        Arc::make_mut(&mut gpu.mig.as_mut().unwrap().profiles)[0].remaining = Some(left);
    }
    gpus.push(twin);
    let off = gpus[2].mig.as_mut().unwrap();
    (off.enabled, off.pending) = (false, false);
    assert_snapshot!("mig-profiles", fits(&profiles::profiles(&gpus, &look), &look));
    let narrow = fixtures::look(60, UTF8);
    assert_snapshot!("mig-profiles-60", fits(&profiles::profiles(&gpus, &narrow), &narrow));
}

#[test]
fn names_of_profiles_never_wrap_and_pipes_get_a_line_a_row() {
    let gpus = gpush_core::preset::gpus("rtx-pro-6000x2").unwrap();
    let names: Vec<_> = gpus[0].mig.iter().flat_map(|mig| mig.profiles.iter()).map(|p| p.name.clone()).collect();
    let mut tried = 0;
    for (width, wraps) in [(60, true), (72, true), (80, true), (60, false), (80, false)] {
        let look = Look { wraps, ..fixtures::look(width, UTF8) };
        let text = fixtures::plain(&profiles::profiles(&gpus, &look));
        for name in &names {
            let whole = |line: &str| line.split_whitespace().next() == Some(name);
            assert!(text.lines().any(whole), "{name} at {width}:\n{text}");
            tried += 1;
        }
        if !wraps {
            assert_eq!(text.lines().count(), names.len() + 2, "a heading each, then a line a profile:\n{text}");
        }
    }
    println!("{tried} names looked for");
}

#[test]
fn mig_devices_by_their_names() {
    let look = fixtures::look(80, UTF8);
    assert_snapshot!("mig-show", fixtures::plain(&show::mig_devices(&fixtures::mixed(), &look)));
    let empty = fixtures::mixed().split_off(3);
    assert_eq!(show::mig_devices(&empty[..1], &look), "GPU 3 has no MIG instance.\n");
    assert_eq!(show::mig_devices(&empty[2..3], &look), "GPU 5 has no MIG.\n");
}

#[test]
fn plans_before_and_after() {
    let look = fixtures::look(80, UTF8);
    let gpus = fixtures::mixed();
    let span = |start, size| Placement { start, size };

    let split = gpush_api::GpuPlan {
        gpu: 1,
        uuid: gpus[1].uuid.clone(),
        layout: vec!["1c.4g.40gb*2".into(), "2g.20gb".into(), "1g.10gb".into()],
        steps: vec![
            Step::DestroyCompute { gi: 1, ci: 2, profile: "2c.4g.40gb".into() },
            Step::CreateCompute {
                gi_placement: span(0, 4),
                profile: "1c.4g.40gb".into(),
                profile_id: 0,
                placement: Some(span(2, 1)),
            },
            Step::CreateCompute { gi_placement: span(4, 2), profile: "2g.20gb".into(), profile_id: 1, placement: None },
            Step::CreateGpuInstance { profile: "1g.10gb".into(), profile_id: 19, placement: span(6, 1) },
            Step::CreateCompute { gi_placement: span(6, 1), profile: "1g.10gb".into(), profile_id: 0, placement: None },
        ],
        keeps: vec![1, 5],
        ..fixtures::plan()
    };
    let enables = gpush_api::GpuPlan {
        gpu: 4,
        uuid: gpus[4].uuid.clone(),
        name: gpus[4].name.clone(),
        layout: vec!["4g.24gb".into()],
        steps: vec![
            Step::CreateGpuInstance { profile: "4g.24gb".into(), profile_id: 0, placement: span(0, 4) },
            Step::CreateCompute { gi_placement: span(0, 4), profile: "4g.24gb".into(), profile_id: 3, placement: None },
        ],
        keeps: Vec::new(),
        enables_mig: true,
        disables_mig: false,
        reset: None,
        refusal: None,
        error: None,
    };
    let blocked = gpush_api::GpuPlan {
        gpu: 6,
        uuid: gpus[6].uuid.clone(),
        name: gpus[6].name.clone(),
        layout: vec!["4g.96gb".into()],
        steps: Vec::new(),
        keeps: Vec::new(),
        enables_mig: false,
        disables_mig: false,
        reset: None,
        refusal: Some(Refusal::Blocked { blockers: Vec::new() }),
        error: Some(
            ApiError::new(Code::Blocked, "GPU 6 (GPU-00000006): 1g.24gb@0 is in use and in the way of 4g.96gb")
                .cause("held by another user")
                .hint("wait for it to end, or leave this GPU out with --gpu"),
        ),
    };
    let two_alike = Plans { plans: vec![fixtures::as_wanted(2), fixtures::as_wanted(3)] };
    let plans = Plans { plans: [vec![fixtures::plan(), split], two_alike.plans, vec![enables, blocked]].concat() };
    assert_snapshot!("plan-80", fits(&plan::plans(&plans, &gpus, &look), &look));
    let ascii = fixtures::look(80, Charset::Ascii);
    let text = fits(&plan::plans(&plans, &gpus, &ascii), &ascii);
    assert!(text.is_ascii());
    assert_snapshot!("plan-ascii", text);
    assert_snapshot!(
        "plan-without-readings",
        fits(&plan::plans(&Plans { plans: vec![fixtures::plan()] }, &[], &look), &look)
    );
    assert_snapshot!("plan-none", fits(&plan::plans(&Plans { plans: Vec::new() }, &gpus, &look), &look));
}

/// However young the reading is: what was read before a loss, or in the course of a change, is not
/// told as what stands now.
#[test]
fn a_drawing_from_before_says_so() {
    let look = fixtures::look(100, UTF8);
    let mut one = fixtures::mixed().remove(0);
    one.observed_at = look.now;
    let devices =
        |gpu: &Gpu| fixtures::plain(&status::status(&fixtures::status(vec![gpu.clone()], false), false, &look));
    assert!(devices(&one).contains("MIG devices"));
    for (state, says) in [
        (GpuState::Lost, "drawn as it was last read, 0 s ago; what is left of it is not known"),
        (GpuState::Changing, "drawn as it was last read, 0 s ago, in the course of the change"),
    ] {
        one.state = state;
        one.stale = false;
        assert!(!devices(&one).contains("drawn as"), "it is as it stands");
        one.stale = true;
        let text = devices(&one);
        assert!(text.contains(says), "{text}");
        assert_eq!(text.contains("MIG devices"), state != GpuState::Lost, "{text}");
        let shown = fixtures::plain(&show::gpu(&one, &look));
        assert!(shown.contains("last read") && shown.contains("not known since"), "{shown}");
    }
}

/// A rollback that failed: each thing is said once, and nothing is said to be going on.
#[test]
fn a_rollback_that_failed_is_told_once() {
    let look = fixtures::look(120, UTF8);
    let mut failed = fixtures::operation(OperationState::Failed);
    failed.progress[0].done = 3;
    failed.progress[0].rolling_back = true;
    let back = "GPU 0: destroying GPU instance 3 failed";
    failed.progress[0].error = Some(ApiError::new(Code::DriverError, back).cause("out of luck"));
    failed.error = Some(
        ApiError::new(Code::DriverError, "GPU 0: creating 1g.10gb@5 failed")
            .cause("insufficient resources")
            .cause(back)
            .cause("out of luck"),
    );
    let text = fits(&operation::operation(&failed, &[], &[], true, &look), &look);
    for once in [back, "out of luck", "insufficient resources", "creating 1g.10gb@5 failed"] {
        assert_eq!(text.matches(once).count(), 1, "{once}:\n{text}");
    }
    assert!(text.contains("3 of 6 steps were done, and could not all be taken back"), "{text}");
}

#[test]
fn operations_and_their_ends() {
    let look = fixtures::look(120, UTF8);
    let (before, after) = (fixtures::mixed(), fixtures::after());
    let done = fixtures::operation(OperationState::Done);
    assert_snapshot!("operation-done", fits(&operation::operation(&done, &before, &after, true, &look), &look));
    assert_snapshot!(
        "operation-done-without-readings",
        fits(&operation::operation(&done, &[], &[], true, &look), &look)
    );

    // Later the GPU is as others left it: the record tells what this operation did, no ids of today.
    let later = operation::operation(&done, &[], &after, false, &look);
    assert_snapshot!("operation-done-later", fits(&later, &look));

    let mut running = fixtures::operation(OperationState::Running);
    running.progress[0].done = 2;
    running.progress[0].doing = Some("creating 1g.10gb@4".into());
    assert_snapshot!("operation-running", fits(&operation::operation(&running, &before, &before, true, &look), &look));

    let error = ApiError::new(Code::DriverError, "the driver refused to create 1g.10gb@5 on GPU 0")
        .cause("NVML: insufficient resources")
        .hint("gpushctl mig plan --gpu 0 shows what is free now");
    let mut rolled = fixtures::operation(OperationState::RolledBack);
    rolled.progress[0].error = Some(error.clone());
    rolled.error = Some(error.clone());
    assert_snapshot!(
        "operation-rolled-back",
        fits(&operation::operation(&rolled, &before, &before, true, &look), &look)
    );
    assert_eq!(operation::error(&rolled), Some(error));

    // The whole's error adds a cause to the GPU's: together they are told once.
    let whole = rolled.error.take().map(|error| error.outcome("the previous layout stands again, read back"));
    rolled.error = whole;
    let text = fits(&operation::operation(&rolled, &before, &before, true, &look), &look);
    for once in ["the driver refused to create", "insufficient resources", "stands again", "hint:"] {
        assert_eq!(text.matches(once).count(), 1, "{once}:\n{text}");
    }

    let mut failed = fixtures::operation(OperationState::Failed);
    failed.progress[0].done = 3;
    failed.progress[0].error = Some(ApiError::new(Code::DriverTimeout, "creating 1g.10gb@5 did not return in 60 s"));
    assert_snapshot!("operation-failed", fits(&operation::operation(&failed, &before, &before, true, &look), &look));
    assert_eq!(operation::error(&failed).unwrap().code.exit_status(), 8);

    // Another GPU that was done when the first failed: it is as before, for ever, and says why.
    let mut both = failed.clone();
    both.plans[1] = gpush_api::GpuPlan { gpu: 1, ..fixtures::plan() };
    both.progress[1] =
        gpush_api::StepState { gpu: 1, done: 6, total: 6, rolling_back: true, ..both.progress[1].clone() };
    let text = fits(&operation::operation(&both, &before, &before, true, &look), &look);
    assert!(text.contains("  as it was before, because GPU 0 failed\n"), "{text}");
    assert!(!text.contains("6 of 6 steps"), "{text}");

    let all = [&done, &running, &rolled, &failed].map(OperationSummary::from);
    let look = fixtures::look(80, UTF8);
    assert_snapshot!("operation-list", fits(&table::operations(&all, &look), &look));
}

#[test]
fn the_config_in_force() {
    let look = fixtures::look(80, UTF8);
    let rule = |name: &str, gpus: &[&str], mode, layout: Option<&[&str]>, claims: &[u32]| RuleView {
        name: name.into(),
        gpus: gpus.iter().map(|g| (*g).to_owned()).collect(),
        mode,
        layout: layout.map(|l| l.iter().map(|e| (*e).to_owned()).collect()),
        claims: claims.to_vec(),
    };
    let view = ConfigView {
        path: Some("/etc/gpush/config.toml".into()),
        rules: vec![
            rule("training", &["0-3"], Mode::Mig, Some(&["mixed"]), &[0, 1, 2, 3]),
            rule(
                "rule 2",
                &["*A30*", "GPU-5e8c07a4-1111-2222-3333-444444444444"],
                Mode::Mig,
                Some(&["2g.12gb*2"]),
                &[],
            ),
            rule("rule 3", &["all"], Mode::Unmanaged, None, &[4, 5, 7]),
        ],
        layouts: vec![NamedLayout {
            name: "mixed".into(),
            entries: vec!["3g.40gb".into(), "2g.20gb".into(), "1g.10gb*2".into()],
        }],
        effective: String::new(),
        pending_restart: vec![
            PendingRestart {
                key: "driver.library".into(),
                in_force: Some("\"libnvidia-ml.so.1\"".into()),
                in_file: Some("\"/opt/nvidia/libnvidia-ml.so.1\"".into()),
            },
            PendingRestart { key: "api.admin_socket".into(), in_force: None, in_file: Some("\"/run/a.sock\"".into()) },
        ],
        trouble: Some(
            ApiError::new(Code::ConfigInvalid, "the config /etc/gpush/config.toml is wrong")
                .cause("line 3, column 1: unknown key `libary` in [driver] (did you mean `library`?)")
                .outcome("the config read before stays in force")
                .hint("mend it, test it with `gpushctl config check /etc/gpush/config.toml`, then `systemctl reload gpushd`"),
        ),
        generation: 1,
    };
    assert_snapshot!("config-show", fits(&config::config(&view, &look), &look));
    let defaults = ConfigView {
        path: None,
        rules: Vec::new(),
        layouts: Vec::new(),
        effective: String::new(),
        pending_restart: Vec::new(),
        trouble: None,
        generation: 0,
    };
    assert_snapshot!("config-show-defaults", fits(&config::config(&defaults, &look), &look));
    let findings = ["rule 2: `*A30*` matches no GPU of this host".to_owned()];
    let plans = Plans { plans: vec![fixtures::plan(), fixtures::as_wanted(1)] };
    let text = config::checked(&view, &findings, Some(&plans), &fixtures::mixed(), &look);
    assert_snapshot!("config-checked", fits(&text, &look));
}

fn an_override(gpu: u32, layout: &[&str], reason: &str, expires_in: Option<i64>) -> Override {
    let at = |seconds: i64| jiff::Timestamp::from_second(fixtures::READ_AT + 3 + seconds).unwrap();
    Override {
        uuid: format!("GPU-{gpu}"),
        gpu: Some(gpu),
        rule: Some("training".into()),
        layout: layout.iter().map(|entry| (*entry).to_owned()).collect(),
        by: Actor { uid: 1000, user: Some("alice".into()), pid: None },
        reason: reason.into(),
        created_at: at(-7300),
        expires_at: expires_in.map(at),
        generation: 3,
    }
}

#[test]
fn overrides_where_they_show() {
    let look = fixtures::look(80, UTF8);
    let long = "the quarterly run of the group for weather needs one large instance for some days";
    let both = [an_override(0, &["7g.80gb"], long, Some(3 * 3600)), an_override(3, &["1g.10gb*7"], "", None)];
    let all = Overrides { generation: 4, overrides: both.to_vec() };
    let none = Overrides { generation: 4, overrides: Vec::new() };
    let ended = OverrideEnded { generation: 5, ended: both[0].clone() };
    let mut gpus = fixtures::mixed();
    gpus.truncate(2);
    gpus[0].overridden = Some(both[0].clone());
    gpus[1].overridden = Some(both[1].clone());
    gpus[1].mode = Mode::Exclusive;
    let mut text = fits(&overrides::list(&all, &look), &look);
    text += &format!("---\n{}", overrides::list(&none, &look));
    text += &format!("---\n{}", fits(&overrides::ended(&ended, &look), &look));
    text += &format!("---\n{}", drawn(&fixtures::status(gpus, false), true, &look));
    assert_snapshot!("overrides", text);
}

#[test]
fn what_a_file_changes() {
    let look = fixtures::look(80, UTF8);
    let wish = |mode, rule: &str, layout: Option<&str>| WantedView {
        mode,
        rule: Some(rule.into()),
        layout: layout.map(|entry| vec![entry.to_owned()]),
    };
    let gpu = |gpu, in_file: Option<WantedView>, in_force, stands: &[&str]| GpuDiff {
        gpu,
        uuid: format!("GPU-{gpu}"),
        in_file,
        in_force,
        overridden: None,
        stands: Some(stands.iter().map(|one| (*one).to_owned()).collect()),
        drift: Vec::new(),
    };
    let training = || wish(Mode::Mig, "training", Some("3g.40gb*2"));
    let changed = gpu(0, Some(wish(Mode::Mig, "training", Some("7g.80gb"))), training(), &["3g.40gb@0", "3g.40gb@4"]);
    let mut overridden = gpu(1, Some(training()), training(), &[]);
    overridden.overridden = Some(an_override(1, &["1g.10gb*7"], "tests", Some(60)));
    overridden.drift = vec!["missing 1g.10gb*7".into()];
    let same = gpu(2, Some(training()), training(), &["3g.40gb@0", "3g.40gb@4"]);
    let setting = |key: &str, in_force: &str, in_file: Option<&str>, restart| SettingDiff {
        key: key.into(),
        in_force: Some(in_force.into()),
        in_file: in_file.map(Into::into),
        restart,
    };
    let settings = vec![
        setting("log.level", "\"info\"", Some("\"debug\""), false),
        setting("api.admin_socket", "\"/run/a.sock\"", None, true),
    ];
    let error = ApiError::new(
        Code::Conflict,
        "the file changes a rule that is overridden: GPU 1 (GPU-1) has an override by alice: tests",
    );
    let diff = ConfigDiff {
        path: Some("/etc/gpush/config.toml".into()),
        trouble: Some(error.hint("`gpushctl config reload --clear-overrides` ends what it changes and takes the file")),
        settings: settings.clone(),
        gpus: vec![changed.clone(), overridden.clone(), same.clone()],
        generation: 4,
    };
    let agreed = ConfigDiff { trouble: None, settings: Vec::new(), gpus: vec![same], ..diff.clone() };
    assert!(overrides::differs(&diff) && !overrides::differs(&agreed));
    let wrong = GpuDiff { in_file: None, ..changed.clone() };
    let wrong = ConfigDiff { settings: Vec::new(), gpus: vec![wrong], ..diff.clone() };
    let reloaded = Reloaded {
        path: diff.path.clone(),
        settings,
        gpus: vec![changed],
        ended: vec![an_override(1, &["1g.10gb*7"], "tests", None)],
        generation: 5,
    };
    let nothing = Reloaded { settings: Vec::new(), gpus: Vec::new(), ended: Vec::new(), ..reloaded.clone() };
    let pictures = [
        overrides::diff(&diff, &look),
        overrides::diff(&agreed, &look),
        overrides::diff(&wrong, &look),
        overrides::reloaded(&reloaded, &look),
        overrides::reloaded(&nothing, &look),
    ];
    let pictures: Vec<String> = pictures.iter().map(|text| fits(text, &look)).collect();
    assert_snapshot!("config-diff", pictures.join("---\n"));
}

#[test]
fn errors_for_people() {
    let look = fixtures::look(60, UTF8);
    let error = ApiError::new(Code::Blocked, "GPU 0 (GPU-3a1f): 3g.40gb@0 is in use and in the way of 7g.80gb")
        .cause("GPU instance 2 is held by pid 4123 of alice (python train.py)")
        .cause("first line\n  | with a caret\n  | ^^^^")
        .hint("wait for it to end, or leave the GPU out: gpushctl mig apply --gpu 1-7");
    let text = trouble::lines("error", &error, 0, &look).join("\n");
    assert_snapshot!("error", fits(&text, &look));
}

#[test]
fn every_state_has_its_word() {
    let states = [
        GpuState::Ready,
        GpuState::Cordoned,
        GpuState::Degraded,
        GpuState::Changing,
        GpuState::Held,
        GpuState::Unknown,
        GpuState::Lost,
        GpuState::Maintenance,
    ];
    let look = fixtures::look(80, UTF8);
    for state in states {
        let mut one = fixtures::mixed().swap_remove(3);
        one.state = state;
        let heading = fixtures::plain(&gpu::heading(&one, &look));
        assert_eq!(heading.contains(gpu::state(state).0), state != GpuState::Ready, "{heading}");
        // A state that nobody explained still says what it means.
        assert_eq!(gpu::notes(&one, &look).is_empty(), state == GpuState::Ready);
    }
}
