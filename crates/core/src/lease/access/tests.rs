//! Device rules of random leases on random hosts.

use std::collections::BTreeSet;

use gpush_api::{ComputeInstance, Gpu, GpuInstance, LeaseMember, MemberShare, MpsPolicy, Placement};
use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::*;
use crate::preset;

/// Major number of the nodes of capabilities in these tests.
const CAPABILITIES: u32 = 236;

/// A host: for each GPU its minor number, and the ids of its GPU instances, each with one compute instance.
type Instances = Vec<(u32, Vec<u32>)>;

fn hosts() -> impl Strategy<Value = Instances> {
    let minors = subsequence((0..16_u32).collect::<Vec<_>>(), 1..=8).prop_shuffle();
    minors.prop_flat_map(|minors| {
        let count = minors.len();
        let gis = vec(subsequence((0..14_u32).collect::<Vec<_>>(), 0..=7), count);
        gis.prop_map(move |gis| minors.clone().into_iter().zip(gis).collect())
    })
}

fn gpus(host: &Instances) -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(host.len());
    for (gpu, (minor, gis)) in gpus.iter_mut().zip(host) {
        gpu.minor = *minor;
        let uuid = |gi: u32| format!("MIG-{minor}-{gi}").into();
        let instance = |gi: &u32| GpuInstance {
            id: *gi,
            profile_id: 19,
            profile: "1g.5gb".to_owned(),
            placement: Placement { start: 0, size: 1 },
            memory: None,
            compute: vec![ComputeInstance {
                id: gi % 3,
                profile_id: 0,
                profile: "1g.5gb".to_owned(),
                placement: None,
                uuid: Some(uuid(*gi)),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        };
        gpu.mig.as_mut().unwrap().instances = gis.iter().map(instance).collect();
    }
    gpus
}

/// Numbers that follow no formula.
fn capabilities(host: &Instances) -> CapabilityMinors {
    let keys = host.iter().flat_map(|(gpu, gis)| {
        gis.iter().flat_map(|gi| [None, Some(gi % 3)].map(|ci| Capability { gpu: *gpu, gi: *gi, ci }))
    });
    let minors = keys.zip((0..).map(|number| 7 + number * 13 % 4093)).collect();
    CapabilityMinors { major: Some(CAPABILITIES), minors }
}

/// Returns each possible member of a lease on the host, with the GPU and the GPU instance that it is on.
fn members(host: &Instances, gpus: &[Gpu]) -> Vec<(LeaseMember, u32, Option<u32>)> {
    let member = |gpu: &Gpu, target: gpush_api::TargetUuid, share| LeaseMember {
        target,
        gpu_uuid: gpu.uuid.clone(),
        share,
        memory_mib: 1,
        gpu_memory_mib: 8,
    };
    let settings = MpsPolicy::default().settings;
    let mps =
        || MemberShare::Mps { percentage: settings.percentage, memory_limit_mib: None, priority: settings.priority };
    let turns = || MemberShare::Timeslice { replicas: 4, level: None, compute_mode: None };
    let mut all = Vec::new();
    for ((minor, gis), gpu) in host.iter().zip(gpus) {
        for share in [MemberShare::Whole, mps(), turns()] {
            all.push((member(gpu, gpu.uuid.as_target().clone(), share), *minor, None));
        }
        for (gi, instance) in gis.iter().zip(&gpu.mig.as_ref().unwrap().instances) {
            let target = || instance.compute[0].uuid.clone().unwrap();
            for share in [MemberShare::Mig { profile: "1g.5gb".to_owned() }, mps()] {
                all.push((member(gpu, target(), share), *minor, Some(*gi)));
            }
        }
    }
    all
}

proptest! {
    /// A lease opens the nodes of its GPUs and MIG devices, and no node of another GPU or MIG device. All other devices
    /// stay as they are.
    #[test]
    fn lease_opens_its_own_nodes_only(host in hosts(), picks in vec(any::<prop::sample::Index>(), 1..4)) {
        let (gpus, capabilities) = (gpus(&host), capabilities(&host));
        let all = members(&host, &gpus);
        let picked: Vec<_> = picks.iter().map(|pick| pick.get(&all)).collect();
        let known: Vec<&Gpu> = gpus.iter().collect();
        let nodes = nodes(picked.iter().map(|(member, ..)| member), &known, &capabilities, CharacterMajors::default()).unwrap();
        let own_gpus: BTreeSet<u32> = picked.iter().map(|(_, gpu, _)| *gpu).collect();
        let own_instances: BTreeSet<(u32, u32)> = picked.iter().filter_map(|(_, gpu, gi)| Some((*gpu, (*gi)?))).collect();
        prop_assert_eq!(&nodes.gpus, &own_gpus);
        let allowed = nodes.allowed();
        let allows = |major, minor| allowed.iter().any(|device| device.allows(major, minor));
        for minor in 0..=CONTROL_MINOR {
            prop_assert_eq!(allows(GPU_MAJOR, minor), own_gpus.contains(&minor) || minor == CONTROL_MINOR);
        }
        for (key, minor) in &capabilities.minors {
            prop_assert_eq!(allows(CAPABILITIES, *minor), own_instances.contains(&(key.gpu, key.gi)), "{:?}", key);
        }
        // The nodes of the configuration and of the monitoring of MIG.
        prop_assert!(!allows(CAPABILITIES, 1) && !allows(CAPABILITIES, 2));
        prop_assert!((0..=511).all(|major| [GPU_MAJOR, CAPABILITIES].contains(&major) || allows(major, 5)));
        prop_assert!(allowed.contains(&AllowedDevice::Blocks));
    }

    #[test]
    fn ended_lease_and_session_open_no_gpu(minor in 0..=CONTROL_MINOR, other in 0..512_u32) {
        let majors = CharacterMajors::default();
        for devices in [session_devices(), closed_devices(None, &majors), closed_devices(Some(CAPABILITIES), &majors)] {
            prop_assert!(!devices.iter().any(|device| device.allows(GPU_MAJOR, minor)));
            let is_denied = other == GPU_MAJOR || other == CAPABILITIES;
            prop_assert!(is_denied || devices.iter().any(|device| device.allows(other, minor)));
            let patterns: Vec<String> = devices.iter().map(|device| device.pattern()).collect();
            prop_assert!(denies_gpus("closed", patterns.iter().map(String::as_str)));
        }
        prop_assert!(session_devices().contains(&AllowedDevice::Major(CAPABILITIES)));
        prop_assert!(!closed_devices(Some(CAPABILITIES), &majors).contains(&AllowedDevice::Major(CAPABILITIES)));
    }
}

#[test]
fn device_has_the_notation_of_systemd() {
    let devices = [AllowedDevice::Node(195, 0), AllowedDevice::Major(13), AllowedDevice::Blocks];
    assert_eq!(devices.map(AllowedDevice::pattern), ["/dev/char/195:0", "char-13", "block-*"]);
}

#[test]
fn policy_that_allows_a_gpu_does_not_deny() {
    assert!(denies_gpus("closed", []) && denies_gpus("strict", []) && !denies_gpus("auto", []));
    assert!(denies_gpus("auto", ["char-13", "/dev/nvidia-uvm", "char-194", "block-*"]));
    for pattern in ["char-195", "char-*", "char-nvidia", "char-nvidia-frontend", "/dev/nvidia0", "/dev/char/195:0"] {
        assert!(!denies_gpus("closed", ["char-13", pattern]), "{pattern}");
    }
}

#[test]
fn list_is_compared_with_the_denied_minor_numbers() {
    let denied = [1, 2].into();
    for harmless in
        ["char-194", "/dev/nvidia0", "/dev/nvidiactl", "/dev/char/195:3", "/dev/char/1:1", "/dev/nvidia-uvm"]
    {
        assert!(denies_minors("closed", [harmless], &denied), "{harmless}");
    }
    for open in ["char-195", "char-*", "char-nvidia", "/dev/nvidia1", "/dev/char/195:2", "/dev/nvidia-modeset"] {
        assert!(!denies_minors("closed", ["char-13", open], &denied), "{open}");
    }
    assert!(!denies_minors("auto", [], &denied) && denies_minors("auto", ["char-13"], &denied));
}

#[test]
fn member_without_capability_nodes_is_an_error() {
    let host = vec![(3, vec![7])];
    let gpus = gpus(&host);
    let known: Vec<&Gpu> = gpus.iter().collect();
    let all = members(&host, &gpus);
    let (mig, ..) = all.iter().find(|(_, _, gi)| gi.is_some()).unwrap();
    let none = CapabilityMinors { major: Some(CAPABILITIES), ..CapabilityMinors::default() };
    let error = nodes([mig], &known, &none, CharacterMajors::default()).unwrap_err();
    assert_eq!(error.to_string(), "the driver does not report the capability node of MIG device 7/1 of GPU 0");
    // A driver without such nodes checks the rights of the files in /proc.
    assert_eq!(nodes([mig], &known, &CapabilityMinors::default(), CharacterMajors::default()).unwrap().own().len(), 2);
    assert!(matches!(nodes([mig], &[], &none, CharacterMajors::default()), Err(NoDeviceAccess::UnknownGpu(_))));
    let gone = LeaseMember { target: "MIG-9".into(), ..mig.clone() };
    assert!(matches!(
        nodes([&gone], &known, &none, CharacterMajors::default()),
        Err(NoDeviceAccess::UnknownDevice(..))
    ));
}

#[test]
fn minor_is_read_from_the_access_file() {
    let text = "DeviceFileMinor: 30\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
    assert_eq!(CapabilityMinors::minor_in(text), Some(30));
    assert_eq!(CapabilityMinors::minor_in("DeviceFileMode: 292\n"), None);
}

#[test]
fn slurm_jobs_open_all_devices_but_the_denied_gpus() {
    let devices = job_devices(&[0, 3].into());
    let allows = |major: u32, minor: u32| devices.iter().any(|device| device.allows(major, minor));
    assert!(!allows(GPU_MAJOR, 0) && !allows(GPU_MAJOR, 3));
    assert!(allows(GPU_MAJOR, 1) && allows(GPU_MAJOR, CONTROL_MINOR) && allows(1, 3) && allows(CAPABILITIES, 7));
}
