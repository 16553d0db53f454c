use std::fmt::Write as _;

use gpush_api::{
    ApiError, Architecture, Code, ComputeInstance, Gpu, GpuInstance, GpuLayout, GpuPlan, GpuState, LayoutSource, Mode,
    Placement, PlanRequest, Process, ProcessKind, Refusal, Step,
};
use proptest::prelude::*;

use super::*;
use crate::{layout::Layout, preset};

mod overridden;
mod switched;
mod whole;

const CONFIG: &str = r#"
[layouts]
halves = ["3g.40gb*2"]

[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = "halves"

[[gpu]]
match = ["0-2"]
mode = "mig"
layout = ["3g.40gb", "1c.3g.40gb*3"]

[[gpu]]
match = ["3"]
mode = "exclusive"

[[gpu]]
match = ["4"]
mode = "unmanaged"

[[gpu]]
match = ["5"]
mode = "mig"
layout = "none"
"#;

fn config() -> Config {
    Config::parse(CONFIG, "config.toml").unwrap_or_else(|e| panic!("{e}"))
}

fn host() -> Vec<Gpu> {
    preset::gpus("dgx-a100").unwrap()
}

fn request(gpus: &[&str], layout: LayoutSource) -> PlanRequest {
    PlanRequest { gpus: gpus.iter().map(|s| (*s).to_owned()).collect(), layout }
}

fn entries(text: &str) -> LayoutSource {
    LayoutSource::Entries(vec![text.to_owned()])
}

fn process(pid: u32) -> Process {
    Process {
        pid: Some(pid),
        uid: Some(1000),
        user: Some("ada".to_owned()),
        command: Some("python train.py".to_owned()),
        kind: ProcessKind::Compute,
        memory_mib: Some(512),
    }
}

/// A GPU instance as the driver would show it, with compute instances by name; none = whole.
fn instance(gpu: &Gpu, id: u32, profile: &str, start: u8, compute: &[&str]) -> GpuInstance {
    let of = gpu.mig.as_ref().unwrap().profiles.iter().find(|p| p.name == profile).unwrap();
    let compute = if compute.is_empty() { &[profile][..] } else { compute };
    GpuInstance {
        id,
        profile_id: of.id,
        profile: profile.to_owned(),
        placement: *of.placements.iter().find(|p| p.start == start).unwrap(),
        memory: None,
        compute: (0..)
            .zip(compute)
            .map(|(id, name)| ComputeInstance {
                id,
                profile_id: of.compute.iter().find(|c| c.name == *name).unwrap().id,
                profile: (*name).to_owned(),
                placement: None,
                uuid: None,
                processes: Vec::new(),
            })
            .collect(),
        processes: Vec::new(),
    }
}

fn set(gpu: &mut Gpu, instances: &[(&str, u8, &[&str])]) {
    let made = (1..).zip(instances).map(|(id, (p, start, c))| instance(gpu, id, p, *start, c)).collect();
    gpu.mig.as_mut().unwrap().instances = made;
}

fn one(config: &Config, gpus: &[Gpu], request: &PlanRequest) -> GpuPlan {
    let mut plans = plan_host(config, gpus, request).unwrap_or_else(|e| panic!("{e:?}")).plans;
    assert_eq!(plans.len(), 1);
    plans.remove(0)
}

#[test]
fn the_first_rule_that_matches_claims() {
    let host = host();
    let claimed = claims(&config(), &host);
    assert_eq!(claimed, [Some(0), Some(0), Some(1), Some(2), Some(3), Some(4), None, None]);
    let wishes = wishes(&config(), &host);
    assert_eq!(wishes[0].rule.as_deref(), Some("training"));
    assert_eq!(wishes[2].rule.as_deref(), Some("rule 2"));
    assert_eq!(wishes[2].layout.as_ref().unwrap().to_string(), "3g.40gb,1c.3g.40gb*3");
    assert_eq!((wishes[3].mode, &wishes[3].layout), (Mode::Exclusive, &None));
    assert_eq!((wishes[7].mode, &wishes[7].rule), (Mode::Unmanaged, &None));
}

#[test]
fn the_view_says_who_claims_what() {
    let view = config().view(Some("config.toml"), &host());
    let claims: Vec<Vec<u32>> = view.rules.iter().map(|rule| rule.claims.clone()).collect();
    assert_eq!(claims, [vec![0, 1], vec![2], vec![3], vec![4], vec![5]]);
    assert_eq!(view.rules[0].layout.as_deref(), Some(&["halves".to_owned()][..]));
    assert_eq!(view.layouts[0].entries, ["3g.40gb*2"]);
    assert_eq!(Config::parse(&view.effective, "effective").unwrap(), config());
}

#[test]
fn findings_name_selectors_without_effect() {
    let text = r#"
[[gpu]]
name = "all of it"
match = ["*A100*"]
mode = "unmanaged"
[[gpu]]
match = ["0", "*H100*", "9", "GPU-00000000", "07:00.0"]
mode = "unmanaged"
"#;
    let config = Config::parse(text, "config.toml").unwrap();
    assert_eq!(
        findings(&config, &host()),
        [
            "rule 2: `*h100*` matches no GPU of this host",
            "rule 2: `9` matches no GPU of this host",
            "rule 2: `GPU-00000000` is the beginning of several UUIDs and claims none",
            "rule 2 claims no GPU: earlier rules have all that it matches",
        ]
    );
    assert!(findings(&Config::default(), &host()).is_empty());
}

#[test]
fn drift_in_sentences() {
    type Case =
        (&'static str, &'static str, &'static [(&'static str, u8, &'static [&'static str])], &'static [&'static str]);
    let cases: &[Case] = &[
        ("as wanted", "3g.40gb*2", &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])], &[]),
        ("none wanted, none there", "none", &[], &[]),
        ("lacks", "3g.40gb,1g.10gb*2", &[], &["missing 3g.40gb, 1g.10gb*2"]),
        ("lacks one of two", "3g.40gb*2", &[("3g.40gb", 4, &[])], &["missing 3g.40gb"]),
        ("has another", "3g.40gb", &[("2g.20gb", 2, &[])], &["missing 3g.40gb", "extra 2g.20gb@2"]),
        ("has too many", "1g.10gb", &[("1g.10gb", 0, &[]), ("1g.10gb", 3, &[])], &["extra 1g.10gb@3"]),
        ("has at the wrong place", "3g.40gb@0", &[("3g.40gb", 4, &[])], &["missing 3g.40gb@0", "extra 3g.40gb@4"]),
        ("a fixed place first", "1g.10gb,1g.10gb@4", &[("1g.10gb", 4, &[]), ("1g.10gb", 0, &[])], &[]),
        ("none wanted", "none", &[("7g.80gb", 0, &[])], &["extra 7g.80gb@0"]),
        (
            "compute instances differ",
            "1c.3g.40gb*3",
            &[("3g.40gb", 4, &["1c.3g.40gb", "2c.3g.40gb"])],
            &[
                "compute instances of 3g.40gb@4: missing 1c.3g.40gb*2",
                "compute instances of 3g.40gb@4: extra 2c.3g.40gb",
            ],
        ),
        (
            "the one whose compute instances agree is taken",
            "3g.40gb,1c.3g.40gb*3",
            &[("3g.40gb", 0, &["1c.3g.40gb", "1c.3g.40gb", "1c.3g.40gb"]), ("3g.40gb", 4, &[])],
            &[],
        ),
        ("profile of another model", "1g.5gb", &[], &["the layout 1g.5gb can't be on this GPU"]),
    ];
    for (what, layout, instances, expected) in cases {
        let layout = Layout::parse(layout).unwrap();
        let mut gpu = host().remove(0);
        set(&mut gpu, instances);
        let wish = Wish { mode: Mode::Mig, rule: None, layout: Some(layout), configured: None };
        assert_eq!(drift(&wish, &gpu), *expected, "{what}");
    }
    println!("{} drifts", cases.len());
    let mut gpu = host().remove(0);
    set(&mut gpu, &[("3g.40gb", 4, &[])]);
    gpu.mig.as_mut().unwrap().instances[0].compute.clear();
    let wish = Wish { mode: Mode::Mig, rule: None, layout: Some(Layout::parse("3g.40gb").unwrap()), configured: None };
    assert_eq!(drift(&wish, &gpu), ["compute instances of 3g.40gb@4: missing 3g.40gb"]);
}

#[test]
fn a_reading_without_profiles_is_not_called_drifted_by_guess() {
    let mut gpu = host().remove(0);
    gpu.mig.as_mut().unwrap().profiles = std::sync::Arc::default();
    let wish = Wish { mode: Mode::Mig, rule: None, layout: Some(Layout::parse("3g.40gb").unwrap()), configured: None };
    assert_eq!(drift(&wish, &gpu), ["its MIG profiles are not known, so it can't be compared with the layout 3g.40gb"]);
}

#[test]
fn drift_of_modes() {
    let layout = Layout::parse("3g.40gb").unwrap();
    let mut shown = String::new();
    for mode in [Mode::Mig, Mode::Exclusive, Mode::Unmanaged] {
        for (enabled, pending) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut gpu = host().remove(0);
            let mig = gpu.mig.as_mut().unwrap();
            (mig.enabled, mig.pending) = (enabled, pending);
            let wish = Wish { mode, rule: None, layout: (mode == Mode::Mig).then(|| layout.clone()), configured: None };
            let _ = writeln!(shown, "{mode:?}, MIG {enabled}, pending {pending}: {:?}", drift(&wish, &gpu));
        }
        let mut gpu = preset::gpus("mixed").unwrap().remove(5);
        gpu.state = GpuState::Ready;
        let wish = Wish { mode, rule: None, layout: (mode == Mode::Mig).then(|| layout.clone()), configured: None };
        let _ = writeln!(shown, "{mode:?}, no MIG: {:?}", drift(&wish, &gpu));
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn describe_fills_in_what_the_config_wants() {
    let mut host = host();
    set(&mut host[0], &[("3g.40gb", 0, &[]), ("3g.40gb", 4, &[])]);
    describe(&config(), &mut host);
    assert_eq!((host[0].mode, host[0].rule.as_deref()), (Mode::Mig, Some("training")));
    assert_eq!((host[0].layout.as_deref(), host[0].drift.len()), (Some(&["3g.40gb*2".to_owned()][..]), 0));
    assert_eq!(host[1].drift, ["missing 3g.40gb*2"]);
    assert_eq!(host[3].drift, ["MIG mode is on, mode exclusive wants the whole GPU"]);
    assert_eq!((host[7].mode, &host[7].rule, &host[7].layout), (Mode::Unmanaged, &None, &None));
}

#[test]
fn no_selector_means_what_the_config_claims_for_mig() {
    let plans = plan_host(&config(), &host(), &PlanRequest::default()).unwrap().plans;
    let shown: Vec<(u32, String, usize)> = plans.iter().map(|p| (p.gpu, p.layout.join(","), p.steps.len())).collect();
    let expected = [(0, "3g.40gb*2", 4), (1, "3g.40gb*2", 4), (2, "3g.40gb,1c.3g.40gb*3", 6), (5, "none", 0)];
    assert_eq!(shown, expected.map(|(gpu, layout, steps)| (gpu, layout.to_owned(), steps)));
    // With a layout of its own the request goes to the same GPUs.
    let plans = plan_host(&config(), &host(), &request(&[], entries("7g.80gb"))).unwrap().plans;
    assert_eq!(plans.iter().map(|p| p.gpu).collect::<Vec<_>>(), [0, 1, 2, 5]);
}

#[test]
fn a_named_layout_and_entries_reach_unclaimed_gpus() {
    let named = LayoutSource::Named("halves".to_owned());
    let plan = one(&config(), &host(), &request(&["7"], named));
    assert_eq!((plan.gpu, plan.layout.join(",").as_str(), plan.steps.len()), (7, "3g.40gb*2", 4));
    let plan = one(&Config::default(), &host(), &request(&["7"], entries("3G.40GB")));
    assert_eq!((plan.layout.join(",").as_str(), plan.steps.len()), ("3g.40gb", 2));
    let none = LayoutSource::Named("none".to_owned());
    let mut host = host();
    set(&mut host[7], &[("3g.40gb", 4, &[])]);
    let plan = one(&Config::default(), &host, &request(&["7"], none));
    assert_eq!((plan.layout.join(",").as_str(), plan.steps.len()), ("none", 2));
}

#[test]
fn requests_that_are_refused() {
    let mut host = host();
    host[1].state = GpuState::Degraded;
    host[1].reasons = vec!["creating 3g.40gb@4 failed: in use".to_owned()];
    host[6].state = GpuState::Lost;
    host[7].state = GpuState::Unknown;
    host[7].reasons = vec!["reading it took longer than 10 s".to_owned()];
    let named = |name: &str| LayoutSource::Named(name.to_owned());
    let empty = Config::default();
    let config = config();
    let cases: Vec<(&str, &Config, PlanRequest, Code)> = vec![
        ("nothing configured", &empty, request(&[], LayoutSource::Config), Code::NotFound),
        ("nothing configured, a layout given", &empty, request(&[], entries("3g.40gb")), Code::NotFound),
        ("no layout configured", &empty, request(&["0"], LayoutSource::Config), Code::NotFound),
        ("index past the end", &config, request(&["12"], LayoutSource::Config), Code::NotFound),
        ("garbage selector", &config, request(&["!"], LayoutSource::Config), Code::BadRequest),
        ("no such layout, near", &config, request(&["0"], named("halfs")), Code::NotFound),
        ("no such layout, far", &config, request(&["0"], named("training")), Code::NotFound),
        ("dynamic", &config, request(&["0"], named("dynamic")), Code::Unsupported),
        ("profile misspelt", &config, request(&["0"], entries("3g40gb")), Code::BadRequest),
        ("empty layout", &config, request(&["0"], LayoutSource::Entries(vec![])), Code::BadRequest),
        ("shared", &config, request(&["0"], entries("2g.20gb:mps")), Code::Unsupported),
        ("exclusive GPU", &config, request(&["3"], entries("3g.40gb")), Code::Conflict),
        ("unmanaged GPU", &config, request(&["4"], entries("3g.40gb")), Code::Conflict),
        ("degraded GPU", &config, request(&[], LayoutSource::Config), Code::Conflict),
        ("lost GPU", &config, request(&["6"], entries("3g.40gb")), Code::GpuLost),
        ("unknown GPU", &config, request(&["7"], entries("3g.40gb")), Code::DriverTimeout),
    ];
    let mut shown = String::new();
    for (what, config, request, code) in &cases {
        let error = match (plan_host(config, &host, request), what.ends_with("GPU") && *code != Code::Conflict) {
            (Err(error), false) => error,
            // A GPU in a bad way has no plan, and leaves the others theirs.
            (Ok(plans), _) => {
                let bad: Vec<_> = plans.plans.into_iter().filter(|plan| plan.error.is_some()).collect();
                assert!(bad.len() == 1 && bad[0].steps.is_empty(), "{what}: {bad:?}");
                bad[0].error.clone().unwrap()
            }
            (Err(error), true) => panic!("{what}: {error:?}"),
        };
        assert_eq!(error.code, *code, "{what}");
        let ApiError { message, causes, hint, .. } = error;
        let _ = writeln!(shown, "{what}: {code:?}\n  {message}");
        for cause in causes {
            let _ = writeln!(shown, "  because {cause}");
        }
        let _ = writeln!(shown, "  {}\n", hint.unwrap());
    }
    println!("{} requests refused", cases.len());
    insta::assert_snapshot!(shown);
    // Naming it is the way out of `degraded`.
    assert!(one(&config, &host, &request(&["1"], LayoutSource::Config)).error.is_none());
    assert!(plan_host(&empty, &[], &PlanRequest::default()).unwrap_err().message.contains("no GPU"));
}

/// The text between the first `start` and the next `end`.
fn between<'t>(text: &'t str, start: &str, end: &[char]) -> Option<&'t str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split(end).next().unwrap_or(rest))
}

#[test]
fn what_a_hint_says_to_type_works_for_that_gpu() {
    const RULES: &str = r#"
[[gpu]]
name = "whole"
match = ["*A100*", "*A30*", "*T4*"]
mode = "exclusive"
[[gpu]]
match = ["*H100*"]
mode = "unmanaged"
[[gpu]]
name = "cut"
match = ["4"]
mode = "mig"
layout = "none"
"#;
    let host = preset::gpus("mixed").unwrap();
    let (mut named, mut ruled) = (0, 0);
    for rules in ["", RULES] {
        let config = Config::parse(rules, "config.toml").unwrap_or_else(|e| panic!("{e}"));
        let selectors = ["0", "1", "2", "3", "4", "5", "all"].map(|one| vec![one]);
        for gpus in selectors.iter().chain([&vec![]]) {
            for layout in [LayoutSource::Config, LayoutSource::Named("none".to_owned())] {
                let hint = match plan_host(&config, &host, &request(gpus, layout)) {
                    Err(error) => error.hint.unwrap(),
                    Ok(plans) => match plans.plans.into_iter().find_map(|plan| plan.error) {
                        Some(error) => error.hint.unwrap(),
                        None => continue,
                    },
                };
                if let Some(others) = between(&hint, "--gpu ", &[' ', ';', '`']) {
                    let entries = between(&hint, "--layout ", &[' ', ';', '`']).unwrap_or("none");
                    let plans = plan_host(&config, &host, &request(&[others], entries_or_none(entries)));
                    let plans = plans.unwrap_or_else(|e| panic!("{hint}: {e:?}")).plans;
                    assert!(plans.iter().all(|plan| plan.error.is_none()), "{hint}: {plans:?}");
                    named += 1;
                }
                // Of several GPUs the first in the way is told.
                let rule = between(&hint, "add a rule (", &[')']).filter(|_| gpus[..] != ["all"]);
                if let Some(rule) = rule {
                    let rule = rule.replace("\", l", "\"\nl").replace("], ", "]\n");
                    let mended = Config::parse(&format!("[[gpu]]\n{rule}\n{rules}"), "config.toml");
                    let mended = mended.unwrap_or_else(|e| panic!("{hint}: {e}"));
                    let plan = one(&mended, &host, &request(gpus, LayoutSource::Config));
                    assert!(plan.error.is_none() && !plan.steps.is_empty(), "{hint}: {plan:?}");
                    ruled += 1;
                }
            }
        }
    }
    assert!(named > 15 && ruled >= 4, "{named} hints name GPUs, {ruled} a rule");
}

fn entries_or_none(text: &str) -> LayoutSource {
    if text == "none" { LayoutSource::Named(text.to_owned()) } else { entries(text) }
}

#[test]
fn one_gpu_that_cannot_does_not_hide_the_others() {
    let host = preset::gpus("mixed").unwrap();
    let plans = plan_host(&Config::default(), &host, &request(&["all"], entries("1g.10gb"))).unwrap().plans;
    let refusals: Vec<Option<&Refusal>> = plans.iter().map(|plan| plan.refusal.as_ref()).collect();
    assert!(refusals[0].is_none() && refusals[2].is_none());
    assert!(matches!(refusals[1], Some(Refusal::UnknownProfile { profile, .. }) if profile == "1g.10gb"));
    assert!(matches!(refusals[3], Some(Refusal::UnknownProfile { .. })));
    assert_eq!((refusals[4], refusals[5]), (Some(&Refusal::NoMig), Some(&Refusal::NoMig)));
    for plan in &plans {
        assert_eq!(plan.refusal.is_some(), plan.error.is_some());
        assert_eq!(plan.refusal.is_some(), plan.steps.is_empty());
        if let Some(error) = &plan.error {
            assert!(error.message.contains(&format!("GPU {}", plan.gpu)) && error.hint.is_some(), "{error:?}");
        }
    }
}

#[test]
fn instances_in_use_block_and_the_layout_is_still_told() {
    let mut host = host();
    set(&mut host[0], &[("7g.80gb", 0, &[])]);
    host[0].mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(4711));
    let plan = one(&config(), &host, &request(&["0"], LayoutSource::Config));
    assert!(matches!(&plan.refusal, Some(Refusal::Blocked { blockers }) if blockers.len() == 1));
    let error = plan.error.unwrap();
    assert_eq!(error.code, Code::Blocked);
    assert_eq!((plan.layout.join(","), plan.steps), ("3g.40gb*2".to_owned(), vec![]));
}

#[test]
fn mig_mode_that_is_off() {
    let off = |preset: &str, change: &dyn Fn(&mut Gpu)| {
        let mut gpu = preset::gpus(preset).unwrap().remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        (mig.enabled, mig.pending) = (false, false);
        change(&mut gpu);
        let layout = if preset == "rtx-pro-6000x2" { "4g.96gb" } else { "1g.10gb*7" };
        let layout = if preset == "dgx-b200" { "7g.180gb" } else { layout };
        (one(&Config::default(), &[gpu.clone()], &request(&["0"], entries(layout))), gpu)
    };
    for preset in ["dgx-h100", "dgx-b200", "rtx-pro-6000x2"] {
        let (plan, gpu) = off(preset, &|_| {});
        assert!(plan.enables_mig && plan.refusal.is_none() && !plan.steps.is_empty(), "{preset}");
        assert_eq!(plan.reset, None, "{preset}");
        assert!(matches!(gpu.architecture, Architecture::Hopper | Architecture::Blackwell));
    }
    let (plan, _) = off("dgx-a100", &|_| {});
    assert!(plan.enables_mig && plan.reset.is_some() && !plan.steps.is_empty() && plan.error.is_none());
    // Somebody has asked for it already: the same is left to do.
    let (plan, _) = off("dgx-a100", &|gpu| gpu.mig.as_mut().unwrap().pending = true);
    assert!(plan.enables_mig && plan.reset.is_some() && plan.error.is_none());
    let (plan, _) = off("dgx-h100", &|gpu| gpu.mig.as_mut().unwrap().pending = true);
    assert!(plan.enables_mig && plan.reset.is_some(), "a mode that hangs in the air takes a reset everywhere");
    let (plan, _) = off("dgx-h100", &|gpu| gpu.processes.push(process(4711)));
    assert!(matches!(&plan.refusal, Some(Refusal::Held { holders }) if holders.len() == 1));
    let error = plan.error.unwrap();
    assert_eq!((error.code, error.causes), (Code::Blocked, vec!["held by pid 4711 (ada, python train.py)".to_owned()]));
    assert!(!plan.enables_mig);
    // A layout that can't be is told as such, whatever the mode.
    let mut gpu = host().remove(0);
    gpu.mig.as_mut().unwrap().enabled = false;
    let plan = one(&Config::default(), &[gpu.clone()], &request(&["0"], entries("7g.80gb*2")));
    assert!(matches!(plan.refusal, Some(Refusal::TooMany { .. })), "{:?}", plan.refusal);
    // Nothing wanted of a GPU with MIG off: nothing to do.
    gpu.mig.as_mut().unwrap().pending = false;
    let plan = one(&Config::default(), &[gpu], &request(&["0"], LayoutSource::Named("none".to_owned())));
    assert!(plan.refusal.is_none() && plan.steps.is_empty() && !plan.enables_mig);
}

#[test]
fn nothing_is_destroyed_on_a_gpu_whose_users_are_not_known() {
    let mut gpu = host().remove(0);
    let idle = instance(&gpu, 1, "3g.40gb", 0, &[]);
    gpu.mig.as_mut().unwrap().instances = vec![idle];
    gpu.processes_known = false;
    gpu.reasons = vec!["op-2 is changing it".to_owned(), format!("{}: no list", gpush_api::USERS_UNKNOWN)];
    let ask = |layout: &str| one(&Config::default(), &[gpu.clone()], &request(&["0"], entries(layout)));
    for layout in ["7g.80gb", "3g.40gb@4", "1c.3g.40gb*3", "none"] {
        let plan = ask(layout);
        let error = plan.error.unwrap_or_else(|| panic!("{layout}: {:?}", plan.steps));
        assert!(plan.steps.is_empty() && plan.keeps.is_empty(), "{layout}");
        assert_eq!((error.code, error.causes), (Code::DriverError, vec!["no list".to_owned()]), "{layout}");
        assert!(error.message.starts_with("GPU 0") && error.hint.is_some(), "{layout}: {}", error.message);
    }
    let grown = ask("3g.40gb,1g.10gb*2");
    assert!(grown.error.is_none() && !grown.steps.is_empty(), "{:?}", grown.error);
    // Absent in what older agents wrote, and then true.
    let mut json = serde_json::to_value(&gpu).unwrap();
    assert_eq!(json.as_object_mut().unwrap().remove("processes_known"), Some(serde_json::json!(false)));
    assert!(serde_json::from_value::<Gpu>(json).unwrap().processes_known);
}

/// Carries out a plan on paper.
fn carry_out(gpu: &mut Gpu, plan: &GpuPlan) {
    let profiles = gpu.mig.as_ref().unwrap().profiles.clone();
    let mig = gpu.mig.as_mut().unwrap();
    for step in &plan.steps {
        match step {
            Step::DestroyCompute { gi, ci, .. } => {
                let instance = mig.instances.iter_mut().find(|i| i.id == *gi).unwrap();
                instance.compute.retain(|c| c.id != *ci);
            }
            Step::DestroyGpuInstance { gi, .. } => mig.instances.retain(|i| i.id != *gi),
            Step::CreateGpuInstance { profile, profile_id, placement } => {
                let id = (1..).find(|id| mig.instances.iter().all(|i| i.id != *id)).unwrap();
                mig.instances.push(GpuInstance {
                    id,
                    profile_id: *profile_id,
                    profile: profile.clone(),
                    placement: *placement,
                    memory: None,
                    compute: Vec::new(),
                    processes: Vec::new(),
                });
            }
            Step::CreateCompute { gi_placement, profile, placement, .. } => {
                let instance = mig.instances.iter_mut().find(|i| i.placement == *gi_placement).unwrap();
                let of = profiles.iter().find(|p| p.id == instance.profile_id).unwrap();
                let id = (0..).find(|id| instance.compute.iter().all(|c| c.id != *id)).unwrap();
                instance.compute.push(ComputeInstance {
                    id,
                    profile_id: of.compute.iter().find(|c| c.name == *profile).unwrap().id,
                    profile: profile.clone(),
                    placement: *placement,
                    uuid: None,
                    processes: Vec::new(),
                });
            }
        }
    }
    mig.instances.sort_by_key(|i| i.placement);
}

fn any_layout() -> impl Strategy<Value = String> {
    let entry = prop::sample::select(vec![
        "1g.10gb",
        "1g.10gb+me",
        "1g.20gb",
        "2g.20gb",
        "3g.40gb",
        "4g.40gb",
        "7g.80gb",
        "1c.2g.20gb*2",
        "1c.3g.40gb*3",
        "2c.3g.40gb",
        "1c.7g.80gb*7",
        "1g.10gb@4",
        "3g.40gb@0",
        "2g.20gb@2",
    ]);
    prop::collection::vec(entry, 0..4).prop_map(|entries| match entries.len() {
        0 => "none".to_owned(),
        _ => entries.join(","),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// There is drift exactly when a plan has steps, and carrying out the plan leaves none.
    #[test]
    fn drift_and_plan_agree(before in any_layout(), after in any_layout()) {
        let mut gpu = host().remove(7);
        for text in [before, after] {
            let layout = Layout::parse(&text).unwrap();
            let plan = one(&Config::default(), &[gpu.clone()], &PlanRequest {
                gpus: vec!["all".to_owned()],
                layout: LayoutSource::Entries(layout.canonical()),
            });
            let wish = Wish { mode: Mode::Mig, rule: None, layout: Some(layout), configured: None };
            if plan.refusal.is_some() {
                prop_assert!(!drift(&wish, &gpu).is_empty(), "{text}");
                continue;
            }
            prop_assert_eq!(plan.steps.is_empty(), drift(&wish, &gpu).is_empty(), "{}: {:?}", text, drift(&wish, &gpu));
            carry_out(&mut gpu, &plan);
            prop_assert_eq!(drift(&wish, &gpu), Vec::<String>::new(), "{}", text);
        }
    }
}

#[test]
fn placements_of_the_fixtures_are_the_parts_own() {
    // Guards the helpers above: a fixture that no driver could show proves nothing.
    let mut gpu = host().remove(0);
    set(&mut gpu, &[("3g.40gb", 4, &[])]);
    assert_eq!(gpu.mig.unwrap().instances[0].placement, Placement { start: 4, size: 4 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// A saved host that was damaged is refused or planned on; it never brings anything down.
    #[test]
    fn damaged_saved_hosts_never_panic(figures in prop::collection::vec((0usize..600, 0u32..300), 1..4), which in 0usize..6) {
        let names = ["1g.10gb", "3g.40gb", "1c.3g.40gb*3", "7g.80gb", "none", "1g.10gb@4,2g.20gb"];
        let mut one = host().remove(0);
        set(&mut one, &[("3g.40gb", 4, &["1c.3g.40gb", "1c.3g.40gb"]), ("1g.10gb", 0, &[])]);
        let mut value = serde_json::to_value(&one).unwrap();
        for (at, figure) in figures {
            let mut left = at;
            replace_figure(&mut value, &mut left, figure);
        }
        let text = serde_json::to_vec(&value).unwrap();
        if let Ok(gpus) = preset::saved(&text, "host.json") {
            let layout = LayoutSource::Entries(vec![names[which].to_owned()]);
            let _ = plan_host(&Config::default(), &gpus, &request(&["all"], layout));
            let layout = Layout::parse(names[which]).ok();
            let wish = Wish { mode: Mode::Mig, rule: None, layout, configured: None };
            for gpu in &gpus {
                let _ = drift(&wish, gpu);
            }
        }
    }
}

/// Replaces one number somewhere in a document.
fn replace_figure(value: &mut serde_json::Value, left: &mut usize, figure: u32) {
    match value {
        serde_json::Value::Number(_) => {
            if *left == 0 {
                *value = figure.into();
            }
            *left = left.wrapping_sub(1);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(|item| replace_figure(item, left, figure)),
        serde_json::Value::Object(fields) => fields.values_mut().for_each(|field| replace_figure(field, left, figure)),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {}
    }
}

#[test]
fn mig_mode_goes_off_after_the_instances_and_takes_a_reset_on_ampere_alone() {
    let whole = |gpus: &[Gpu], config: &str| {
        let each = vec![GpuLayout { gpu: "0".to_owned(), mig: false, layout: Vec::new() }];
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
        plan_host(&Config::parse(config, "test").unwrap(), gpus, &request).map(|mut plans| plans.plans.remove(0))
    };
    for (preset, reset) in [("dgx-a100", true), ("a30x4", true), ("dgx-h100", false), ("dgx-b200", false)] {
        let gpus = preset::gpus(preset).unwrap();
        let plan = whole(&gpus, "").unwrap();
        assert!(plan.disables_mig && !plan.enables_mig && plan.error.is_none(), "{preset}: {plan:?}");
        assert_eq!(plan.reset.is_some(), reset, "{preset}");
    }
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    let services = "[mode_change]\nservices = [\"nvidia-dcgm\"]\nbefore = \"/x/y\"\n";
    let reset = whole(&gpus, services).unwrap().reset.unwrap();
    assert_eq!((reset.services, reset.hooks), (vec!["nvidia-dcgm".to_owned()], vec!["/x/y".to_owned()]));
    // Pending on, still off: taken back without a reset.
    let pending = |gpu: &mut Gpu, enabled, pending| {
        let mig = gpu.mig.as_mut().unwrap();
        (mig.enabled, mig.pending) = (enabled, pending);
    };
    pending(&mut gpus[0], false, true);
    let plan = whole(&gpus, "").unwrap();
    assert!(plan.disables_mig && plan.reset.is_none());
    pending(&mut gpus[0], false, false);
    let plan = whole(&gpus, "").unwrap();
    assert!(!plan.disables_mig && plan.steps.is_empty() && plan.error.is_none());
    pending(&mut gpus[0], true, true);
    gpus[0].processes.push(process(4711));
    let plan = whole(&gpus, "").unwrap();
    assert!(!plan.disables_mig && matches!(plan.refusal, Some(Refusal::Held { .. })));
    // What a rule calls unmanaged is not touched.
    gpus[0].processes.clear();
    let unmanaged = "[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\n";
    assert_eq!(whole(&gpus, unmanaged).unwrap_err().code, Code::Conflict);
    let exclusive = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n";
    assert!(whole(&gpus, exclusive).unwrap().disables_mig);
}

#[test]
fn what_is_reset_together_must_be_free_or_change_with_it() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    for gpu in &mut gpus {
        let mig = gpu.mig.as_mut().unwrap();
        (mig.enabled, mig.pending) = (false, false);
    }
    let config = Config::parse("[mode_change]\nreset_together = [\"0-1\", \"2-7\"]\n", "test").unwrap();
    let plan =
        |gpus: &[Gpu], which: &[&str]| plan_host(&config, gpus, &request(which, entries("7g.80gb"))).unwrap().plans;
    let alone = plan(&gpus, &["0"]);
    assert_eq!(alone[0].reset.as_ref().unwrap().together[0].uuid, gpus[1].uuid);
    gpus[1].processes.push(process(4711));
    let refused = plan(&gpus, &["0"]).remove(0);
    assert!(!refused.enables_mig && refused.reset.is_none() && refused.steps.is_empty());
    let error = refused.error.unwrap();
    assert_eq!(error.code, Code::Blocked);
    assert!(error.causes[0].contains("GPU 1") && error.causes[0].contains("is in use"), "{error:?}");
    gpus[1].processes.clear();
    assert!(plan(&gpus, &["0", "1"]).iter().all(|plan| plan.error.is_none() && plan.reset.is_some()));
    assert!(plan(&gpus, &["2"])[0].reset.as_ref().unwrap().together.len() == 5);
}
