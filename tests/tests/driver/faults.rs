//! The real worker with a simulated driver that hangs, crashes, is slow or is missing, and with
//! libraries that are not a driver. `crates/nvml/tests` has the supervision of a scripted worker.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use gpush_api::{Architecture, Code, GpuIndex};
use gpush_nvml::{ErrorKind, Hardware, Settled};
use gpush_tests::{
    driver::{create, hardware, hardware_of, mig, options, place, uuids},
    host::{Host, program},
};
use nix::{sys::signal, unistd::Pid};

fn instances(host: &Host, gpu: usize) -> usize {
    host.show()["gpus"][gpu]["state"]["instances"].as_array().unwrap().len()
}

fn alive(pid: u32) -> bool {
    signal::kill(Pid::from_raw(i32::try_from(pid).unwrap()), None).is_ok()
}

fn impatient(host: &Host) -> Hardware {
    let mut options = options(host);
    options.deadlines.read = Duration::from_secs(5);
    options.deadlines.change = Duration::from_millis(700);
    options.deadlines.grace = Duration::from_millis(300);
    Hardware::start(options)
}

#[tokio::test]
async fn hung_creation_leaves_gpu_unknown_and_others_served() {
    let host = Host::up("dgx-a100");
    let hardware = impatient(&host);
    let list = uuids(&hardware).await;
    let (profile_id, placement) = place(&hardware, list[0].as_str(), "1g.10gb", 0).await;
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --hang");
    let worker = hardware.status().worker.unwrap();
    let error = hardware.create_gpu_instance(&list[0], profile_id, placement).await.unwrap_err();
    assert!(error.may_land(), "{error}");
    assert_eq!(error.to_api().code, Code::DriverTimeout);
    for uuid in &list[1..] {
        hardware.read(uuid).await.unwrap();
    }
    // `settle` kills the worker that hangs. The next reading shows that the worker's call had no
    // effect.
    assert!(matches!(hardware.settle(&list[0]).await, Settled::Gone | Settled::Nothing));
    assert!(!alive(worker));
    assert_eq!(mig(&hardware.read(&list[0]).await.unwrap()).instances, []);
    host.clear_faults();
    hardware.create_gpu_instance(&list[0], profile_id, placement).await.unwrap();
}

#[tokio::test]
async fn late_creation_is_found() {
    let host = Host::up("dgx-a100");
    let mut options = options(&host);
    options.deadlines.change = Duration::from_millis(300);
    options.deadlines.grace = Duration::from_secs(60);
    let hardware = Hardware::start(options);
    let uuid = uuids(&hardware).await.remove(0);
    let (profile_id, placement) = place(&hardware, uuid.as_str(), "1g.10gb", 0).await;
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --delay-ms 1200 --times 1");
    assert!(hardware.create_gpu_instance(&uuid, profile_id, placement).await.unwrap_err().may_land());
    assert_eq!(hardware.read(&uuid).await.unwrap_err().kind, ErrorKind::Unsettled);
    assert_eq!(hardware.settle(&uuid).await, Settled::Late(Ok(())));
    assert_eq!(mig(&hardware.read(&uuid).await.unwrap()).instances.len(), 1);
}

#[tokio::test]
async fn killed_worker_call_is_resolved_by_reading() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let (profile_id, placement) = place(&hardware, uuid.as_str(), "1g.10gb", 0).await;
    for (when, landed) in [("before", 0), ("after", 1)] {
        host.fault(&format!("nvmlDeviceCreateGpuInstance* --gpu 0 --kill {when} --times 1"));
        let error = hardware.create_gpu_instance(&uuid, profile_id, placement).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: true }, "{when}: {error}");
        let reading = hardware.read(&uuid).await.unwrap();
        assert_eq!(mig(&reading).instances.len(), landed, "{when}");
        assert_eq!(instances(&host, 0), landed, "{when}");
    }
    assert_eq!(hardware.status().crashed, 2);
}

#[tokio::test]
async fn worker_killed_during_reading_is_replaced() {
    let host = Host::up("mixed");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let made = create(&hardware, uuid.as_str(), "1g.10gb", 0).await;
    hardware.create_compute_instance(&uuid, made.id, 0, None).await.unwrap();
    let mut killed = 0;
    for function in [
        "nvmlInit*",
        "nvmlDeviceGetHandleByIndex*",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetGpuInstanceProfileInfo*",
        "nvmlDeviceGetGpuInstancePossiblePlacements*",
        "nvmlGpuInstanceGetInfo",
        "nvmlComputeInstanceGetInfo*",
        "nvmlDeviceGetComputeRunningProcesses*",
    ] {
        hardware.restart().await.unwrap();
        host.fault(&format!("{function} --kill before --times 1"));
        let crashed = hardware.status().crashed;
        let result = hardware.read(&uuid).await;
        if function == "nvmlInit*" {
            assert_eq!(result.unwrap_err().kind, ErrorKind::WorkerUnavailable);
            continue;
        }
        assert_eq!(mig(&result.unwrap()).instances.len(), 1, "{function}");
        assert_eq!(hardware.status().crashed, crashed + 1, "{function} was not called");
        killed += 1;
    }
    println!("{killed} workers killed, each in another call");
}

#[tokio::test(flavor = "multi_thread")]
async fn random_worker_kills_lose_no_call() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    let (profile_id, placement) = place(&hardware, list[0].as_str(), "1g.10gb", 0).await;
    let (mut killed, mut landed, mut lost, mut through) = (0_u32, 0_u32, 0_u32, 0_u32);
    for round in 0..120_u64 {
        let uuid = &list[usize::try_from(round % 4).unwrap()];
        let Some(worker) = hardware.status().worker else {
            hardware.read(uuid).await.unwrap();
            continue;
        };
        let others = list[4..].iter().cloned().map(|uuid| {
            let hardware = hardware.clone();
            tokio::spawn(async move { hardware.read(&uuid).await })
        });
        let others: Vec<_> = others.collect();
        // A creation takes about half a millisecond. With delays from 0 to 1.5 ms, the kill comes at
        // different moments during the creation, or after it.
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_micros(round * 37 % 1500)).await;
            signal::kill(Pid::from_raw(i32::try_from(worker).unwrap()), signal::SIGKILL).is_ok()
        });
        let result = hardware.create_gpu_instance(uuid, profile_id, placement).await;
        killed += u32::from(killer.await.unwrap());
        for other in others {
            other.await.unwrap().expect("a read is tried again");
        }
        let there = mig(&hardware.read(uuid).await.unwrap()).instances.clone();
        match result {
            Ok(made) => {
                assert_eq!(there.len(), 1);
                assert_eq!((there[0].id, there[0].placement), (made.id, placement));
                through += 1;
            }
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: true }, "{error}");
                if there.is_empty() { lost += 1 } else { landed += 1 }
            }
        }
        for instance in there {
            hardware.destroy_gpu_instance(uuid, instance.id).await.unwrap();
        }
    }
    println!("{killed} kills: {through} creations got through, {landed} had landed, {lost} had not");
    assert!(killed > 60);
    for gpu in 0..8 {
        assert_eq!(instances(&host, gpu), 0);
    }
}

/// Returns whether a process has ended or is a zombie. An orphan stays a zombie until its new
/// parent reaps it.
fn ended(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        Err(_) => true,
    }
}

#[test]
fn worker_dies_with_parent_and_ignores_other_signals() {
    use gpush_nvml::proto::{self, GpuRef, Request, ToParent, ToWorker};
    use std::io::{BufRead, BufReader};
    use std::os::{fd::OwnedFd, unix::net::UnixStream};
    let host = Host::up("a30x4");
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    // The shell is the parent of the worker. The test keeps the socket open, so only the signal
    // that the kernel sends when the parent dies can end the worker.
    let mut parent = host
        .command("sh")
        .args(["-c", r#"exec 3<&0; "$0" <&3 & echo $!; wait"#])
        .arg(program("driver_worker"))
        .stdin(OwnedFd::from(theirs))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let worker: u32 = line.trim().parse().unwrap();
    proto::write(&mut ours, &ToWorker::Init { library: None, events: false }).unwrap();
    assert!(matches!(proto::read(&mut ours).unwrap(), Some(ToParent::Ready(Ok(_)))));
    for number in [signal::SIGTERM, signal::SIGINT, signal::SIGHUP] {
        signal::kill(Pid::from_raw(i32::try_from(worker).unwrap()), number).unwrap();
    }
    let request = Request::Read { gpu: GpuRef { uuid: "?".into(), index: Some(GpuIndex(0)), pci: None } };
    proto::write(&mut ours, &ToWorker::Call { id: 1, request }).unwrap();
    let reply = proto::read(&mut ours).unwrap();
    assert!(matches!(reply, Some(ToParent::Reply { id: 1, result: Err(_) })), "{reply:?}");
    parent.kill().unwrap();
    parent.wait().unwrap();
    while !ended(worker) {
        std::thread::sleep(Duration::from_millis(2));
    }
    // A user who starts it from a shell learns which program starts it.
    let output = Command::new(program("driver_worker")).stdin(std::process::Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("only gpushd can start this command"));
}

#[tokio::test]
async fn no_own_handle_is_left_after_worker_restart() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    hardware.read(&list[0]).await.unwrap();
    let clients = || -> Vec<u64> {
        let shown = host.show();
        shown["clients"].as_array().unwrap().iter().map(|pid| pid.as_u64().unwrap()).collect()
    };
    let worker = hardware.status().worker.unwrap();
    // `env` has replaced itself with the worker, so there is only one process.
    assert_eq!(clients(), [u64::from(worker)]);
    hardware.stop().await.unwrap();
    assert!(!alive(worker), "seen gone: the kernel has closed what it held");
    assert_eq!(hardware.list().await.unwrap_err().kind, ErrorKind::Stopped);
    hardware.resume();
    assert_eq!(uuids(&hardware).await, list, "matched again by UUID");
}

#[tokio::test]
async fn unusable_driver_is_explained_and_retried() {
    let host = Host::up("dgx-a100");
    let mut options = options(&host);
    options.deadlines.retry = Duration::ZERO;
    let hardware = Hardware::start(options);
    for (code, kind, words) in [
        ("DRIVER_NOT_LOADED", ErrorKind::DriverNotLoaded, "modprobe nvidia"),
        ("LIB_RM_VERSION_MISMATCH", ErrorKind::LibRmVersionMismatch, "reboot, or reload"),
    ] {
        host.fault(&format!("nvmlInit* --rc {code}"));
        let error = hardware.driver().await.unwrap_err();
        assert_eq!(error.kind, kind);
        assert!(error.is_driver_unavailable());
        let api = error.to_api();
        assert_eq!(api.code, Code::DriverUnavailable);
        assert!(api.hint.unwrap().contains(words));
        assert_eq!(hardware.status().failure.unwrap().kind, kind);
        host.clear_faults();
        assert!(hardware.driver().await.unwrap().simulated);
        hardware.restart().await.unwrap();
    }
    // No file, another library, and a file that is not a library.
    let garbage = host.scratch("libnvidia-ml.so.1");
    fs::write(&garbage, "no ELF").unwrap();
    for (library, kind) in [
        (PathBuf::from("/nowhere/libnvidia-ml.so.1"), ErrorKind::LibraryMissing),
        (PathBuf::from("libc.so.6"), ErrorKind::NotNvml),
        (garbage, ErrorKind::LibraryMissing),
    ] {
        let error = hardware_of(&library).list().await.unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.to_string().contains(library.to_str().unwrap()), "{error}");
        let api = error.to_api();
        assert_eq!(api.code, Code::DriverUnavailable, "{api:?}");
        assert!(api.hint.as_ref().is_some_and(|hint| hint.contains("`library` under [driver]")), "{api:?}");
    }
}

/// The source of an old NVML library. It has no calls for MIG and architectures, and no versioned
/// structs.
const OLD_LIBRARY: &str = r#"
#include <string.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long memory; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "396.26", n); return 0; }
int nvmlSystemGetNVMLVersion(char *s, unsigned n) { strncpy(s, "9.396.26", n); return 0; }
int nvmlSystemGetCudaDriverVersion(int *v) { *v = 9020; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 9020; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)8; return i ? 2 : 0; }
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { strncpy(s, "GPU-old", n); return 0; }
int nvmlDeviceGetName(void *d, char *s, unsigned n) { strncpy(s, "Tesla K80", n); return 0; }
int nvmlDeviceGetMinorNumber(void *d, unsigned *m) { *m = 0; return 0; }
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *p) {
    memset(p, 0, sizeof *p); p->bus = 5; p->id = 0x102d10de; strcpy(p->bus_id, "00000000:05:00.0"); return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) {
    m->total = 11441ull << 20; m->used = 63ull << 20; m->free = m->total - m->used; return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, struct process *p) {
    if (*n < 2) { *n = 2; return 7; }
    *n = 2; p[0].pid = 11; p[0].memory = 5ull << 20; p[1].pid = 12; p[1].memory = ~0ull; return 0;
}
"#;

#[tokio::test]
async fn library_without_newer_symbols_reads_what_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let (source, library) = (dir.path().join("old.c"), dir.path().join("libnvidia-ml.so.1"));
    fs::write(&source, OLD_LIBRARY).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    match built {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            println!("SKIPPED: no C compiler to build an old library with: {error}");
            return;
        }
    }
    let hardware = hardware_of(&library);
    let driver = hardware.driver().await.unwrap();
    assert_eq!((driver.cuda.as_str(), driver.simulated), ("9.2", false));
    let reading = hardware.read(&"GPU-old".into()).await;
    // This library cannot find a GPU by UUID, so gpush finds the GPU only through the list of GPUs.
    assert_eq!(reading.unwrap_err().kind, ErrorKind::MissingSymbol);
    assert_eq!(uuids(&hardware).await, ["GPU-old"]);
    let reading = hardware.read(&"GPU-old".into()).await.unwrap();
    assert_eq!(reading.identity.architecture, Architecture::Unknown);
    assert_eq!((reading.identity.pci.as_str(), reading.identity.pci_device_id()), ("0000:05:00.0", 0x102d));
    assert_eq!((reading.memory.total_mib, reading.memory.used_mib), (11_441, 63));
    assert_eq!(reading.mig, None);
    let processes: Vec<_> = reading.processes.iter().map(|p| (p.pid.unwrap(), p.memory_mib)).collect();
    assert_eq!(processes, [(11, Some(5)), (12, None)]);
    let error = hardware.set_mig_mode(&"GPU-old".into(), true).await.unwrap_err();
    assert_eq!((error.kind.clone(), error.to_api().code), (ErrorKind::MissingSymbol, Code::Unsupported));
}
