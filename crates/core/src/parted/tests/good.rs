//! Valid files in every notation, and the layouts that they give to the GPUs of a host.

use super::*;
use gpush_api::GpuIndex;

/// Several labels, which together use every feature of the format.
const FEATURES: &str = r#"
# a comment
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false

  all-disabled-explicit:
    - devices: all
      mig-enabled: false
      mig-devices: {}

  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}

  all-1g.10gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 7

  unquoted:
  - devices: all
    mig-enabled: true
    mig-devices:
      1g.10gb: 2
      2G.20GB: 1

  media:
    - devices: all
      mig-enabled: yes
      mig-devices:
        "1g.10gb+me": 1

  graphics:
    - device-filter: "0x2bb510de"
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.24gb+gfx": 1
        "1g.24gb+me.all": 1
        "1g.24gb-me": 2

  shared:
    - devices: [0]
      mig-enabled: true
      mig-devices:
        "1c.3g.40gb": 3
        "3c.3g.40gb": 1

  custom:
    - devices: [0,1,2,3]
      mig-enabled: false
    - devices: [4, 4]
      mig-enabled: true
      mig-devices: {"1g.10gb": 7}
    - devices:
        - 5
      mig-enabled: true
      mig-devices: {"2g.20gb": 3}

  balanced:
    - device-filter: ["0x233010DE", "0x233110DE:0x162610DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    - device-filter: []
      devices: [7]
      mig-enabled: false
"#;

#[test]
fn every_format_feature_is_accepted() {
    let file = file(FEATURES);
    let names: Vec<&str> = file.labels.iter().map(|label| label.name.as_str()).collect();
    assert_eq!(names.len(), 10, "{names:?}");
    let group = |label: &str, n: usize| file.select(Some(label)).unwrap().groups[n].clone();
    let layout = |text: &str| DesiredMode::On(Layout::parse(text).unwrap());
    assert_eq!(group("all-disabled", 0).want, DesiredMode::Off);
    assert_eq!(group("all-disabled-explicit", 0), Group { line: 10, ..group("all-disabled", 0) });
    assert_eq!(group("all-enabled", 0).want, DesiredMode::On(Layout::none()));
    assert_eq!(group("all-1g.10gb", 0).want, layout("1g.10gb*7"));
    assert_eq!(group("unquoted", 0).want, layout("1g.10gb*2,2g.20gb"));
    assert_eq!(group("media", 0).want, layout("1g.10gb+me"));
    assert_eq!(group("graphics", 0).want, layout("1g.24gb+gfx,1g.24gb+me.all,1g.24gb-me*2"));
    assert_eq!(group("graphics", 0).filter, [DeviceId { id: 0x2bb5_10de, subsystem: None }]);
    assert_eq!(group("shared", 0).want, layout("1c.3g.40gb*3,3c.3g.40gb"));
    assert_eq!(group("custom", 1).devices, Devices::Listed(vec![GpuIndex(4)]));
    assert_eq!(group("custom", 2).devices, Devices::Listed(vec![GpuIndex(5)]));
    assert_eq!(group("balanced", 0).filter[1].to_string(), "0x233110DE:0x162610DE");
    assert_eq!(group("balanced", 1).filter, []);
    assert_eq!(group("balanced", 1).line, 70);
}

#[test]
fn anchors_merges_json_and_crlf_are_accepted() {
    let plain = only(&label("    - devices: all\n      mig-enabled: true\n      mig-devices: {\"1g.10gb\": 7}\n"));
    let same = [
        "{\"version\": \"v1\", \"mig-configs\": {\"x\": [{\"devices\": \"all\", \"mig-enabled\": true, \"mig-devices\": {\"1g.10gb\": 7}}]}}",
        "\u{feff}---\r\nversion: v1\r\nmig-configs:\r\n  x:\r\n  - devices: all\r\n    mig-enabled: true\r\n    mig-devices:\r\n      1g.10gb: 7\r\n",
        "version: v1\nmig-configs:\n  x:\n    - devices: all\n      mig-enabled: true\n      mig-devices: &all\n        1g.10gb: 7\n",
    ];
    for text in same {
        assert_eq!(only(text).groups[0].want, plain.groups[0].want, "{text}");
    }
    let shared = "version: v1\nmig-configs:\n  a: &a\n    - &one\n      devices: all\n      mig-enabled: true\n      mig-devices: {1g.10gb: 7}\n  b: *a\n  c:\n    - <<: *one\n      devices: [3]\n";
    let file = file(shared);
    assert_eq!(file.labels[0].groups, file.labels[1].groups);
    assert_eq!(
        file.labels[2].groups[0].devices,
        Devices::Listed(vec![GpuIndex(3)]),
        "the label's key overrides a merged one"
    );
    assert_eq!(file.labels[2].groups[0].want, plain.groups[0].want);
}

#[test]
fn label_gives_layouts_to_its_gpus() {
    // GPUs 0-3 are A100-80, and GPUs 4-7 are other models. A filter matches models, and a list
    // contains indexes of the host.
    let host = preset::gpus("mixed").unwrap();
    let id = |at: usize| host[at].pci_id.clone().unwrap();
    let other = host.iter().position(|gpu| gpu.pci_id != host[0].pci_id).unwrap();
    let text = label(&format!(
        "    - device-filter: \"{}\"\n      devices: all\n      mig-enabled: true\n      mig-devices: {{1g.10gb: 7}}\n    \
         - device-filter: [\"{}\", \"0x1FB010DE\"]\n      devices: [{other}]\n      mig-enabled: false\n",
        id(0),
        id(other).to_lowercase(),
    ));
    let mut expected: Vec<String> =
        (0..host.len()).filter(|at| id(*at) == id(0)).map(|at| format!("{at} 1g.10gb*7")).collect();
    expected.push(format!("{other} off"));
    expected.sort();
    assert_eq!(meant(&text, &host).unwrap(), expected);
}

/// The import wrote product names instead of the ids. One id has boards with several names, so rules claimed no GPU.
#[test]
fn imported_rule_claims_the_gpus_of_its_filter() {
    let mut tried = 0;
    for key in gpush_geometry::KEYS {
        let model = gpush_geometry::model(key).unwrap();
        if !model.has_mig() {
            continue;
        }
        for board in &model.boards {
            let mut gpu = preset::gpu(&model, GpuIndex(0));
            gpu.name = board.product.clone();
            gpu.pci_id = Some(format!("0x{}10DE", board.device_id));
            gpu.pci_subsystem = board.subsystem_id.as_ref().map(|id| format!("0x{id}10DE"));
            let subsystem = gpu.pci_subsystem.as_ref().map(|id| format!("0x{}10DE:{id}", board.device_id));
            for filter in gpu.pci_id.iter().chain(&subsystem) {
                let imported = imported(filter);
                let names = format!("# {filter}: ");
                let names = imported.text.lines().find_map(|line| line.strip_prefix(&names)).unwrap_or_default();
                assert!(names.split(", ").any(|name| name == board.product), "{filter}: {}", imported.text);
                let config = Config::parse(&imported.text, "x").unwrap();
                let states = crate::desired::desired_states(&config, std::slice::from_ref(&gpu));
                assert!(states[0].layout.is_some(), "{filter} {}: {}", board.product, imported.text);
                tried += 1;
            }
        }
    }
    assert!(tried > 50, "{tried}");
    assert!(imported("0x234210DE").text.contains("# 0x234210DE: NVIDIA GH200 120GB, NVIDIA GH200 480GB\n"));
    assert!(imported("0x232410DE").text.contains("# 0x232410DE: NVIDIA H800\n"));
    let unknown = imported("0xABCD10DE");
    assert!(unknown.text.contains("match = [\"0xABCD10DE\"]") && unknown.remarks.is_empty(), "{unknown:?}");
}

fn imported(filter: &str) -> Imported {
    let groups = format!(
        "    - device-filter: \"{filter}\"\n      devices: all\n      mig-enabled: true\n      mig-devices: {{}}\n"
    );
    let file = file(&label(&groups));
    import(&file, Some(file.select(None).unwrap()))
}

#[test]
fn last_group_for_a_gpu_counts() {
    let host = preset::gpus("a30x4").unwrap();
    let text = label(
        "    - devices: all\n      mig-enabled: true\n      mig-devices: {1g.6gb: 2, 2g.12gb: 1}\n    - devices: [1]\n      \
         mig-enabled: true\n      mig-devices: {1g.6gb: 4}\n    - devices: [3, 1]\n      mig-enabled: false\n",
    );
    let expected = ["0 1g.6gb*2,2g.12gb", "1 off", "2 1g.6gb*2,2g.12gb", "3 off"];
    assert_eq!(meant(&text, &host).unwrap(), expected);
    // In a config, the first matching rule applies. In a mig-parted file, the last matching group
    // applies. Nevertheless, the import creates equivalent rules.
    let file = file(&text);
    let imported = import(&file, Some(file.select(None).unwrap()));
    let config = Config::parse(&imported.text, "x").unwrap_or_else(|errors| panic!("{errors}\n{}", imported.text));
    let desired_states: Vec<String> = crate::desired::desired_states(&config, &host)
        .iter()
        .enumerate()
        .map(|(at, desired_state)| {
            format!("{at} {}", desired_state.layout.as_ref().map_or("off".to_owned(), Layout::to_string))
        })
        .collect();
    assert_eq!(desired_states, expected);
    assert!(imported.remarks.iter().any(|remark| remark.contains("later groups select")), "{:?}", imported.remarks);
}

/// A group with `devices: all` configures only the GPUs that support MIG, as in mig-parted.
#[test]
fn group_for_all_gpus_skips_those_without_mig() {
    let host = preset::gpus("mixed").unwrap();
    let (on, off) = ("mig-enabled: true\n      mig-devices: {}", "mig-enabled: false");
    let group = |devices: &str, want: &str| format!("    - devices: {devices}\n      {want}\n");
    let resolved = |groups: &str, only: &[&str]| {
        let file = file(&label(groups));
        let only: Vec<String> = only.iter().map(|one| (*one).to_owned()).collect();
        resolve(&file, file.select(None).unwrap(), &host, &only)
    };
    let all = resolved(&group("all", on), &[]).unwrap();
    assert_eq!(
        all.layouts.iter().map(|one| one.gpu.as_str()).collect::<Vec<_>>(),
        host[..4].iter().map(|g| g.uuid.as_str()).collect::<Vec<_>>()
    );
    let left_out = [
        "GPU 4 (NVIDIA L4) is left out: it does not support MIG",
        "GPU 5 (Tesla T4) is left out: it does not support MIG",
    ];
    assert_eq!(all.remarks, left_out);

    // GPUs that are listed or selected explicitly are not skipped. The plans of these GPUs report
    // the problem.
    let listed = resolved(&group("[0, 4]", on), &[]).unwrap();
    assert_eq!((listed.layouts.len(), listed.remarks.len()), (2, 0));
    let selected = resolved(&group("all", on), &["0,4"]).unwrap();
    assert_eq!((selected.layouts.len(), selected.remarks.len()), (2, 0));
    // A group that turns MIG off also configures GPUs without MIG. If several groups match a GPU,
    // the last one applies.
    assert_eq!(resolved(&group("all", off), &[]).unwrap().layouts.len(), 6);
    let both = resolved(&(group("all", on) + &group("[4]", off)), &[]).unwrap();
    assert_eq!(
        (both.layouts.len(), both.remarks.as_slice()),
        (5, &["GPU 5 (Tesla T4) is left out: it does not support MIG".to_owned()][..])
    );

    let l4 = host[4].pci_id.as_deref().unwrap();
    let only_l4 = format!("    - device-filter: \"{l4}\"\n      devices: all\n      {on}\n");
    let error = resolved(&only_l4, &[]).unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (gpush_api::Code::Unsupported, "label `x` configures no GPU: no GPU that it selects supports MIG")
    );
}

/// If a GPU cannot be read, its data shows no MIG, but the GPU may support MIG.
#[test]
fn group_for_all_gpus_keeps_unreadable_ones() {
    let mut host = preset::gpus("dgx-a100").unwrap();
    for (gpu, state) in host.iter_mut().zip([GpuState::Unknown, GpuState::Lost, GpuState::Maintenance, GpuState::Ready])
    {
        (gpu.mig, gpu.state) = (None, state);
    }
    let file = file(&label("    - devices: all\n      mig-enabled: true\n      mig-devices: {}\n"));
    let resolved = resolve(&file, file.select(None).unwrap(), &host, &[]).unwrap();
    assert_eq!((resolved.layouts.len(), resolved.remarks.len()), (7, 1));
}

#[test]
fn selectors_limit_the_gpus() {
    let host = preset::gpus("dgx-a100").unwrap();
    let file = file(FEATURES);
    let label = file.select(Some("custom")).unwrap();
    let some = resolve(&file, label, &host, &["4-5".to_owned()]).unwrap().layouts;
    assert_eq!(
        some.iter().map(|one| one.gpu.as_str()).collect::<Vec<_>>(),
        [host[4].uuid.as_str(), host[5].uuid.as_str()]
    );
    let error = resolve(&file, label, &host, &["5-6".to_owned()]).unwrap_err();
    assert_eq!(error.message, "label `custom` has no group for GPU 6");
}

#[test]
fn desired_state_includes_mig_mode() {
    let mut host = preset::gpus("dgx-a100").unwrap();
    for (at, (enabled, pending)) in [(true, true), (false, false), (true, false), (false, true)].into_iter().enumerate()
    {
        let mig = host[at].mig.as_mut().unwrap();
        mig.set_mode(enabled, pending);
    }
    host[4].mig = None;
    let plans = |mig: bool| {
        let each =
            host[..5].iter().map(|gpu| GpuLayout { gpu: gpu.uuid.to_string(), mig, layout: Vec::new() }).collect();
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
        plan_host(&Config::default(), &host, &request).unwrap().plans
    };
    let wanted = |plan: &gpush_api::GpuPlan| plan.error.is_none() && plan.is_empty();
    assert_eq!(plans(false).iter().map(wanted).collect::<Vec<_>>(), [false, true, false, false, true]);
    // With `mig-devices: {}`, a GPU with MIG mode off needs a change. With the layout `none`, it
    // needs no change. If MIG mode is on, but a reset would disable it, MIG mode is set again.
    assert_eq!(plans(true).iter().map(wanted).collect::<Vec<_>>(), [true, false, false, false, false]);
    assert_eq!((plans(true)[2].mig_mode(), plans(true)[2].reset()), (Some(true), None));
    let off: Vec<_> =
        plans(false).iter().map(|plan| (plan.mig_mode() == Some(false), plan.reset().is_some())).collect();
    // If a mode change is only pending, cancelling it needs no reset.
    assert_eq!(off, [(true, true), (false, false), (true, true), (true, false), (false, false)]);
}

#[test]
fn invalid_requests_per_gpu_are_refused() {
    let host = preset::gpus("a30x4").unwrap();
    let one = |gpu: &str, mig: bool, layout: &[&str]| GpuLayout {
        gpu: gpu.to_owned(),
        mig,
        layout: layout.iter().map(|entry| (*entry).to_owned()).collect(),
    };
    let cases = [
        (vec![], "the request names no GPU"),
        (vec![one("0", true, &[]), one(host[0].uuid.as_str(), true, &[])], "is named twice"),
        (vec![one("0-1", true, &[])], "`0-1` does not name exactly one GPU"),
        (vec![one("9", true, &[])], "no GPU 9"),
        (vec![one("0", false, &["1g.6gb"])], "cannot have MIG instances with MIG mode off"),
        (vec![one("0", true, &["x"])], "is not a MIG profile"),
        (vec![one("0", true, &[]); 5], "the request names 5 GPUs, but the host has 4"),
    ];
    for (each, says) in cases {
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
        let error = plan_host(&Config::default(), &host, &request).expect_err(says);
        assert!(error.message.contains(says), "{}", error.message);
    }
    let request =
        PlanRequest { gpus: vec!["0".to_owned()], layout: LayoutSource::PerGpu(vec![one("0", true, &["1g.6gb"])]) };
    assert!(plan_host(&Config::default(), &host, &request).unwrap_err().message.contains("names GPUs twice"));
}

#[test]
fn exclusive_rule_refuses_instances_and_allows_mig_off() {
    let host = preset::gpus("a30x4").unwrap();
    let config = Config::parse("[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n", "c").unwrap();
    let ask = |mig: bool| {
        let layout = if mig { vec!["1g.6gb".to_owned()] } else { Vec::new() };
        let each = vec![GpuLayout { gpu: "0".to_owned(), mig, layout }];
        plan_host(&config, &host, &PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) })
    };
    assert!(ask(true).unwrap_err().message.contains("mode `exclusive`"));
    assert!(ask(false).is_ok());
}

#[test]
fn lost_gpu_makes_indexes_ambiguous() {
    let mut host = preset::gpus("dgx-a100").unwrap();
    host[3].state = GpuState::Lost;
    host[3].mig = None;
    // After the loss, the driver gives new indexes to the GPUs after the lost GPU.
    for (at, gpu) in host.iter_mut().enumerate().skip(4) {
        gpu.index = GpuIndex(u32::try_from(at - 1).unwrap());
    }
    let group = |devices: &str| {
        label(&format!("    - devices: {devices}\n      mig-enabled: true\n      mig-devices: {{1g.10gb: 7}}\n"))
    };
    assert_eq!(meant(&group("[0, 2]"), &host).unwrap(), ["0 1g.10gb*7", "2 1g.10gb*7"]);
    let error = meant(&group("[2, 5]"), &host).unwrap_err();
    assert_eq!(error.message, "parted.yaml:4: index 5 is ambiguous while GPU 3 is lost");
    assert!(meant(&group("[7]"), &host).unwrap_err().message.contains("there is no GPU 7"));
    assert_eq!(meant(&group("all"), &host).unwrap().len(), 8, "the plan of the lost one says that it is lost");
}

#[test]
fn import_gives_equivalent_config() {
    let file = file(FEATURES);
    let mut shown = String::new();
    for label in [None].into_iter().chain(file.labels.iter().map(Some)) {
        let imported = import(&file, label);
        if let Err(errors) = Config::parse(&imported.text, "imported.toml") {
            panic!("{errors}\n{}", imported.text);
        }
        shown += &format!("### {}\n{}", label.map_or("all", |label| &label.name), imported.text);
        shown += &imported.remarks.iter().map(|remark| format!("note: {remark}\n")).collect::<String>();
    }
    insta::assert_snapshot!(shown);
}
