//! Reference processes: an HTTP server that sends a fixed response, a program that initialises NVML
//! and then sleeps, and a program that samples GPUs.

use std::{
    io::Read,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use axum::{Router, body::Bytes, http::header::CONTENT_TYPE, routing::get};
use gpush_nvml::{
    driver::{Driver, Sampling},
    proto::GpuRef,
    sample::{InstanceRef, Wanted},
};
use gpush_tests::host::Host;
use nvml_wrapper::{
    Nvml,
    enums::gpm::GpmMetricId,
    gpm::{GpmSample, gpm_metrics_get},
    structs::device::FieldId,
};
use nvml_wrapper_sys::bindings::field_id;

/// A reference process, which is killed when this value is dropped.
pub(crate) struct Bare(pub(crate) Child);

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn own(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Starts the process, and waits for its first byte of output, which means that the process is
/// ready.
fn started(mut command: Command) -> Bare {
    let mut child = command.spawn().expect("this program can be started again");
    let mut ready = [0];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut ready).expect("it gets ready");
    Bare(child)
}

fn is_ready() {
    use std::io::Write;
    let _ = std::io::stdout().write_all(b"+").and_then(|()| std::io::stdout().flush());
}

/// Starts a server that sends `length` bytes as response to every request on this socket. The
/// server uses the same HTTP stack as gpushd.
pub(crate) fn server(socket: &Path, length: usize) -> Bare {
    started(own(&["serve-static", &socket.display().to_string(), &length.to_string()]))
}

/// Runs the server.
pub(crate) fn serve(arguments: &[String]) {
    let [socket, length] = arguments else { panic!("a socket and a length") };
    let body = Bytes::from(vec![b'x'; length.parse().expect("a length")]);
    // Use the same number of worker threads as gpushd.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let listener = tokio::net::UnixListener::bind(socket).expect("a socket");
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).expect("it can be opened to all");
        let answer = move || {
            let body = body.clone();
            async move { ([(CONTENT_TYPE, "application/json")], body) }
        };
        let router = Router::new().fallback(get(answer.clone()).post(answer));
        is_ready();
        axum::serve(listener, router).await.expect("it serves");
    });
}

/// Starts a program that initialises NVML on the host and then waits.
pub(crate) fn initialised(host: &Host) -> Bare {
    let mut command = own(&["initialise"]);
    command.arg(host.library()).envs(host.env());
    started(command)
}

/// Initialises NVML, and waits.
pub(crate) fn initialise(arguments: &[String]) {
    let library = arguments.first().expect("a library");
    let _nvml = nvml_wrapper::Nvml::builder().lib_path(library.as_ref()).init().expect("NVML");
    is_ready();
    loop {
        std::thread::park();
    }
}

/// A program that samples the GPU instances of a host each time it reads a byte.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sampler {
    /// Only the driver calls of gpushd's worker, without a worker.
    DriverCalls,
    /// A loop with nvml-wrapper, which reads the same figures.
    NvmlWrapper,
}

impl Sampler {
    fn name(self) -> &'static str {
        match self {
            Self::DriverCalls => "sample-calls",
            Self::NvmlWrapper => "sample-wrapper",
        }
    }
}

/// Starts a program that samples. `gpus` is a JSON array of the references of the GPUs, and of the ids of the GPU
/// instances of each GPU.
pub(crate) fn sampling(host: &Host, sampler: Sampler, gpus: &str) -> Bare {
    let mut command = own(&[sampler.name()]);
    command.arg(host.library()).arg(gpus).envs(host.env()).stdin(Stdio::piped());
    started(command)
}

/// Calls `sample` with the number of the round for each byte of the standard input, and answers each with a byte.
fn rounds(mut sample: impl FnMut(usize)) {
    is_ready();
    let mut input = std::io::stdin();
    let mut round = 0;
    while input.read_exact(&mut [0]).is_ok() {
        sample(round);
        round += 1;
        is_ready();
    }
}

fn parsed(arguments: &[String]) -> (&String, Vec<GpuRef>, Vec<Vec<u32>>) {
    let [library, gpus] = arguments else { panic!("a library and GPUs") };
    let (gpus, ids) = serde_json::from_str(gpus).expect("JSON");
    (library, gpus, ids)
}

/// Samples as gpushd's worker does.
pub(crate) fn sample_calls(arguments: &[String]) {
    let (library, gpus, ids) = parsed(arguments);
    let driver = Driver::load(Some(library.as_ref())).expect("NVML");
    let mut kept: Vec<Sampling<'_>> = gpus.iter().map(|_| Sampling::default()).collect();
    rounds(|_| {
        for ((gpu, ids), kept) in gpus.iter().zip(&ids).zip(&mut kept) {
            let instances: Vec<InstanceRef> = ids.iter().map(|gi| InstanceRef { gi: *gi, generation: 1 }).collect();
            kept.sample(&driver, gpu, Some(&instances), Wanted::default()).expect("a sample");
        }
    });
}

/// Samples with nvml-wrapper, and keeps nothing but the windows.
pub(crate) fn sample_wrapper(arguments: &[String]) {
    let (library, gpus, ids) = parsed(arguments);
    let nvml = Nvml::builder().lib_path(library.as_ref()).init().expect("NVML");
    let fields = [
        field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
        field_id::NVML_FI_DEV_POWER_INSTANT,
        field_id::NVML_FI_DEV_POWER_AVERAGE,
        field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT,
        field_id::NVML_FI_DEV_MEMORY_TEMP,
        field_id::NVML_FI_DEV_PERF_POLICY_POWER,
        field_id::NVML_FI_DEV_PERF_POLICY_THERMAL,
    ]
    .map(FieldId);
    let metrics = [
        GpmMetricId::GraphicsUtil,
        GpmMetricId::SmUtil,
        GpmMetricId::SmOccupancy,
        GpmMetricId::AnyTensorUtil,
        GpmMetricId::DramBwUtil,
    ];
    let devices: Vec<_> = gpus.iter().map(|gpu| nvml.device_by_uuid(gpu.uuid.as_str()).expect("a GPU")).collect();
    let windows = usize::from(Wanted::default().windows);
    let mut open: Vec<Vec<Option<GpmSample<'_>>>> = ids.iter().map(|ids| ids.iter().map(|_| None).collect()).collect();
    rounds(|round| {
        for ((device, ids), open) in devices.iter().zip(&ids).zip(&mut open) {
            device.field_values_for(&fields).expect("fields");
            device.running_compute_processes().expect("processes");
            for at in (0..windows).map(|window| (round * windows + window) % ids.len()) {
                let later = device.gpm_mig_sample(ids[at]).expect("a sample");
                if let Some(earlier) = &open[at] {
                    gpm_metrics_get(&nvml, earlier, &later, &metrics).expect("metrics");
                }
                open[at] = Some(later);
            }
        }
    });
}
