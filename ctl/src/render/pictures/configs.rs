//! Drawings of the config and its overrides.

use super::*;
use gpush_api::GpuIndex;

#[test]
fn config_in_force() {
    let look = fixtures::look(80, UTF8);
    let rule = |name: &str, gpus: &[&str], mode, layout: Option<&[&str]>, claims: &[u32]| RuleView {
        name: name.into(),
        selectors: gpus.iter().map(|g| (*g).to_owned()).collect(),
        mode,
        layout: layout.map(|l| l.iter().map(|e| (*e).to_owned()).collect()),
        mps: None,
        timeslice: None,
        lease: None,
        access: None,
        claims: claims.iter().copied().map(GpuIndex).collect(),
    };
    let limits = MpsSettings {
        percentage: "50".parse().unwrap(),
        memory_limit_mib: Some("8G".parse().unwrap()),
        ..MpsSettings::default()
    };
    let shares = MpsPolicy { settings: limits, max_clients: 10, total_percentage: 150, ..MpsPolicy::default() };
    let turns = TimeslicePolicy { replicas: 4, level: TimesliceLevel::Long, ..TimeslicePolicy::default() };
    let access = LeaseAccess { users: vec!["anna".to_owned()], groups: vec!["vision".to_owned()] };
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
            RuleView { access: Some(access), mps: Some(shares), ..rule("small", &["6"], Mode::Mps, None, &[6]) },
            RuleView { timeslice: Some(turns), ..rule("by turns", &["8"], Mode::Timeslice, None, &[]) },
            rule("rule 5", &["all"], Mode::Unmanaged, None, &[4, 5, 7]),
        ],
        layouts: vec![NamedLayout {
            name: "mixed".into(),
            entries: vec!["3g.40gb".into(), "2g.20gb".into(), "1g.10gb*2".into()],
        }],
        unleased: gpush_api::UnleasedPolicy::Report,
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
            ApiError::new(Code::ConfigInvalid, "the config /etc/gpush/config.toml has errors")
                .cause("line 3, column 1: unknown key `libary` in [driver] (did you mean `library`?)")
                .outcome("the previous config stays in effect")
                .hint(
                    "correct the config file, check it with `gpushctl config check /etc/gpush/config.toml`, then \
                    `gpushctl config reload` (administrator)",
                ),
        ),
        generation: 1,
    };
    assert_snapshot!("config-show", fits(&config::config(&view, &look), &look));
    let defaults = ConfigView {
        path: None,
        rules: Vec::new(),
        layouts: Vec::new(),
        unleased: gpush_api::UnleasedPolicy::Report,
        effective: String::new(),
        pending_restart: Vec::new(),
        trouble: None,
        generation: 0,
    };
    assert_snapshot!("config-show-defaults", fits(&config::config(&defaults, &look), &look));
    let findings = ["rule 2: `*A30*` matches no GPU of this host".to_owned()];
    let plans = Plans { plans: vec![fixtures::plan(), fixtures::plan_without_steps(1)] };
    let text = config::checked(&view, &findings, Some(&plans), &fixtures::mixed(), &look);
    assert_snapshot!("config-checked", fits(&text, &look));
}

fn an_override(gpu: GpuIndex, layout: &[&str], reason: &str, expires_in: Option<i64>) -> Override {
    let at = |seconds: i64| jiff::Timestamp::from_second(fixtures::READ_AT + 3 + seconds).unwrap();
    Override {
        gpu_uuid: format!("GPU-{gpu}").into(),
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
fn override_is_shown_in_every_view() {
    let look = fixtures::look(80, UTF8);
    let long = "the quarterly run of the group for weather needs one large instance for some days";
    let both = [
        an_override(GpuIndex(0), &["7g.80gb"], long, Some(3 * 3600)),
        an_override(GpuIndex(3), &["1g.10gb*7"], "", None),
    ];
    let all = Overrides { generation: 4, overrides: both.to_vec() };
    let none = Overrides { generation: 4, overrides: Vec::new() };
    let ended = OverrideEnded { generation: 5, ended: both[0].clone() };
    let mut gpus = fixtures::mixed();
    gpus.truncate(2);
    gpus[0].overridden = Some(both[0].clone());
    gpus[1].overridden = Some(both[1].clone());
    gpus[1].mode = Mode::Exclusive;
    let mut text = fits(overrides::list(&all, &look).text(), &look);
    text += &format!("---\n{}", overrides::list(&none, &look).text());
    let drifting = Gpu { drift: vec!["missing 3g.40gb".into()], ..gpus[0].clone() };
    for now in [Some(&drifting), Some(&gpus[0]), None] {
        text += &format!("---\n{}", fits(&overrides::ended(&ended, now, &look), &look));
    }
    text += &format!("---\n{}", drawn(&fixtures::status(gpus, false), true, &look));
    assert_snapshot!("overrides", text);
}

#[test]
fn config_diff_shows_the_changes_of_a_file() {
    let look = fixtures::look(80, UTF8);
    let wish = |mode, rule: &str, layout: Option<&str>| DesiredView {
        mode,
        rule: Some(rule.into()),
        layout: layout.map(|entry| vec![entry.to_owned()]),
        mps: None,
        timeslice: None,
        lease: None,
        access: None,
    };
    let gpu = |gpu, in_file: Option<DesiredView>, in_force, stands: &[&str]| GpuDiff {
        gpu,
        gpu_uuid: format!("GPU-{gpu}").into(),
        in_file,
        in_force,
        overridden: None,
        stands: Some(stands.iter().map(|one| (*one).to_owned()).collect()),
        drift: Vec::new(),
        pending: Vec::new(),
        drift_known: true,
    };
    let training = || wish(Mode::Mig, "training", Some("3g.40gb*2"));
    let turns = |level| DesiredView {
        timeslice: Some(TimeslicePolicy { level, ..TimeslicePolicy::default() }),
        ..wish(Mode::Timeslice, "turns", None)
    };
    let mut shared = gpu(GpuIndex(3), Some(turns(TimesliceLevel::Short)), turns(TimesliceLevel::Long), &[]);
    shared.stands = None;
    let changed =
        gpu(GpuIndex(0), Some(wish(Mode::Mig, "training", Some("7g.80gb"))), training(), &["3g.40gb@0", "3g.40gb@4"]);
    let mut overridden = gpu(GpuIndex(1), Some(training()), training(), &[]);
    overridden.overridden = Some(an_override(GpuIndex(1), &["1g.10gb*7"], "tests", Some(60)));
    overridden.drift = vec!["missing 1g.10gb*7".into()];
    let same = gpu(GpuIndex(2), Some(training()), training(), &["3g.40gb@0", "3g.40gb@4"]);
    let same_uuid = same.gpu_uuid.clone();
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
        trouble: Some(
            error.hint("`gpushctl config reload --clear-overrides` clears these overrides and loads the file"),
        ),
        settings: settings.clone(),
        gpus: vec![changed.clone(), overridden.clone(), same.clone(), shared],
        unseen: Vec::new(),
        generation: 4,
    };
    let agreed = ConfigDiff { trouble: None, settings: Vec::new(), gpus: vec![same], ..diff.clone() };
    assert!(overrides::differs(&diff) && !overrides::differs(&agreed));
    let lost = ApiError::new(Code::GpuLost, format!("GPU 2 ({}) can't be read, so its layout is not known", same_uuid));
    let unseen = ConfigDiff { unseen: vec![lost.hint("`gpushctl gpu show 2` shows its state")], ..agreed.clone() };
    assert!(!overrides::diff(&unseen, &look).contains("as it wants"), "{}", overrides::diff(&unseen, &look));
    let wrong = GpuDiff { in_file: None, ..changed.clone() };
    let wrong = ConfigDiff { settings: Vec::new(), gpus: vec![wrong], ..diff.clone() };
    let same_layout = Reloaded {
        path: diff.path.clone(),
        settings: Vec::new(),
        gpus: vec![changed.clone()],
        ended: Vec::new(),
        findings: Vec::new(),
        generation: 5,
    };
    let changed = GpuDiff { drift: vec!["missing 7g.80gb".into()], ..changed };
    let reloaded = Reloaded {
        path: diff.path.clone(),
        settings,
        gpus: vec![changed],
        ended: vec![an_override(GpuIndex(1), &["1g.10gb*7"], "tests", None)],
        findings: vec!["memory limit 64G is more than the 23034 MiB that GPU 4 has: it would limit nothing".into()],
        generation: 5,
    };
    let nothing = Reloaded {
        settings: Vec::new(),
        gpus: Vec::new(),
        ended: Vec::new(),
        findings: Vec::new(),
        ..reloaded.clone()
    };
    let pictures = [
        overrides::diff(&diff, &look),
        overrides::diff(&agreed, &look),
        overrides::diff(&wrong, &look),
        overrides::reloaded(&reloaded, &look),
        overrides::reloaded(&nothing, &look),
        overrides::reloaded(&same_layout, &look),
    ];
    let pictures: Vec<String> = pictures.iter().map(|text| fits(text, &look)).collect();
    assert_snapshot!("config-diff", pictures.join("---\n"));
}

/// An earlier operation may have set the override in the same second.
#[test]
fn only_a_new_override_is_a_result_of_an_operation() {
    let look = fixtures::look(80, UTF8);
    let operation = fixtures::operation(OperationState::Done);
    let mut before = fixtures::mixed();
    let uuid = before[0].uuid.clone();
    before[0].overridden = Some(Override {
        created_at: operation.created_at,
        gpu_uuid: uuid,
        ..an_override(GpuIndex(0), &["7g.80gb"], "", None)
    });
    let results = |now: &[Gpu]| overrides::override_results(&operation, &before, now, &look);
    assert_eq!(results(&before), [""; 0]);
    let mut now = before.clone();
    now[0].overridden.as_mut().unwrap().generation += 1;
    let text = fixtures::plain(&results(&now).join(" "));
    assert!(text.starts_with("GPU 0: override active, layout 7g.80gb; "), "{text}");
}
