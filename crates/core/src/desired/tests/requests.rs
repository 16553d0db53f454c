//! Which GPUs a request selects, and why requests are refused.

use super::*;
use gpush_api::GpuIndex;

#[test]
fn request_without_selector_means_gpus_claimed_for_mig() {
    let plans = plan_host(&config(), &host(), &PlanRequest::default()).unwrap().plans;
    let shown: Vec<(GpuIndex, String, usize)> =
        plans.iter().map(|p| (p.gpu, p.layout.join(","), p.steps.len())).collect();
    let expected = [(0, "3g.40gb*2", 4), (1, "3g.40gb*2", 4), (2, "3g.40gb,1c.3g.40gb*3", 6), (5, "none", 0)];
    assert_eq!(shown, expected.map(|(gpu, layout, steps)| (GpuIndex(gpu), layout.to_owned(), steps)));
    // If a request with a layout names no GPU, it applies to the same GPUs as a request without a
    // layout.
    let plans = plan_host(&config(), &host(), &request(&[], entries("7g.80gb"))).unwrap().plans;
    assert_eq!(plans.iter().map(|p| p.gpu).collect::<Vec<_>>(), [0, 1, 2, 5]);
}

#[test]
fn named_layouts_and_entries_apply_to_unclaimed_gpus() {
    let named = LayoutSource::Named("halves".to_owned());
    let plan = one(&config(), &host(), &request(&["7"], named));
    assert_eq!((plan.gpu, plan.layout.join(",").as_str(), plan.steps.len()), (GpuIndex(7), "3g.40gb*2", 4));
    let plan = one(&Config::default(), &host(), &request(&["7"], entries("3G.40GB")));
    assert_eq!((plan.layout.join(",").as_str(), plan.steps.len()), ("3g.40gb", 2));
    let none = LayoutSource::Named("none".to_owned());
    let mut host = host();
    set(&mut host[7], &[("3g.40gb", 4, &[])]);
    let plan = one(&Config::default(), &host, &request(&["7"], none));
    assert_eq!((plan.layout.join(",").as_str(), plan.steps.len()), ("none", 2));
}

/// `gpushctl apply` handles every mode but `unmanaged`, and a layout needs mode `mig` or no rule. A
/// hint prefers GPUs that the request names.
#[test]
fn hint_names_other_gpus_in_a_command_that_works() {
    let hint = |gpus: &[&str], layout| plan_host(&config(), &host(), &request(gpus, layout)).unwrap_err().hint.unwrap();
    let apply = |gpus: &[&str]| hint(gpus, LayoutSource::Wanted);
    assert!(apply(&["4"]).starts_with("choose other GPUs: `gpushctl apply 0-3,5` (administrator); or "));
    assert!(apply(&["2-5"]).starts_with("choose other GPUs: `gpushctl apply 2-3,5` (administrator); or "));
    let layout = hint(&["4"], entries("1G.10gb*2"));
    assert!(
        layout.starts_with("choose other GPUs: `gpushctl mig apply --dry-run '1g.10gb*2' -g 0-2,5-7`; or "),
        "{layout}"
    );
    // Fault: the proposed rule had another layout than the request.
    assert!(layout.contains("layout = [\"1g.10gb*2\"])"), "{layout}");
    let each = |layout: &[&str]| {
        let layout = layout.iter().map(|entry| (*entry).to_owned()).collect();
        LayoutSource::PerGpu(vec![GpuLayout { gpu: "4".to_owned(), mig: true, layout }])
    };
    let one = hint(&[], each(&["3g.40gb"]));
    assert!(one.starts_with("choose other GPUs: `gpushctl mig list 0-2,5-7` shows their instances; or "), "{one}");
    let mut off = host();
    for gpu in &mut off[4..6] {
        gpu.mig.as_mut().unwrap().enabled = false;
    }
    let error = plan_host(&config(), &off, &request(&[], each(&[]))).unwrap_err();
    assert_eq!(error.message, "cannot enable MIG mode on GPU 4: rule 4 of the config sets the mode `unmanaged`");
    let on = error.hint.unwrap();
    assert!(on.starts_with("choose other GPUs: `gpushctl mig on 5` (administrator); or "), "{on}");
}

/// Earlier fault: the hint of `mig off` named a rule of mode `mig`, and the first line did not say what failed.
#[test]
fn mig_off_of_an_unmanaged_gpu_names_the_rule_to_change() {
    let off = |gpus: &[Gpu], index: &str| {
        let each = vec![GpuLayout { gpu: index.to_owned(), mig: false, layout: Vec::new() }];
        plan_host(&config(), gpus, &request(&[], LayoutSource::PerGpu(each)))
    };
    let error = off(&host(), "4").unwrap_err();
    assert_eq!(error.message, "cannot disable MIG mode on GPU 4: rule 4 of the config sets the mode `unmanaged`");
    let hint = error.hint.unwrap();
    assert!(
        hint.starts_with("remove the GPU from rule 4 of the config, then run ") && !hint.contains("layout"),
        "{hint}"
    );
    let mut host = host();
    set(&mut host[0], &[("3g.40gb", 4, &[])]);
    host[0].mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(4711));
    let error = off(&host, "0").unwrap().plans.remove(0).error.unwrap();
    assert_eq!(error.message, "cannot disable MIG mode on GPU 0: 3g.40gb@4 is in use");
}

/// Earlier fault: gpushd refused a layout for a GPU whose rule has a mode other than `mig`, although the layout changed
/// nothing.
#[test]
fn exported_layout_is_planned_in_every_mode() {
    let mut host = host();
    for gpu in &mut host[3..5] {
        set(gpu, &[("3g.40gb", 4, &[])]);
    }
    for index in ["3", "4"] {
        let each = |entry: &str| {
            let layout = vec![entry.to_owned()];
            LayoutSource::PerGpu(vec![GpuLayout { gpu: index.to_owned(), mig: true, layout }])
        };
        let plan = one(&config(), &host, &request(&[], each("3g.40gb@4")));
        assert!(plan.error.is_none() && plan.steps.is_empty(), "{plan:?}");
        for other in [request(&[index], entries("3g.40gb@0")), request(&[], each("7g.80gb"))] {
            assert_eq!(plan_host(&config(), &host, &other).unwrap_err().code, Code::Conflict);
        }
    }
    let same = |index: &str| plan_host(&config(), &host, &request(&[index], entries("3g.40gb")));
    assert!(same("4").unwrap().plans[0].steps.is_empty(), "unmanaged");
    assert_eq!(same("3").unwrap_err().code, Code::Conflict, "the rule sets the mode `exclusive`");
}

#[test]
fn hint_for_a_cordoned_gpu_keeps_the_whole_selection() {
    let mut host = host();
    host[1].state = GpuState::Cordoned;
    let plans = plan_host(&config(), &host, &request(&[], entries("1g.10gb"))).unwrap().plans;
    let hint = plans.into_iter().find_map(|plan| plan.error).unwrap().hint.unwrap();
    assert!(hint.starts_with("to include this GPU, name all GPUs of the request with `--gpu 0-2,5`, or "), "{hint}");
}

/// Earlier fault: gpushd ignored `:mps` on a GPU without a rule, and with `--once`.
#[test]
fn mps_entries_without_effect_are_refused() {
    let check = |index: &str, layout: &str, once| {
        let request = request(&[index], entries(layout));
        let plans = plan_host(&config(), &host(), &request).unwrap().plans;
        check_mps_entries(&config(), &host(), &request, &plans, once).map_err(|error| error.message)
    };
    assert_eq!(
        check("7", "1c.3g.40gb*2:mps", false).unwrap_err(),
        "cannot share 1c.3g.40gb of GPU 7 through MPS: no rule of the config claims the GPU"
    );
    assert_eq!(check("7", "3g.40gb", false), Ok(()));
    assert_eq!(check("0", "3g.40gb:mps,3g.40gb", false), Ok(()), "makes an override");
    assert_eq!(
        check("0", "3g.40gb:mps,3g.40gb", true).unwrap_err(),
        "cannot share 3g.40gb of GPU 0 through MPS: the layout is applied only once, and the desired layout does not \
         share this MIG device"
    );
    let shared =
        Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb:mps\"]\n", "test").unwrap();
    let request = request(&["0"], entries("3g.40gb@4:mps,1g.10gb"));
    let plans = plan_host(&shared, &host(), &request).unwrap().plans;
    assert!(check_mps_entries(&shared, &host(), &request, &plans, true).is_ok(), "the rule shares it");
}

#[test]
fn wrong_requests_are_refused_with_their_codes() {
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
            // A GPU in a bad state gets no plan, but the other GPUs get plans.
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
    // A request that names a degraded GPU is allowed.
    assert!(one(&config, &host, &request(&["1"], LayoutSource::Config)).error.is_none());
    assert!(plan_host(&empty, &[], &PlanRequest::default()).unwrap_err().message.contains("no GPU"));
}

/// Returns the text between the first `start` and the next `end`.
fn between<'t>(text: &'t str, start: &str, end: &[char]) -> Option<&'t str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split(end).next().unwrap_or(rest))
}

#[test]
fn commands_in_hints_work_for_their_gpu() {
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
    let mut host = preset::gpus("mixed").unwrap();
    // Without instances, the layout `none` would change nothing, and would not be refused.
    for gpu in host.iter_mut().filter(|gpu| gpu.mig.is_some()) {
        let first = gpu.mig.as_ref().unwrap().profiles[0].clone();
        set(gpu, &[(&first.name, first.placements[0].start, &[])]);
    }
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
                let plan = between(&hint, "`gpushctl mig apply --dry-run ", &['`'])
                    .and_then(|command| command.split_once(" -g "));
                let others = between(&hint, "`gpushctl apply ", &['`']);
                if let Some(others) = others {
                    let plans = plan_host(&config, &host, &request(&[others], LayoutSource::Wanted));
                    let plans = plans.unwrap_or_else(|e| panic!("{hint}: {e:?}")).plans;
                    assert!(plans.iter().all(|plan| plan.error.is_none()), "{hint}: {plans:?}");
                    named += 1;
                }
                let others = between(&hint, "--gpu ", &[' ', ';', '`']).map(|others| ("none", others));
                if let Some((entries, others)) = plan.or(others) {
                    let plans = plan_host(&config, &host, &request(&[others], entries_or_none(entries)));
                    let plans = plans.unwrap_or_else(|e| panic!("{hint}: {e:?}")).plans;
                    assert!(plans.iter().all(|plan| plan.error.is_none()), "{hint}: {plans:?}");
                    named += 1;
                }
                // If several GPUs block the request, the hint names the first of them.
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
fn refused_gpu_does_not_affect_plans_of_others() {
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
fn blocked_plan_still_shows_its_layout() {
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
fn gpu_with_unknown_users_keeps_its_instances() {
    let mut gpu = host().remove(0);
    let idle = instance(&gpu, 1, "3g.40gb", 0, &[]);
    gpu.mig.as_mut().unwrap().instances = vec![idle];
    gpu.processes_known = false;
    (gpu.reasons, gpu.processes_error) = (vec!["op-2 is changing it".to_owned()], Some("no list".to_owned()));
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
    // Older versions do not output the field `processes_known`. If the field is missing, it is read
    // as true.
    let mut json = serde_json::to_value(&gpu).unwrap();
    assert_eq!(json.as_object_mut().unwrap().remove("processes_known"), Some(serde_json::json!(false)));
    assert!(serde_json::from_value::<Gpu>(json).unwrap().processes_known);
}

#[test]
fn sharing_changes_no_instances() {
    let config = Config::parse("[layouts]\nshared = [\"3g.40gb:mps\", \"1c.2g.20gb:mps\", \"1c.2g.20gb\"]\n", "test");
    let config = config.unwrap();
    let plan = |layout| plan_host(&config, &host(), &request(&["0"], layout)).unwrap().plans.remove(0);
    let shared = plan(LayoutSource::Named("shared".to_owned()));
    let plain = plan(entries("3g.40gb,1c.2g.20gb*2"));
    assert!(shared.error.is_none() && shared.refusal.is_none() && !shared.steps.is_empty());
    assert_eq!(shared.steps, plain.steps);
    assert_eq!(shared.layout, ["3g.40gb:mps", "1c.2g.20gb:mps", "1c.2g.20gb"]);
    let each = vec![GpuLayout { gpu: "0".to_owned(), mig: true, layout: vec!["2g.20gb*3:mps".to_owned()] }];
    let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
    let plan = plan_host(&config, &host(), &request).unwrap().plans.remove(0);
    assert_eq!((plan.steps.len(), plan.layout), (6, vec!["2g.20gb*3:mps".to_owned()]));
}
