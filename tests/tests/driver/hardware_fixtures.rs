//! GPUs that were recorded from a real driver, compared with the simulator's GPUs of the same
//! models. The tests also run the recording program on the simulator.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::{fs, path::Path};

use gpush_tests::{
    driver::{create, hardware, uuids},
    fixture::Fixture,
    host::{Host, program},
};

/// Creates an instance of each profile in `instances`, on a host with one GPU of a model. Returns
/// the record that `gpu_check` then writes.
async fn record(key: &str, instances: &[(&str, u8)]) -> Fixture {
    let host = Host::up(&format!("[[gpu]]\nmodel = \"{key}\"\n"));
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    for (profile, start) in instances {
        create(&hardware, uuid.as_str(), profile, *start).await;
    }
    let out = host.scratch("out");
    let output = host.command(program("gpu_check")).arg(&out).arg("--simulated").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    // The readings must agree with two other sources: the readings through a worker, and the output
    // of the simulated nvidia-smi.
    let counts = printed.lines().find(|line| line.contains(" could not be compared")).expect("a line with the counts");
    assert!(counts.contains(" the same, 0 differ, ") && !counts.starts_with("0 "), "{printed}");
    let files: Vec<_> = fs::read_dir(out.join("fixtures")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1);
    let fixture: Fixture = serde_json::from_slice(&fs::read(&files[0]).unwrap()).unwrap();
    assert_eq!(files[0].file_name().unwrap().to_str().unwrap(), fixture.file_name());
    fixture
}

/// Does the same as [`record`]. The record has the compute instance profiles of every GPU instance
/// profile.
async fn simulated(key: &str) -> Fixture {
    let mut whole: Option<Fixture> = None;
    for profile in gpush_geometry::model(key).unwrap().gi_profiles {
        let one = record(key, &[(&profile.name, profile.placements[0].0)]).await;
        let Some(whole) = &mut whole else {
            whole = Some(one);
            continue;
        };
        let pairs = whole.mig.as_mut().unwrap().profiles.iter_mut().zip(one.mig.unwrap().profiles);
        for (known, reported) in pairs.filter(|(_, reported)| !reported.compute.is_empty()) {
            known.compute = reported.compute;
        }
    }
    match whole {
        Some(whole) => whole,
        None => record(key, &[]).await,
    }
}

#[tokio::test]
async fn simulated_gpus_match_recorded_gpus() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/hardware");
    let files: Vec<_> = fs::read_dir(&dir)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    if files.is_empty() {
        println!("no fixtures yet: run tests/gpu/run on a host with a GPU, and add what it records to docs/hardware");
    }
    let mut wrong = Vec::new();
    for file in &files {
        let recorded: Fixture = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let Some(key) = recorded.model() else {
            wrong.push(format!("{name}: no model has the PCI device id {}", recorded.pci_device_id));
            continue;
        };
        let differences = recorded.differences(&simulated(key).await);
        wrong.extend(differences.into_iter().map(|difference| format!("{name} ({key}): {difference}")));
    }
    println!("{} recorded GPUs compared, {} differences", files.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn recording_matches_itself_and_differences_are_found() {
    let recorded = record("h200-141", &[("3g.71gb", 0), ("1g.18gb", 4)]).await;
    assert_eq!(recorded.model(), Some("h200-141"));
    let reported = |f: &Fixture| f.mig.as_ref().unwrap().profiles.iter().filter(|p| !p.compute.is_empty()).count();
    assert_eq!(reported(&recorded), 2, "only what the driver reported is recorded");
    let whole = simulated("h200-141").await;
    assert_eq!(reported(&whole), 7);
    assert_eq!(recorded.differences(&whole), Vec::<String>::new());
    let mut changed = recorded.clone();
    changed.mig.as_mut().unwrap().profiles[0].memory_mib += 1;
    changed.mig.as_mut().unwrap().profiles[3].placements.pop();
    changed.memory_mib += 1;
    assert_eq!(changed.differences(&whole).len(), 3, "{:#?}", changed.differences(&whole));
    let mut changed = recorded.clone();
    let three = changed.mig.as_mut().unwrap().profiles.iter_mut().find(|p| p.name == "3g.71gb").unwrap();
    three.compute[0].max += 1;
    assert_eq!(changed.differences(&whole).len(), 1);
    changed.mig.as_mut().unwrap().profiles.pop();
    assert_eq!(changed.differences(&whole).len(), 2, "{:#?}", changed.differences(&whole));
    // A GPU without MIG.
    let recorded = record("l4", &[]).await;
    assert_eq!((recorded.model(), &recorded.mig), (Some("l4"), &None));
    assert_eq!(recorded.differences(&simulated("l4").await), Vec::<String>::new());
}

/// A program that prints what nvidia-smi would print on an H200 with two instances: a 3g.71gb
/// without a compute instance, and a 1g.18gb with a compute instance. The program lists only one
/// profile.
struct Smi {
    pci: String,
    uuid: String,
    device: String,
    driver: String,
    half: u32,
    one: u32,
}

impl Smi {
    fn write(&self, dir: &Path, memory: &str) {
        use std::os::unix::fs::PermissionsExt;
        let Self { pci, uuid, device, driver, half, one } = self;
        let script = format!(
            r#"#!/bin/sh
case "$*" in
--query-gpu=*) echo "0, {uuid}, 0000{pci}, NVIDIA H200, {memory}, Enabled, Enabled, {driver}" ;;
"mig -lgip") echo "|   0  MIG 3g.71gb          9     1/2        69.75      No     60     3     0   |"
             echo "|                                                                3     3     0   |" ;;
"mig -lgipp") echo "GPU  0 Profile ID  9 Placements: {{0,4}}:4" ;;
"mig -lgi") echo "|   0  MIG 1g.18gb         19       {one}          4:1     |"
            echo "|   0  MIG 3g.71gb          9        {half}          0:4     |" ;;
-L) echo "  MIG 1g.18gb     Device  0: (UUID: {device})" ;;
*) echo "unknown: $*"; exit 6 ;;
esac
"#
        );
        let file = dir.join("nvidia-smi");
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[tokio::test]
async fn difference_to_nvidia_smi_is_a_failure() {
    let host = Host::up("[[gpu]]\nmodel = \"h200-141\"\n");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let half = create(&hardware, uuid.as_str(), "3g.71gb", 0).await.id;
    let one = create(&hardware, uuid.as_str(), "1g.18gb", 4).await.id;
    let device = hardware.create_compute_instance(&uuid, one, 0, None).await.unwrap().uuid.unwrap();
    let pci = hardware.read(&uuid).await.unwrap().identity.pci;
    let driver = hardware.driver().await.unwrap().version;
    let smi = Smi { pci, uuid: uuid.to_string(), device: device.to_string(), driver, half, one };
    let bin = host.scratch("smi");
    fs::create_dir(&bin).unwrap();
    let check = |memory: &str| {
        smi.write(&bin, memory);
        let path = std::iter::once(bin.clone()).chain(std::env::split_paths(&host.env()["PATH"]));
        let output = host
            .command(program("gpu_check"))
            .env("PATH", std::env::join_paths(path).unwrap())
            .args([host.scratch("out").as_os_str(), "--simulated".as_ref()])
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    // The program lists one of seven profiles. All missing profiles together count as one
    // difference.
    let (success, printed) = check("143771");
    assert!(!success && printed.contains("number of profiles: gpush 7, nvidia-smi 1"), "{printed}");
    assert!(printed.contains("13 the same, 1 differ, 0 could not be compared"), "{printed}");
    let (success, printed) = check("143000");
    assert!(!success && printed.contains("12 the same, 2 differ, 0 could not be compared"), "{printed}");
    assert!(printed.contains("DIFFERS  GPU 0 memory: gpush 143771, nvidia-smi 143000"), "{printed}");
}
