//! Double-memory `1g` GPU instances. On Hopper and later, they offer two compute profiles.
//! mig-parted and the DRA driver create compute profile 0 (`1c.1g.20gb`). Unless a request names
//! `1c.1g.20gb`, gpush creates compute profile 7 (`1g.20gb`).

use std::{
    collections::BTreeSet,
    io::Write,
    path::Path,
    process::{Command, Output, Stdio},
};

use gpush_geometry::{Architecture, Model};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::{Host, program},
    tools::{client_script, python_program},
};
use serde_json::Value;

fn gpushctl(agent: &Agent, args: &[&str], stdin: &str) -> Output {
    let mut command = Command::new(program("gpushctl"));
    command.args(args).env_clear().env("LANG", "C.UTF-8").env("GPUSH_SOCKET", agent.socket());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("gpushctl can be started");
    // Ignore an error: a command that does not read its standard input may end before this write.
    let _ = child.stdin.take().expect("a pipe").write_all(stdin.as_bytes());
    child.wait_with_output().expect("gpushctl ends")
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("gpushctl ends by itself")
}

/// Returns the labels that mig-parted ships for a GPU model, in the form of
/// `tests/clients/mig_parted.py`: for each profile its maximum number of instances, and the
/// balanced label.
fn labels(model: &Model) -> Vec<String> {
    let mut labels: Vec<String> = model.gi_profiles.iter().map(|p| format!("{}={}", p.name, p.max)).collect();
    let of = |slices: u8| model.gi_profiles.iter().find(|p| p.slices == slices).map(|p| p.name.clone());
    let (one, two) = (of(1).expect("a 1g profile"), of(2).expect("a 2g profile"));
    labels.push(match of(3) {
        Some(three) => format!("{one}=2,{two}=1,{three}=1"),
        None => format!("{one}=2,{two}=1"),
    });
    labels
}

/// Returns the double-memory `1g` profile of a GPU model.
fn double_memory(model: &Model) -> Option<&str> {
    model.gi_profiles.iter().find(|p| p.index == 9).map(|p| p.name.as_str())
}

/// Creates the devices of each label one after the other, as mig-parted does. Keeps only the
/// devices of the last label. Returns the compute profiles that each label used.
fn mig_parted(host: &Host, python: &Path, gpu: usize, labels: &[String]) -> Vec<Vec<u64>> {
    let output = host
        .command(python)
        .arg(client_script("mig_parted.py"))
        .arg(gpu.to_string())
        .args(labels)
        .output()
        .expect("python starts");
    assert!(output.status.success(), "{labels:?}: {}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("text");
    let profiles = |line: &str| -> Vec<u64> {
        let made: Value = serde_json::from_str(line).expect("JSON");
        made.as_array().expect("devices").iter().map(|device| device[2].as_u64().expect("a profile id")).collect()
    };
    lines.lines().map(profiles).collect()
}

/// Returns descriptions of hosts: one for each GPU model with MIG, and one with several models.
fn hosts() -> Vec<String> {
    let models = gpush_geometry::KEYS.iter().filter(|key| gpush_geometry::model(key).expect("a model").has_mig());
    let one_gpu = models.map(|key| format!("[[gpu]]\nmodel = \"{key}\"\n"));
    one_gpu.chain(["mixed".to_owned()]).collect()
}

fn model_of(host: &Host, gpu: usize) -> Model {
    let key = host.show()["gpus"][gpu]["model"].as_str().expect("a model").to_owned();
    gpush_geometry::model(&key).expect("a known model")
}

#[test]
fn mig_parted_labels_apply_on_every_model() {
    let Some(python) = python_program("python") else { return };
    let (mut hosts_tried, mut labels_tried, mut double_memory_hosts) = (0, 0, 0);
    for description in hosts() {
        let host = Host::up(&description);
        let gpus = host.show()["gpus"].as_array().expect("GPUs").len();
        let mut seen: Vec<String> = Vec::new();
        for gpu in 0..gpus {
            let model = model_of(&host, gpu);
            // If several GPUs are identical, test only the first one.
            if !model.has_mig() || seen.contains(&model.key) {
                continue;
            }
            seen.push(model.key.clone());
            let mut labels = labels(&model);
            let widened = matches!(model.architecture, Architecture::Hopper | Architecture::Blackwell);
            if model.memory_slices == 12 {
                // mig-parted does not know the indexes that these profiles have on this GPU model.
                labels.retain(|label| !label.contains("gfx") && !label.contains("me"));
            }
            for (label, made) in labels.iter().zip(mig_parted(&host, &python, gpu, &labels)) {
                if double_memory(&model).is_some_and(|name| label.starts_with(&format!("{name}="))) {
                    assert_eq!(made, [0; 4], "{description} {label}");
                    double_memory_hosts += usize::from(widened);
                }
                labels_tried += 1;
            }
        }
        hosts_tried += 1;
    }
    println!("{labels_tried} labels on {hosts_tried} hosts; {double_memory_hosts} GPUs with a double-memory label");
    assert!(double_memory_hosts >= 15, "{double_memory_hosts}");
}

/// Tests one model of each architecture and number of profiles. The others differ from it only in sizes.
#[test]
fn foreign_double_memory_instances_are_kept_and_exported() {
    let Some(python) = python_program("python") else { return };
    let (mut parts, mut tried) = (0, BTreeSet::new());
    for key in gpush_geometry::KEYS {
        let model = gpush_geometry::model(key).expect("a model");
        let widened = matches!(model.architecture, Architecture::Hopper | Architecture::Blackwell);
        let Some(whole) = double_memory(&model).filter(|_| widened) else { continue };
        if !tried.insert((format!("{:?}", model.architecture), model.memory_slices, model.gi_profiles.len())) {
            continue;
        }
        let part = format!("1c.{whole}");
        let host = Host::up(&format!("[[gpu]]\nmodel = \"{key}\"\n"));
        mig_parted(&host, &python, 0, &[format!("{whole}=4")]);
        let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 900", gi_at(&host, 0, 2)));
        let before = real_layout(&host, 0);
        assert_eq!(before[1], format!("{whole}@2[{part}@0]"));

        let agent = Agent::start(&host, "");
        let compute = |profile: &str| -> usize {
            let mig = agent.gpu(0).mig.expect("MIG");
            mig.instances.iter().flat_map(|i| &i.compute).filter(|c| c.profile == profile).count()
        };
        assert_eq!((compute(&part), compute(whole)), (4, 0), "{key}");
        let apply = |layout: &str| gpushctl(&agent, &["mig", "apply", "--gpu", "0", "--layout", layout], "");
        let assert_ =
            |layout: &str| gpushctl(&agent, &["mig", "apply", "--check", "--gpu", "0", "--layout", layout], "");
        assert_eq!(status(&assert_(&format!("{part}*4"))), 0, "{key}");
        assert_eq!(status(&assert_(&format!("{whole}*4"))), 3, "{key}");
        // The instances are in use, but they already match the request. So gpushd changes nothing.
        host.start_trace();
        assert_eq!(status(&apply(&format!("{part}*4"))), 0, "{key}");
        assert_eq!(host.trace(), [], "{key}");
        let refused = apply(&format!("{whole}*4"));
        assert_eq!(status(&refused), 4, "{key}");
        let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            printed.contains(&format!("of profile {part}")) && printed.contains(&format!("pid {pid}")),
            "{printed}"
        );

        // mig-parted has one name for both profiles. So its file means the instances that it has created.
        let exported = gpushctl(&agent, &["mig", "export"], "");
        let text = String::from_utf8(exported.stdout).expect("text");
        assert!(text.contains(&format!("\"{whole}\": 4")) && exported.stderr.is_empty(), "{text}");
        for option in ["--check", "--quiet"] {
            assert_eq!(status(&gpushctl(&agent, &["mig", "apply", option, "--file", "-"], &text)), 0, "{key} {option}");
        }
        assert_eq!(real_layout(&host, 0), before);

        // gpushd replaces idle compute instances inside their GPU instances, and keeps the compute
        // instance that is in use.
        let mixed = apply(&format!("{part}@2,{whole}*3"));
        assert_eq!(status(&mixed), 0, "{key}: {}", String::from_utf8_lossy(&mixed.stderr));
        let other = |at: u8| format!("{whole}@{at}[{whole}@0]");
        assert_eq!(real_layout(&host, 0), [other(0), format!("{whole}@2[{part}@0]"), other(4), other(6)]);
        host.end_process(pid);
        parts += 1;
    }
    println!("{parts} parts");
    assert!(parts > 1, "{tried:?}");
}
