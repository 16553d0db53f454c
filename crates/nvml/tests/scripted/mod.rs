//! The worker of the supervisor's tests: this test program, started with `--ignored --exact scripted::worker`. It gets
//! the socket as standard input, like the real worker.

use std::{
    fs,
    io::Write,
    os::{fd::AsFd, unix::net::UnixStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use gpush_api::{Architecture, Driver, GpuIndex, GpuInstance, GpuUuid, Memory};
use gpush_nvml::{
    DriverError, ErrorKind, Event, EventKind, Identity, ModeChange, Reading,
    proto::{self, Answer, Request, ToParent, ToWorker},
    sample::{Activity, Doubts, LimitedTime, Sample},
};
use nix::{sys::signal::kill, unistd::Pid};

use super::{A, B};

pub(crate) mod stage;

#[test]
#[ignore = "it is the worker of the other tests, not a test"]
fn worker() {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut incoming = socket.try_clone().unwrap();
    let outbox = Arc::new(Mutex::new(socket));
    let Some(ToWorker::Init { library: Some(stage), .. }) = proto::read(&mut incoming).unwrap() else {
        panic!("the first frame is not init");
    };
    let ready = match deed(&stage, "init", "*").as_str() {
        "hang" => hang(),
        "die" => die(),
        "fail 9" => Err(DriverError::new(ErrorKind::DriverNotLoaded, "nvmlInit_v2")),
        _ => Ok(Driver {
            version: "scripted".to_owned(),
            nvml: "0".to_owned(),
            cuda: "0.0".to_owned(),
            library: stage.display().to_string(),
            simulated: true,
            memory_limits: false,
        }),
    };
    let failed = ready.is_err();
    proto::write(&mut *outbox.lock().unwrap(), &ToParent::Ready(ready)).unwrap();
    if failed {
        std::process::exit(0);
    }
    while let Some(ToWorker::Call { id, request }) = proto::read(&mut incoming).unwrap() {
        let (outbox, stage) = (Arc::clone(&outbox), stage.clone());
        thread::spawn(move || {
            let result = play(&stage, &request, &outbox);
            proto::write(&mut *outbox.lock().unwrap(), &ToParent::Reply { id, result }).unwrap();
        });
    }
    if deed(&stage, "eof", "*") == "hang" {
        hang::<()>();
    }
    std::process::exit(0);
}

fn name(request: &Request) -> &'static str {
    match request {
        Request::List { .. } => "list",
        Request::Read { .. } => "read",
        Request::Sample { .. } => "sample",
        Request::CreateGpuInstance { .. } => "create_gpu_instance",
        Request::CreateComputeInstance { .. } => "create_compute_instance",
        Request::DestroyComputeInstance { .. } => "destroy_compute_instance",
        Request::DestroyGpuInstance { .. } => "destroy_gpu_instance",
        Request::SetMigMode { .. } => "set_mig_mode",
        Request::SetComputeMode { .. } => "set_compute_mode",
    }
}

fn deed(stage: &Path, request: &str, uuid: &str) -> String {
    let script = fs::read_to_string(stage.join("behaviour")).unwrap();
    let found = script.lines().find_map(|line| {
        let (rule, rest) = line.split_once(' ')?;
        let (gpu, deed) = rest.split_once(' ')?;
        let matches = (rule == "*" || rule == request) && (gpu == "*" || gpu == uuid);
        matches.then(|| deed.to_owned())
    });
    found.unwrap_or_else(|| "ok".to_owned())
}

fn hang<T>() -> T {
    loop {
        thread::park();
    }
}

fn die<T>() -> T {
    kill(Pid::this(), nix::sys::signal::SIGKILL).unwrap();
    hang()
}

fn play(stage: &Path, request: &Request, outbox: &Mutex<UnixStream>) -> Result<Answer, DriverError> {
    let uuid = request.gpu().map_or("*", |gpu| gpu.uuid.as_str());
    let more = if let Request::DestroyGpuInstance { gi, .. } = request { format!(" {gi}") } else { String::new() };
    let mut log = fs::OpenOptions::new().create(true).append(true).open(stage.join("log")).unwrap();
    log.write_all(format!("{} {uuid}{more}\n", name(request)).as_bytes()).unwrap();
    match deed(stage, name(request), uuid).as_str() {
        "hang" => hang(),
        "die" => die(),
        "gate" => {
            drop(fs::File::open(stage.join("gate")).unwrap());
            log.write_all(b"after the gate\n").unwrap();
        }
        "nonsense" => outbox.lock().unwrap().write_all(b"\x05\0\0\0{{{{{").unwrap(),
        "event" => {
            let event = Event { uuid: uuid.into(), kind: EventKind::Xid(79), gi: Some(1), ci: None };
            proto::write(&mut *outbox.lock().unwrap(), &ToParent::Event(event)).unwrap();
        }
        _ => {}
    }
    Ok(match request {
        Request::List { skip } => Answer::Listed(listed(skip)),
        Request::Read { .. } => Answer::Reading(Box::new(Reading {
            identity: identity(uuid, GpuIndex(0)),
            memory: Memory::default(),
            mig: None,
            compute_mode: None,
            processes: Vec::new(),
            processes_known: true,
            nvlink: None,
            sensors: gpush_api::Sensors::default(),
            rows: None,
            warnings: Vec::new(),
        })),
        Request::Sample { gpu, .. } => Answer::Sample(Box::new(sample(&gpu.uuid))),
        Request::CreateGpuInstance { profile_id, placement, .. } => Answer::GpuInstance(GpuInstance {
            id: 1,
            profile_id: *profile_id,
            profile: "7g".to_owned(),
            placement: *placement,
            memory: None,
            compute: Vec::new(),
            processes: Vec::new(),
        }),
        Request::CreateComputeInstance { .. } => {
            return Err(DriverError::new(ErrorKind::InsufficientResources, "nvmlGpuInstanceCreateComputeInstance"));
        }
        Request::DestroyComputeInstance { .. } | Request::DestroyGpuInstance { .. } => Answer::Destroyed,
        Request::SetMigMode { enabled, .. } => {
            Answer::Mode(ModeChange { enabled: *enabled, pending: *enabled, activation: None })
        }
        Request::SetComputeMode { .. } => Answer::ComputeModeSet,
    })
}

fn sample(uuid: &GpuUuid) -> Sample {
    Sample {
        uuid: uuid.clone(),
        at_us: 1,
        activity: Activity::default(),
        memory: None,
        instances: Vec::new(),
        processes: None,
        // The test sees from this value which worker has answered.
        energy_mj: Some(std::process::id().into()),
        power_mw: None,
        power_limit_mw: None,
        temperature_c: None,
        memory_temperature_c: None,
        sm_clock_mhz: None,
        memory_clock_mhz: None,
        event_reasons: None,
        limited: LimitedTime { power_ns: None, thermal_ns: None },
        doubts: Doubts::default(),
        took_us: 0,
    }
}

fn listed(skip: &[proto::GpuRef]) -> Vec<gpush_nvml::Listed> {
    let gpus = (0..).map(GpuIndex).zip([A, B]);
    gpus.map(|(index, uuid)| {
        let skipped = skip.iter().any(|gpu| gpu.uuid == uuid && gpu.index == Some(index));
        let error = DriverError::new(ErrorKind::Unsettled, "listing the GPUs").on(uuid);
        gpush_nvml::Listed { index, identity: if skipped { Err(error) } else { Ok(identity(uuid, index)) } }
    })
    .collect()
}

fn identity(uuid: &str, index: GpuIndex) -> Identity {
    Identity {
        index,
        uuid: uuid.into(),
        pci: format!("0000:0{index}:00.0"),
        pci_id: 0x20b2_10de,
        pci_subsystem: None,
        minor: index.0,
        name: "scripted".to_owned(),
        architecture: Architecture::Ampere,
        passed_through: false,
    }
}
