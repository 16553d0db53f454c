//! Metrics of GPUs, MIG devices and MPS targets.

use gpush_api::{ClockLimit, DeviceActivity, Gpu, GpuState, GpuUsage, HostUsage, MemberShare, MpsState, TargetUuid};
use gpush_openmetrics::Family;

use crate::state::HostState;

/// Returns the metrics of all GPUs.
pub(super) fn families(host: &HostState, usage: &HostUsage) -> Vec<Family> {
    let mut families = Families::default();
    for one in &host.gpus {
        let gpu = &one.gpu;
        families.add_gpu(gpu);
        if let Some(used) = usage.gpu_usage.iter().find(|used| used.gpu_uuid == gpu.uuid) {
            families.add_usage(gpu, used);
        }
    }
    families.add_mps(host);
    families.into_vec()
}

macro_rules! families {
    ($($field:ident: $kind:ident $name:literal, $help:literal;)*) => {
        /// The families that this module fills.
        struct Families {
            $($field: Family,)*
        }

        impl Default for Families {
            fn default() -> Self {
                Self { $($field: Family::$kind($name, $help),)* }
            }
        }

        impl Families {
            fn into_vec(self) -> Vec<Family> {
                vec![$(self.$field),*]
            }
        }
    };
}

families! {
    info: gauge "gpush_gpu_info", "Identity of a GPU.";
    state: gauge "gpush_gpu_state", "State of a GPU: 1 for its present state.";
    memory_total: gauge "gpush_gpu_memory_total_bytes", "Memory of a GPU.";
    memory_used: gauge "gpush_gpu_memory_used_bytes", "Used memory of a GPU.";
    sampled: gauge "gpush_gpu_sample_timestamp_seconds", "Time of the last sample of a GPU.";
    utilization: gauge "gpush_gpu_utilization_ratio", "Part of the time in which a kernel ran. Absent with MIG.";
    sm: gauge "gpush_gpu_sm_activity_ratio", "Active streaming multiprocessors.";
    occupancy: gauge "gpush_gpu_sm_occupancy_ratio", "Occupancy of the streaming multiprocessors.";
    tensor: gauge "gpush_gpu_tensor_activity_ratio", "Active tensor cores.";
    dram: gauge "gpush_gpu_dram_activity_ratio", "Used memory bandwidth.";
    power: gauge "gpush_gpu_power_watts", "Power of a board.";
    power_limit: gauge "gpush_gpu_power_limit_watts", "Power limit of a board.";
    energy: counter "gpush_gpu_energy_joules", "Energy of a board since the driver was loaded or the GPU was reset.";
    unattributed: counter "gpush_gpu_energy_unattributed_joules", "Energy of a board that no lease used.";
    temperature: gauge "gpush_gpu_temperature_celsius", "Temperature of a GPU.";
    clock: gauge "gpush_gpu_clock_hertz", "Clock of a GPU.";
    throttle: gauge "gpush_gpu_throttle", "Whether this keeps the clocks of a GPU below their maximum.";
    slices: gauge "gpush_slices", "Compute slices of a GPU by use: `idle_leased` is a part of `leased`.";
    mig_info: gauge "gpush_mig_info", "Identity of a MIG device.";
    mig_memory: gauge "gpush_mig_memory_used_bytes", "Used memory of a GPU instance.";
    mig_memory_total: gauge "gpush_mig_memory_total_bytes", "Memory of a GPU instance.";
    mig_busy: gauge "gpush_mig_graphics_activity_ratio", "Part of the time in which a kernel ran in a GPU instance.";
    mig_sm: gauge "gpush_mig_sm_activity_ratio", "Active streaming multiprocessors of a GPU instance.";
    mig_occupancy: gauge "gpush_mig_sm_occupancy_ratio", "Occupancy of the streaming multiprocessors of a GPU instance.";
    mig_tensor: gauge "gpush_mig_tensor_activity_ratio", "Active tensor cores of a GPU instance.";
    mig_dram: gauge "gpush_mig_dram_activity_ratio", "Used memory bandwidth of a GPU instance.";
    mps_state: gauge "gpush_mps_state", "State of an MPS daemon: 1 for its present state.";
    mps_clients: gauge "gpush_mps_clients", "Clients of an MPS daemon.";
    mps_shares: gauge "gpush_mps_shares", "Leases of an MPS daemon.";
    mps_given: gauge "gpush_mps_leased_ratio", "Active threads that the leases of an MPS daemon have together.";
}

impl Families {
    fn add_gpu(&mut self, gpu: &Gpu) {
        let uuid = gpu.uuid.as_str();
        let (index, minor) = (gpu.index.to_string(), gpu.minor.to_string());
        let labels = [
            ("gpu", &*index),
            ("uuid", uuid),
            ("pci", &*gpu.pci),
            ("minor", &*minor),
            ("name", &*gpu.name),
            ("mode", gpu.mode.name()),
        ];
        self.info.add(labels, 1.0);
        for state in GpuState::ALL {
            let value = if gpu.state == state { 1.0 } else { 0.0 };
            self.state.add([("uuid", uuid), ("state", state.name())], value);
        }
        // A GPU that gpushd has never read has no memory.
        let total = Some(gpu.memory.total_mib).filter(|total| *total > 0);
        self.memory_total.add([("uuid", uuid)], bytes(total));
        for instance in gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances) {
            for device in &instance.compute {
                let (gi, ci) = (instance.id.to_string(), device.id.to_string());
                let start = instance.placement.start.to_string();
                let labels = [
                    ("uuid", uuid),
                    ("gpu_instance_id", &*gi),
                    ("compute_instance_id", &*ci),
                    ("mig_uuid", device.uuid.as_ref().map_or("", |uuid| uuid.as_str())),
                    ("profile", &*device.profile),
                    ("start", &*start),
                ];
                self.mig_info.add(labels, 1.0);
            }
        }
    }

    fn add_usage(&mut self, gpu: &Gpu, used: &GpuUsage) {
        let uuid = gpu.uuid.as_str();
        let label = || [("uuid", uuid)];
        #[expect(clippy::cast_precision_loss, reason = "a time in this millennium")]
        let sampled = used.sampled_at.map(|at| at.as_millisecond() as f64 / 1000.0);
        self.sampled.add(label(), sampled);
        self.memory_used.add(label(), bytes(used.memory_used_mib));
        let DeviceActivity { busy, sm_activity, occupancy, tensor_activity, dram_activity } = used.activity;
        self.utilization.add(label(), busy);
        self.sm.add(label(), sm_activity);
        self.occupancy.add(label(), occupancy);
        self.tensor.add(label(), tensor_activity);
        self.dram.add(label(), dram_activity);
        self.power.add(label(), used.power_w);
        self.power_limit.add(label(), used.power_limit_w);
        self.energy.add(label(), used.energy_j);
        self.unattributed.add(label(), used.energy_j.map(|_| used.unattributed_j));
        for (sensor, celsius) in [("core", used.temperature_c), ("memory", used.memory_temperature_c)] {
            self.temperature.add([("uuid", uuid), ("sensor", sensor)], celsius.map(f64::from));
        }
        for (domain, mhz) in [("sm", used.sm_clock_mhz), ("memory", used.memory_clock_mhz)] {
            self.clock.add([("uuid", uuid), ("domain", domain)], mhz.map(|mhz| f64::from(mhz) * 1e6));
        }
        if let Some(limited_by) = &used.limited_by {
            for limit in ClockLimit::ALL {
                let value = if limited_by.contains(&limit) { 1.0 } else { 0.0 };
                self.throttle.add([("uuid", uuid), ("reason", limit.name())], value);
            }
        }
        let slices = gpu.mig.as_ref().map_or(1.0, |mig| f64::from(mig.compute_slices.max(1)));
        let free = used.leased.zip(used.unusable).map(|(leased, unusable)| (1.0 - leased - unusable).max(0.0));
        let parts =
            [("free", free), ("leased", used.leased), ("idle_leased", used.unused), ("unusable", used.unusable)];
        for (state, part) in parts {
            // A part is an integer number of units, so a slice is not exact.
            let slices = part.map(|part| (part * slices * 1e6).round() / 1e6);
            self.slices.add([("uuid", uuid), ("state", state)], slices);
        }
        for instance in &used.instance_usage {
            let gi = instance.gi.to_string();
            let labels = || [("uuid", uuid), ("gpu_instance_id", &*gi)];
            self.mig_memory.add(labels(), bytes(instance.memory_used_mib));
            self.mig_memory_total.add(labels(), bytes(instance.memory_total_mib));
            self.mig_occupancy.add(labels(), instance.activity.occupancy);
            self.mig_busy.add(labels(), instance.activity.busy);
            self.mig_sm.add(labels(), instance.activity.sm_activity);
            self.mig_tensor.add(labels(), instance.activity.tensor_activity);
            self.mig_dram.add(labels(), instance.activity.dram_activity);
        }
    }

    fn add_mps(&mut self, host: &HostState) {
        for target in host.mps.all() {
            let (uuid, name) = (target.gpu_uuid.as_str(), target.name());
            let state = target.report.shown_state();
            for one in MpsState::ALL {
                let value = if one == state { 1.0 } else { 0.0 };
                self.mps_state.add([("uuid", uuid), ("target", &*name), ("state", one.name())], value);
            }
            #[expect(clippy::cast_precision_loss, reason = "a daemon has at most 60 clients")]
            let clients = target.report.clients.len() as f64;
            self.mps_clients.add([("uuid", uuid), ("target", &*name)], clients);
            let shares: Vec<u16> = mps_shares(host, &target.uuid).collect();
            #[expect(clippy::cast_precision_loss, reason = "a daemon has few leases")]
            self.mps_shares.add([("uuid", uuid), ("target", &*name)], shares.len() as f64);
            let tenths: u32 = shares.into_iter().map(u32::from).sum();
            // A sum of no decimals would be -0.
            let given = f64::from(tenths) / 1000.0;
            self.mps_given.add([("uuid", uuid), ("target", &*name)], given);
        }
    }
}

/// Returns the active thread percentages of the leases on an MPS target, in tenths of a percent.
fn mps_shares<'a>(host: &'a HostState, target: &'a TargetUuid) -> impl Iterator<Item = u16> {
    let members = host.leases.holding().flat_map(|lease| &lease.record.members);
    members.filter(move |member| member.target == *target).filter_map(|member| match &member.share {
        MemberShare::Mps { percentage, .. } => Some(percentage.tenths()),
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => None,
    })
}

fn bytes(mib: Option<u64>) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a GPU has fewer than 2^33 MiB")]
    mib.map(|mib| mib as f64 * 1_048_576.0)
}
