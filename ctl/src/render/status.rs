//! `gpushctl status`: gpushd, the driver, all GPUs, and hints for problems.

use gpush_api::{
    Code, ComputeMode, Gpu, GpuIndex, GpuState, Health, HealthStatus, Lease, MigDevice, Mode, MpsDaemon, Version,
};
use serde::Serialize;

use super::{
    Appearance,
    appearance::{BAD, NOTE, QUIET, STRONG, count, paint, width},
    gpu,
    mps::list as mps,
    names::gpu_numbers,
    sensors,
    slices::{self, Use},
};

/// The output of `gpushctl status --json`. It combines several responses of the API.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Status {
    #[serde(rename = "gpushd")]
    pub(crate) version: Version,
    pub(crate) health: Health,
    pub(crate) gpus: Vec<Gpu>,
    /// The MIG devices of these GPUs with their use. Empty if no GPU has MIG instances.
    #[serde(rename = "mig_devices", skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices: Vec<MigDevice>,
    /// The MPS daemons of these GPUs and their MIG devices. Empty if no GPU uses MPS.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) mps: Vec<MpsDaemon>,
    /// The leases that have not ended, in order of arrival. Empty if no GPU can be leased.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) leases: Vec<Lease>,
}

impl Status {
    /// Creates the status of a host whose GPUs cannot be read.
    pub(crate) const fn without_gpus(version: Version, health: Health) -> Self {
        Self { version, health, gpus: Vec::new(), devices: Vec::new(), mps: Vec::new(), leases: Vec::new() }
    }

    /// Returns the MIG devices of a GPU. Leaves out those of a lost GPU, because its present instances are not known,
    /// and GPU instances without compute instance, because no program can use them.
    pub(crate) fn devices_of(&self, gpu: &Gpu) -> impl Iterator<Item = &MigDevice> {
        let is_known = gpu.state != GpuState::Lost;
        let its = self.devices.iter().filter(move |device| is_known && device.gpu_uuid == gpu.uuid);
        its.filter(|device| device.ci.is_some())
    }

    /// Returns how a whole GPU is used.
    pub(crate) fn use_of(&self, gpu: &Gpu) -> Use {
        Use::of_gpu(gpu, &mps::of(gpu, &self.mps))
    }

    /// Returns the MIG devices, MPS daemons and leases on a GPU.
    fn users_of(&self, gpu: &Gpu) -> gpu::Users<'_> {
        let devices = self.devices.iter().filter(|device| device.gpu_uuid == gpu.uuid);
        gpu::Users { devices: devices.collect(), daemons: mps::of(gpu, &self.mps), leases: &self.leases }
    }
}

/// Draws the status. GPUs that differ only in index, address and UUIDs are drawn once. With `brief`, each
/// drawing is one line with notes below it, and its GPUs may also differ in used memory.
pub(crate) fn status(status: &Status, brief: bool, look: &Appearance) -> String {
    draw(status, brief, false, look)
}

/// Draws the status with sensors, for `-o wide`. Draws each GPU separately, because its sensors have
/// other values.
pub(crate) fn status_with_sensors(status: &Status, brief: bool, look: &Appearance) -> String {
    draw(status, brief, true, look)
}

/// GPUs that are drawn together.
struct Group<'s> {
    first: &'s Gpu,
    /// The lines of the first GPU, with its UUIDs.
    rows: &'s [gpu::Row],
    /// The drawing of all these GPUs.
    block: Vec<String>,
    others: Vec<&'s Gpu>,
}

fn draw(status: &Status, brief: bool, with_sensors: bool, look: &Appearance) -> String {
    let mut out = header(status, look);
    let gpus: Vec<Gpu> = status.gpus.iter().map(|gpu| with_servers(gpu, &status.mps)).collect();
    let rows: Vec<_> = gpus.iter().map(|gpu| gpu::rows(gpu, &status.users_of(gpu), look)).collect();
    let columns = gpu::Columns::of(rows.iter().flatten(), look);
    let drawn = |gpu: &Gpu, rows: &[gpu::Row]| {
        let users = status.users_of(gpu);
        if brief { gpu::brief_block(gpu, &users, look) } else { gpu::block(gpu, rows, &users, columns, look) }
    };
    let usage = |gpu: &Gpu| if brief { gpu::usage(gpu, &status.users_of(gpu)) } else { String::new() };
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (gpu, rows) in status.gpus.iter().zip(&rows) {
        let common: Vec<gpu::Row> = rows.iter().map(gpu::Row::without_uuid).collect();
        let block = drawn(gpu, &common);
        let is_same = |group: &&mut Group<'_>| {
            !with_sensors
                && gpu::is_alike(group.first, gpu)
                && (brief || gpu::has_same_memory(group.first, gpu))
                && usage(group.first) == usage(gpu)
                && group.block[1..] == block[1..]
        };
        match groups.iter_mut().find(is_same) {
            Some(group) => group.others.push(gpu),
            None => groups.push(Group { first: gpu, rows, block, others: Vec::new() }),
        }
    }
    if brief {
        out.push(String::new());
    }
    for Group { first: gpu, rows, block, others } in groups {
        let mut block = if others.is_empty() { drawn(gpu, rows) } else { block };
        gpu::group(&mut block, gpu, &others, &usage(gpu), look);
        if with_sensors {
            let line = format!("{}{}", " ".repeat(gpu::INDENT), sensors::line(&gpu.sensors));
            block.insert(1, paint(QUIET, &line));
        }
        if !brief {
            out.push(String::new());
        }
        out.extend(block);
    }
    let mut next = next_steps(&status.gpus, look);
    let daemons = status.gpus.iter().flat_map(|gpu| mps::of(gpu, &status.mps));
    next.extend(mps::remedies(daemons, look));
    if !next.is_empty() {
        out.push(String::new());
        out.extend(next);
    }
    out.join("\n") + "\n"
}

/// Returns the GPU, with descriptions of its MPS servers in place of their command lines, which say less.
fn with_servers(gpu: &Gpu, daemons: &[MpsDaemon]) -> Gpu {
    let mut gpu = gpu.clone();
    let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
    let inner = instances.flat_map(|one| {
        one.processes.iter_mut().chain(one.compute.iter_mut().flat_map(|compute| &mut compute.processes))
    });
    for process in gpu.processes.iter_mut().chain(inner) {
        let serves =
            |daemon: &&MpsDaemon| daemon.servers.iter().any(|server| server.pid.is_some() && server.pid == process.pid);
        let Some(daemon) = daemons.iter().find(serves) else { continue };
        let target = if daemon.gpu.is_some() { daemon.label() } else { daemon.target.clone() };
        process.command = Some(format!("MPS server of {target}"));
    }
    gpu
}

/// Draws the heading: the versions, the numbers of GPUs and MIG devices, and whether they are simulated.
pub(crate) fn title(status: &Status, look: &Appearance) -> Vec<String> {
    let mut words = vec![(STRONG, format!("gpushd {}", look.clean(&status.version.agent)))];
    let mut out = Vec::new();
    match &status.version.driver {
        Some(driver) => {
            words.push((QUIET, format!("driver {}", look.clean(&driver.version))));
            words.push((QUIET, format!("CUDA {}", look.clean(&driver.cuda))));
        }
        None if status.health.maintenance.is_some() => words.push((NOTE, "in maintenance".to_owned())),
        None => words.push((BAD, "no driver".to_owned())),
    }
    let left = words.iter().map(|(_, text)| width(text)).sum::<usize>() + 2 * (words.len() - 1);
    let line = words.iter().map(|(style, text)| paint(*style, text)).collect::<Vec<_>>().join("  ");
    let summary = summary(status);
    let edge = slices::edge(gpu::INDENT, look);
    if left + 2 + width(&summary) <= edge {
        out.push(format!("{line}{}{summary}", " ".repeat(edge - left - width(&summary))));
    } else {
        out.extend([line, summary]);
    }
    let simulated = status.health.simulated || status.version.driver.as_ref().is_some_and(|d| d.simulated);
    if simulated {
        let text = look.wrap("", "SIMULATED: these GPUs are gpush's simulator, no hardware is behind them");
        out.extend(text.iter().map(|line| paint(NOTE.bold(), line)));
    }
    out
}

pub(crate) fn header(status: &Status, look: &Appearance) -> Vec<String> {
    let mut out = title(status, look);
    match status.health.status {
        HealthStatus::Ok => {}
        HealthStatus::Degraded => {
            for cause in &status.health.errors {
                out.extend(look.wrap("! ", &look.clean(&cause.message)).iter().map(|l| paint(BAD, l)));
                // The reasons for the state of a GPU are drawn with that GPU, so leave them out here.
                let below = status.gpus.iter().any(|gpu| gpu.reasons == cause.causes);
                for deeper in cause.causes.iter().filter(|_| !below) {
                    out.extend(look.wrap("  cause: ", &look.clean(deeper)));
                }
                if let Some(outcome) = &cause.outcome {
                    out.extend(look.wrap("  outcome: ", &look.clean(outcome)));
                }
                if let Some(hint) = &cause.hint {
                    out.extend(look.wrap("  hint: ", &look.clean(hint)));
                }
            }
        }
    }
    // If gpushd could not load the file, an error above says so.
    let is_reported = status.health.errors.iter().any(|error| error.code == Code::ConfigInvalid);
    if status.health.config_file_changed && !is_reported {
        out.extend(look.wrap("! ", FILE_CHANGED).iter().map(|line| paint(NOTE, line)));
    }
    out
}

/// Says that gpushd uses an earlier content of the config file.
pub(crate) const FILE_CHANGED: &str = "the config file has changed since gpushd loaded it: `gpushctl config check` \
    checks the file, and `gpushctl apply` loads and applies it (administrator)";

/// Counts the GPUs and MIG devices, and how many of both are in use. Of a GPU with MIG on, only the MIG devices count
/// as in use.
fn summary(status: &Status) -> String {
    let devices: Vec<&MigDevice> = status.gpus.iter().flat_map(|gpu| status.devices_of(gpu)).collect();
    let is_whole = |gpu: &&Gpu| gpu.state != GpuState::Lost && gpu.mig.as_ref().is_none_or(|mig| !mig.enabled);
    let whole = status.gpus.iter().filter(is_whole).map(|gpu| status.use_of(gpu));
    let uses: Vec<Use> = whole.chain(devices.iter().map(|device| Use::of_device(Some(device)))).collect();
    let number = |usage: Use| uses.iter().filter(|one| **one == usage).count();
    let mut text = count(status.gpus.len(), "GPU");
    if !devices.is_empty() {
        text += &format!(", {}", count(devices.len(), "MIG device"));
    }
    if !uses.is_empty() {
        text += &format!(", {} in use", number(Use::Busy));
    }
    for usage in [Use::Granted, Use::Reserved] {
        if number(usage) > 0 {
            text += &format!(", {} {}", number(usage), usage.word());
        }
    }
    text
}

/// Returns the commands with which the user can solve the problems of these GPUs, each only once.
fn next_steps(gpus: &[Gpu], look: &Appearance) -> Vec<String> {
    let mut out = Vec::new();
    let mut step = |which: &[GpuIndex], one: &str, many: &str, command: &str| {
        if !which.is_empty() {
            let text = format!("{} {}: {command}", gpu_numbers(which), if which.len() == 1 { one } else { many });
            out.extend(look.wrap("", &text).iter().map(|line| paint(NOTE, line)));
        }
    };
    let those = |test: &dyn Fn(&Gpu) -> bool| gpus.iter().filter(|g| test(g)).map(|g| g.index).collect::<Vec<_>>();
    // An apply does not reset a compute mode that another program has set. The drift itself names the command.
    let is_foreign = |g: &Gpu| match g.compute_mode {
        Some(ComputeMode::Prohibited) => true,
        Some(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread) => g.mode == Mode::Exclusive,
        Some(ComputeMode::Default) | None => false,
    };
    let is_only_compute_mode = |g: &Gpu| is_foreign(g) && g.drift.len() == 1 && g.pending.is_empty();
    // The drift of a GPU whose MIG mode waits for a reboot ends with the reboot.
    let drifts = |g: &Gpu| {
        !g.drift.is_empty() && g.state == GpuState::Ready && !g.waits_for_reboot() && !is_only_compute_mode(g)
    };
    let wants = |g: &Gpu| g.mode == Mode::Mig;
    let drifting = those(&|g| drifts(g) && (g.mig.is_some() || !wants(g)));
    let dry_run = format!("`gpushctl apply {} --dry-run` shows the changes", list(&drifting));
    step(&drifting, "differs from its desired state", "differ from their desired state", &dry_run);
    let uncut = those(&|g| drifts(g) && wants(g) && g.mig.is_none());
    let rule = "change `match` of the rule with mode `mig`; `gpushctl config show` shows the rules";
    step(&uncut, "does not support MIG", "do not support MIG", rule);
    let rebooting = those(&Gpu::waits_for_reboot);
    step(&rebooting, "waits for a reboot", "wait for a reboot", "reboot this virtual machine");
    let resets = |g: &Gpu| g.mig.as_ref().is_some_and(|mig| mig.reset_pending) && !g.waits_for_reboot();
    let pending = those(&|g| resets(g) && !drifting.contains(&g.index));
    let reset = format!("`gpushctl gpu reset {}` (administrator)", list(&pending));
    step(&pending, "waits for a reset", "wait for a reset", &reset);
    out
}

fn list(gpus: &[GpuIndex]) -> String {
    gpus.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    /// Fault: for a compute mode that another program had set, the last lines proposed an `apply` that changed nothing.
    #[test]
    fn apply_is_proposed_only_for_drift_that_it_ends() {
        let look = fixtures::look(100, Charset::Ascii);
        let mut gpu = fixtures::gpu(3, "A100", 40_960, None);
        gpu.mode = Mode::Exclusive;
        gpu.drift = vec!["it is shared through MPS, but its rule no longer says so".to_owned()];
        assert!(next_steps(std::slice::from_ref(&gpu), &look)[0].contains("`gpushctl apply 3 --dry-run`"));
        gpu.compute_mode = Some(ComputeMode::Prohibited);
        gpu.drift = vec!["the compute mode is `PROHIBITED`, so no program can use the GPU".to_owned()];
        assert_eq!(next_steps(&[gpu], &look), [""; 0]);
    }
}
