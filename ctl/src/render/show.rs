//! All details of a GPU: `gpu show`.

use gpush_api::{
    Architecture, ComputeMode, DeviceUse, Gpu, GpuState, Lease, Mig, MigDevice, Mode, MpsDaemon, NvLink, Process,
    text::local_time,
};
use gpush_core::sharing;

use super::{
    Appearance,
    appearance::{QUIET, STRONG, count, gib, pad, paint, product},
    gpu, gpu_notes,
    lease::below as lease,
    mps::list as mps,
    names, process_names, profiles, sensors, slices,
    table::{Align, Narrow, fitted},
    timeslice,
};

/// Draws `gpushctl gpu show`. `listed`, `daemons` and `leases` contain all MIG devices, MPS daemons and leases of the
/// host.
pub(crate) fn gpu(
    one: &Gpu,
    listed: &[MigDevice],
    daemons: &[MpsDaemon],
    leases: &[Lease],
    look: &Appearance,
) -> String {
    let listed: Vec<&MigDevice> = listed.iter().filter(|device| device.gpu_uuid == one.uuid).collect();
    let mut out = Vec::new();
    out.push(format!("{}  {}", paint(STRONG, &format!("GPU {}", one.index)), look.clean(product(&one.name))));
    let mut fact = |name: &str, value: String| {
        let first = format!("  {}", pad(name, 14));
        let lines = look.wrap(&first, &value);
        out.extend(lines.into_iter().map(|line| match line.strip_prefix(&first) {
            Some(rest) => format!("{}{rest}", paint(QUIET, &first)),
            None => line,
        }));
    };
    fact("UUID", look.clean(one.uuid.as_str()));
    fact("PCI address", look.clean(&one.pci));
    fact("device", format!("/dev/nvidia{}", one.minor));
    fact("architecture", architecture(one.architecture).to_owned());
    fact(
        "memory",
        format!(
            "{} of {} GiB in use, including what the driver reserves",
            gib(one.memory.used_mib),
            gib(one.memory.total_mib)
        ),
    );
    fact("state", names::state(one.state).0.to_owned());
    let rule = one.rule.as_ref().map(|rule| {
        // If a rule has no name, gpushd already calls it `rule 1`, so do not add the word again.
        let word = if rule.starts_with("rule ") { "" } else { "rule " };
        format!(", by {word}{}", look.clean(rule))
    });
    fact("mode", format!("{}{}", one.mode.name(), rule.unwrap_or_default()));
    if let Some(access) = &one.access {
        fact("leases for", look.clean(&access.to_string()));
    }
    if let Some(layout) = &one.layout {
        fact("layout", look.clean(&layout.join(", ")));
    }
    fact("MIG", mig(one.mig.as_ref()));
    match one.compute_mode {
        None | Some(ComputeMode::Default) => {}
        Some(mode) => fact("compute mode", format!("{mode}: {}", contexts(mode))),
    }
    for (name, text) in one.timeslice.iter().flat_map(|turns| timeslice::facts(turns, look)) {
        fact(name, text);
    }
    for (name, text) in sensors::facts(&one.sensors) {
        fact(name, text);
    }
    if let Some(links) = &one.nvlink {
        fact("NVLink", nvlink(links, look));
    }
    let read = format!("{} ({})", look.ago(one.observed_at), local_time(one.observed_at));
    if one.stale {
        fact("last read", format!("{read}; the values may have changed since"));
    } else {
        fact("read", read);
    }
    out.extend(gpu_notes::of(one, look));
    let mut text = out.join("\n") + "\n";

    if let Some(mig) = one.mig.as_ref().filter(|m| m.enabled) {
        text.push('\n');
        text += &section("MIG devices");
        for line in slices::of(one, mig, &listed, gpu::INDENT, look) {
            text += &line;
            text.push('\n');
        }
        text += &devices(one, &listed, look);
    }
    let daemons = mps::of(one, daemons);
    if !daemons.is_empty() {
        text += &format!("\n{}", section("MPS"));
        text += &(mps::below(&daemons, gpu::INDENT, look).join("\n") + "\n");
        text += &mps::more(&daemons, look);
    }
    let leases = lease::each(one, leases, gpu::INDENT, look);
    if !leases.is_empty() {
        text += &format!("\n{}{}\n", section("Leases"), leases.join("\n"));
    }
    let processes = processes(one, look);
    if !processes.is_empty() {
        text.push('\n');
        text += &section("Processes");
        text += &processes;
    }
    if one.mig.as_ref().is_some_and(|m| !m.profiles.is_empty()) {
        text.push('\n');
        text += &section("Profiles");
        text += &profiles::with_compute(one, gpu::INDENT, look);
    }
    text
}

fn section(name: &str) -> String {
    paint(STRONG, name) + "\n"
}

fn mig(mig: Option<&Mig>) -> String {
    match mig {
        None => "not supported by this GPU".to_owned(),
        Some(mig) => {
            let mode = if mig.enabled { "on" } else { "off" };
            format!(
                "{mode}; {} memory slices, {} compute slices, {}",
                mig.memory_slices,
                mig.compute_slices,
                count(mig.instances.len(), "GPU instance")
            )
        }
    }
}

fn nvlink(of: &NvLink, look: &Appearance) -> String {
    let switches = of.switched.then(|| "NVSwitches".to_owned());
    let ends: Vec<String> = switches.into_iter().chain(of.peers.iter().map(|peer| look.clean(peer))).collect();
    format!("{} to {}", count(of.links as usize, "link"), ends.join(", "))
}

/// Describes which processes may create a CUDA context in a compute mode.
fn contexts(mode: ComputeMode) -> &'static str {
    match mode {
        ComputeMode::Default => "programs share it",
        ComputeMode::ExclusiveThread => "one thread of one program at a time",
        ComputeMode::Prohibited => "no program can use it",
        ComputeMode::ExclusiveProcess => "one program at a time, or the clients of one MPS server",
    }
}

fn architecture(of: Architecture) -> &'static str {
    match of {
        Architecture::Legacy => "before Volta",
        Architecture::Volta => "Volta",
        Architecture::Turing => "Turing",
        Architecture::Ampere => "Ampere",
        Architecture::Ada => "Ada Lovelace",
        Architecture::Hopper => "Hopper",
        Architecture::Blackwell => "Blackwell",
        Architecture::Unknown => "not known",
    }
}

/// Draws a table with one line for each MIG device: placement, ids, use and UUID.
fn devices(gpu: &Gpu, listed: &[&MigDevice], look: &Appearance) -> String {
    use Align::{Left, Right};
    let columns = [("INSTANCE", Left), ("GI", Right), ("CI", Right), ("GIB", Right), ("USE", Left), ("MIG UUID", Left)];
    let mut rows = Vec::new();
    for instance in gpu.mig.iter().flat_map(|m| &m.instances) {
        let at = format!("{}@{}", look.clean(&instance.profile), instance.placement.start);
        let memory = instance.memory.map_or_else(|| "-".to_owned(), |m| gib(m.total_mib));
        let mut push = |what: String, ci: String, usage: String, uuid: String| {
            rows.push(vec![what, instance.id.to_string(), ci, memory.clone(), usage, uuid]);
        };
        if instance.compute.is_empty() {
            push(at, "-".into(), DeviceUse::Reserved.name().into(), "no compute instance".into());
        }
        for compute in &instance.compute {
            let what = look.clean(&sharing::device_name(instance, compute));
            let device = listed.iter().find(|one| (one.gi, one.ci) == (instance.id, Some(compute.id)));
            let usage = device.map_or("-", |one| one.usage.name()).to_owned();
            let uuid = compute.uuid.as_ref().map_or_else(|| "-".to_owned(), |u| look.clean(u.as_str()));
            push(what, compute.id.to_string(), usage, uuid);
        }
    }
    if rows.is_empty() {
        return none_yet(gpu, look);
    }
    // If there is not enough room, leave out the memory before shortening a UUID, because users copy UUIDs.
    let narrow = Narrow { uuids: Some("MIG UUID"), ..Narrow::spare(&["GIB"]) };
    fitted(&columns, rows, narrow, gpu::INDENT, look)
}

/// Says that a GPU has no instances, and with which command to create some.
fn none_yet(gpu: &Gpu, look: &Appearance) -> String {
    let index = gpu.index;
    let text = match (&gpu.rule, gpu.mode) {
        _ if !can_change(gpu.state) => {
            format!("none: gpushd does not change a GPU in the state `{}`", names::state(gpu.state).0)
        }
        (Some(_), Mode::Mig) => {
            format!("none yet: `gpushctl apply {index}` (administrator) creates the instances of the config")
        }
        (None, _) => {
            let entry = example(gpu).unwrap_or("ENTRIES");
            format!("none yet: `gpushctl mig add {entry} -g {index}` (administrator) creates instances")
        }
        (Some(rule), mode) => {
            // If a rule has no name, gpushd already calls it `rule 1`, so do not add the word
            // again.
            let word = if rule.starts_with("rule ") { "" } else { "rule " };
            format!("none: {word}{rule} of the config has mode `{}`", mode.name())
        }
    };
    look.wrap("  ", &look.clean(&text)).join("\n") + "\n"
}

/// Returns whether gpushd may change a GPU in this state, now or soon.
fn can_change(state: GpuState) -> bool {
    match state {
        GpuState::Ready | GpuState::Changing | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Unknown | GpuState::Held | GpuState::Maintenance | GpuState::Lost => false,
    }
}

/// Returns a profile for an example. Prefers the largest profile of which a GPU can have several instances.
fn example(gpu: &Gpu) -> Option<&str> {
    let profiles = &gpu.mig.as_ref()?.profiles;
    let several = profiles.iter().filter(|profile| profile.max > 1).max_by_key(|profile| profile.slices);
    several.or(profiles.first()).map(|profile| profile.name.as_str())
}

/// Draws all processes of a GPU, each with its instance.
fn processes(gpu: &Gpu, look: &Appearance) -> String {
    let mut lines = Vec::new();
    let mut push = |place: &str, process: &Process| {
        let memory = process.memory_mib.map_or_else(|| "-".to_owned(), |m| format!("{} GiB", gib(m)));
        lines.push((
            place.to_owned(),
            process_names::kind(process.kind),
            memory,
            process_names::process(process, look),
        ));
    };
    gpu.processes.iter().for_each(|p| push("whole GPU", p));
    for instance in gpu.mig.iter().flat_map(|m| &m.instances) {
        let at = format!("{}@{}", look.clean(&instance.profile), instance.placement.start);
        instance.processes.iter().for_each(|p| push(&at, p));
        for compute in &instance.compute {
            let place =
                if compute.profile == instance.profile { at.clone() } else { format!("{at} CI {}", compute.id) };
            compute.processes.iter().for_each(|p| push(&place, p));
        }
    }
    let place = lines.iter().map(|l| super::appearance::width(&l.0)).max().unwrap_or(0);
    let mut out = String::new();
    for (at, kind, memory, who) in lines {
        let left = format!("  {}  {}  {memory:>9}  ", pad(&at, place), pad(kind, 10));
        let room = look.width.saturating_sub(super::appearance::width(&left));
        out += &format!("{left}{}\n", look.fit(&who, room));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn lost_gpu_without_instances_suggests_no_change() {
        let mut gpu = fixtures::gpu(3, "NVIDIA H100 80GB HBM3", 81_920, Some(fixtures::mig(8, Vec::new())));
        let look = fixtures::look(80, Charset::Ascii);
        assert!(none_yet(&gpu, &look).contains("gpushctl"));
        gpu.state = GpuState::Lost;
        assert_eq!(none_yet(&gpu, &look), "  none: gpushd does not change a GPU in the state `lost`\n");
    }
}
