//! Every refusal, from the layout that causes it to the message.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::fmt::Write;

use gpush_api::{ApiError, Code, ComputeInstance, GpuIndex, GpuInstance, Placement, Process, ProcessKind, Refusal};
use gpush_core::geometry::Geometry;
use gpush_core::layout::Layout;
use gpush_core::plan::{Target, plan};
use gpush_core::refusal::explain;

fn geometry(key: &str) -> Geometry {
    Geometry::of_model(&gpush_geometry::model(key).unwrap())
}

fn refuse(key: &str, layout: &str) -> Refusal {
    Target::resolve(&geometry(key), &Layout::parse(layout).unwrap()).unwrap_err()
}

/// Returns a GPU instance such as `3g.40gb@4`, with one compute instance that occupies the whole
/// GPU instance.
fn instance(geometry: &Geometry, id: u32, entry: &str) -> GpuInstance {
    let (name, start) = entry.split_once('@').unwrap();
    let profile = geometry.named(name).unwrap();
    let whole = profile.whole().unwrap();
    GpuInstance {
        id,
        profile_id: profile.profile.id,
        profile: name.to_owned(),
        placement: profile.spots.iter().find(|s| s.placement.start.to_string() == start).unwrap().placement,
        memory: None,
        compute: vec![compute(0, whole.profile.id, name, whole.spots[0].placement)],
        processes: Vec::new(),
    }
}

fn compute(id: u32, profile_id: u32, profile: &str, placement: Placement) -> ComputeInstance {
    ComputeInstance {
        id,
        profile_id,
        profile: profile.to_owned(),
        placement: Some(placement),
        uuid: None,
        processes: Vec::new(),
    }
}

fn process(pid: Option<u32>, user: Option<&str>, command: Option<&str>) -> Process {
    Process {
        pid,
        uid: None,
        user: user.map(str::to_owned),
        command: command.map(str::to_owned),
        kind: ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    }
}

fn text(error: &ApiError) -> String {
    let mut text = format!("{:?}: {}\n", error.code, error.message);
    for cause in &error.causes {
        writeln!(text, "  cause: {cause}").unwrap();
    }
    if let Some(hint) = &error.hint {
        writeln!(text, "  hint: {hint}").unwrap();
    }
    if error.retryable {
        text += "  retryable\n";
    }
    text
}

const GPU: &str = "GPU 0 (A100-SXM4-80GB)";

#[test]
fn impossible_layouts_name_the_smallest_reason() {
    let cases = [
        ("a100-80", "3g.20gb"),
        ("a100-80", "1g.5gb*7"),
        ("a100-80", "2g.20gb+me"),
        ("a100-80", "9g.100gb"),
        ("a100-80", "3c.4g.40gb"),
        ("a30-24", "3g.20gb"),
        ("a100-80", "2g.20gb@1"),
        ("a100-80", "3g.40gb@0, 1g.10gb@2"),
        ("a100-80", "1g.10gb@4, 1g.10gb@4"),
        ("a100-80", "3g.40gb*3"),
        ("a100-80", "1g.10gb*8"),
        ("a100-80", "4g.40gb*2"),
        ("a100-80", "3g.40gb*2, 1g.10gb"),
        ("a100-80", "7g.80gb, 1g.10gb"),
        ("a100-80", "1g.10gb+me*2"),
        ("rtxpro6000-96", "1g.24gb+me.all, 1g.24gb*2"),
        ("rtxpro6000-96", "1g.24gb+me, 2g.48gb+me.all"),
        ("a100-80", "4g.40gb, 2g.20gb@2"),
        ("a100-80", "1g.10gb, 2g.20gb*3, 1g.10gb"),
        ("a100-80", "3g.40gb@0, 1g.20gb*2, 2g.20gb"),
        ("a100-80", "2c.3g.40gb*3"),
        ("a100-80", "1c.3g.40gb*4, 2c.3g.40gb*2"),
        ("h100-80-sxm", "3c.7g.80gb*2, 1c.7g.80gb"),
        ("a100-80", "1c.4g.40gb@0*5"),
    ];
    let mut texts = String::new();
    for (key, layout) in cases {
        let error = explain(&refuse(key, layout), GpuIndex(0), &format!("GPU 0 ({key})"));
        writeln!(texts, "{layout}\n{}", text(&error)).unwrap();
    }
    println!("{} layouts", cases.len());
    insta::assert_snapshot!(texts);
}

#[test]
fn blocking_instances_are_named_with_holders() {
    let geometry = geometry("a100-80");
    let target = |layout: &str| Target::resolve(&geometry, &Layout::parse(layout).unwrap()).unwrap();
    let standing = || vec![instance(&geometry, 1, "3g.40gb@0"), instance(&geometry, 2, "3g.40gb@4")];
    let mut texts = String::new();
    let mut refuse = |about: &str, instances: &[GpuInstance], layout: &str| {
        let error = explain(&plan(&geometry, instances, &target(layout)).unwrap_err(), GpuIndex(0), GPU);
        assert_eq!(error.code, Code::Blocked);
        writeln!(texts, "{about}: {layout}\n{}", text(&error)).unwrap();
    };

    let mut one = standing();
    one[0].compute[0].processes.push(process(Some(4711), Some("alice"), Some("python train.py")));
    refuse("one in use", &one, "7g.80gb");
    assert!(plan(&geometry, &one, &target("3g.40gb, 2g.20gb")).is_ok());
    refuse("one in use, not as wanted", &one, "4g.40gb");

    let mut both = one.clone();
    both[1].compute[0].processes.push(process(Some(4712), None, None));
    both[1].compute[0].processes.push(process(None, None, None));
    refuse("both in use, one is enough to stop", &both, "3g.40gb, 2g.20gb");
    refuse("both in use", &both, "7g.80gb");

    let mut split = standing();
    split[1].compute = vec![
        compute(0, 0, "1c.3g.40gb", Placement { start: 0, size: 1 }),
        compute(1, 0, "1c.3g.40gb", Placement { start: 1, size: 1 }),
    ];
    split[1].compute[1].processes.push(process(Some(99), Some("bob"), None));
    refuse("a compute instance in use", &split, "3g.40gb*2");

    let h100 = self::geometry("h100-80-sxm");
    let mut small = vec![instance(&h100, 3, "1g.20gb@0"), instance(&h100, 4, "1g.20gb@2")];
    small[0].compute[0] = compute(0, 0, "1c.1g.20gb", Placement { start: 0, size: 1 });
    small[0].compute[0].processes.push(process(Some(7), Some("dave"), Some("./fold")));
    let whole = Target::resolve(&h100, &Layout::parse("1g.20gb*4").unwrap()).unwrap();
    let error = explain(&plan(&h100, &small, &whole).unwrap_err(), GpuIndex(0), "GPU 0 (H100)");
    let small_in_use =
        format!("the smaller compute instance of a double-memory 1g in use: 1g.20gb*4\n{}", text(&error));

    let mut charged = standing();
    charged[1].processes.push(process(Some(5), Some("carol"), Some("./sim")));
    refuse("a process that is in the GPU instance, who knows where", &charged, "7g.80gb");
    charged[1].compute.clear();
    refuse("the same without a compute instance", &charged, "3g.40gb*2");
    writeln!(texts, "{small_in_use}").unwrap();
    insta::assert_snapshot!(texts);
}

#[test]
fn mode_refusals_have_hints() {
    let mut texts = String::new();
    for refusal in [Refusal::Reboot { enables: true }, Refusal::Reboot { enables: false }, Refusal::NoMig] {
        texts += &text(&explain(&refusal, GpuIndex(0), GPU));
    }
    insta::assert_snapshot!(texts);
}
