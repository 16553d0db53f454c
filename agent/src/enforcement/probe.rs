//! Programs that try to open a GPU: in `user.slice`, in the scope of another lease, and in a service.
//!
//! A probe runs as root, to which no right of the node denies the open. So only the cgroup decides, and a program of an
//! ordinary user in the same place has no more access.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use gpush_api::{DeviceProbe, ProbePlace, ProbeResult};
use gpush_core::lease::access::{AllowedDevice, CONTROL_MINOR, GPU_MAJOR, Nodes, SESSIONS};
use gpush_host::{
    device_probe::{self, ALLOWED, DENIED, UNKNOWN},
    systemd::{Manager, ShortProgram},
};

use crate::state::context::HostContext;

/// The slice that contains the scopes of leases.
const LEASES: &str = "gpulease.slice";

/// The slice of services.
const SERVICES: &str = "system.slice";

/// Directory for a node that a probe tries to create.
const SCRATCH: &str = "/run/gpush";

/// A device to probe.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Probed {
    minor: u32,
    /// The node; `None` if it does not exist, so that the probe tries to create one.
    node: Option<PathBuf>,
}

impl Probed {
    fn of(minor: u32) -> Self {
        let name = if minor == CONTROL_MINOR { "nvidiactl".to_owned() } else { format!("nvidia{minor}") };
        let node = Path::new("/dev").join(name);
        Self { minor, node: device_probe::is_node(&node, (GPU_MAJOR, minor)).then_some(node) }
    }

    fn name(&self) -> String {
        self.node.as_ref().map_or_else(|| format!("{GPU_MAJOR}:{}", self.minor), |node| node.display().to_string())
    }
}

/// Runs all probes.
pub(super) async fn all(manager: &Manager, context: &HostContext) -> Vec<DeviceProbe> {
    let minors: Vec<u32> = context.state.now().gpus.iter().map(|gpu| gpu.gpu.minor).collect();
    let probed = Probed::of(minors.first().copied().unwrap_or(CONTROL_MINOR));
    // The devices of a lease of another GPU.
    let other = minors.get(1).map_or_else(
        || Nodes::default().closed(),
        |minor| Nodes { gpus: [*minor].into(), ..Nodes::default() }.allowed(),
    );
    let mut probes = vec![
        run(manager, ProbePlace::Session, SESSIONS, None, &probed).await,
        run(manager, ProbePlace::OtherLease, LEASES, Some(other), &probed).await,
    ];
    // A service can open a node that exists. This would start the GPU, and shows nothing.
    if probed.node.is_none() {
        probes.push(run(manager, ProbePlace::Service, SERVICES, None, &probed).await);
    }
    probes
}

async fn run(
    manager: &Manager,
    place: ProbePlace,
    slice: &str,
    devices: Option<Vec<AllowedDevice>>,
    probed: &Probed,
) -> DeviceProbe {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let done = |result, reason| DeviceProbe { place, device: probed.name(), result, reason };
    let own = match std::env::current_exe() {
        Ok(own) => own,
        Err(error) => return done(ProbeResult::Failed, Some(error.to_string())),
    };
    let path = probed.node.clone().unwrap_or_else(|| Path::new(SCRATCH).join(format!("probe-{number}")));
    let arguments = ["device-probe".to_owned(), GPU_MAJOR.to_string(), probed.minor.to_string()];
    let program = ShortProgram {
        unit: format!("gpush-probe-{number}.service"),
        description: format!("gpush probe of {}", probed.name()),
        command: [shown(&own)].into_iter().chain(arguments).chain([shown(&path)]).collect(),
        slice: slice.to_owned(),
        devices,
    };
    match manager.run_short(&program).await {
        Ok(status) if status == i32::from(DENIED) => done(ProbeResult::Denied, None),
        Ok(status) if status == i32::from(ALLOWED) => done(ProbeResult::Allowed, None),
        Ok(status) if status == i32::from(UNKNOWN) => {
            done(ProbeResult::Failed, Some(format!("it could not create a node in {SCRATCH}")))
        }
        Ok(status) => done(ProbeResult::Failed, Some(format!("it ended with status {status}"))),
        Err(error) => done(ProbeResult::Failed, Some(error.in_full())),
    }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
