//! `gpush-sim show`: prints a host as a drawing or as JSON.

use std::fmt::Write as _;

use silicon::machine::{COMPUTE_MODES, Gpu, Machine, Part, ProcessKind, Slot, Timeslice};
use silicon::{Host, Return};

/// Width of a memory slice in a drawing, in columns.
const SLICE: usize = 8;

pub(crate) fn presets() -> String {
    let mut text = String::new();
    let _infallible = writeln!(text, "presets:");
    for preset in gpush_geometry::PRESETS {
        let _infallible = writeln!(text, "  {:<16} {}", preset.name, preset.about);
    }
    let _infallible = writeln!(text, "models, for a TOML description:");
    for key in gpush_geometry::KEYS {
        if let Some(model) = gpush_geometry::model(key) {
            let mig = if model.has_mig() { "" } else { ", no MIG" };
            let _infallible =
                writeln!(text, "  {key:<16} {}{mig} (driver {} or newer)", model.product, model.min_driver);
        }
    }
    text
}

pub(crate) fn json(host: &Host) -> anyhow::Result<String> {
    let machine = host.read()?;
    let hardware = host.hardware();
    let gpus: Vec<serde_json::Value> = machine
        .gpus()
        .iter()
        .zip(&hardware.slots)
        .map(|(gpu, slot)| {
            let identity = &slot.identity;
            serde_json::json!({
                "name": identity.name,
                "model": slot.part.model.key,
                "uuid": identity.uuid,
                "serial": identity.serial,
                "pci": identity.pci_address(),
                "minor": identity.minor,
                "chip": slot.part.chip,
                "mig_devices": machine.mig_devices(gpu.index).unwrap_or_default().iter().map(|device| {
                    serde_json::json!({
                        "index": device.index,
                        "gpu_instance": device.gpu_instance,
                        "compute_instance": device.compute_instance,
                        "uuid": device.uuid,
                    })
                }).collect::<Vec<_>>(),
                "state": gpu,
            })
        })
        .collect();
    let shown = serde_json::json!({
        "dir": host.dir(),
        "driver": hardware.driver.to_string(),
        "cuda": hardware.cuda,
        "boot": machine.state().boot,
        "boot_id": machine.state().boot_id,
        "clients": machine.clients(None).map(|client| client.pid.pid).collect::<Vec<_>>(),
        "gpus": gpus,
    });
    Ok(serde_json::to_string_pretty(&shown)? + "\n")
}

pub(crate) fn drawn(host: &Host) -> anyhow::Result<String> {
    let mut text = String::new();
    let machine = host.read()?;
    let hardware = host.hardware();
    let _infallible =
        writeln!(text, "{}  driver {}  boot {}", host.dir().display(), hardware.driver, machine.state().boot);
    for (gpu, slot) in machine.gpus().iter().zip(&hardware.slots) {
        draw(&mut text, &machine, gpu, slot);
    }
    let faults = host.faults()?.len();
    if faults > 0 {
        let _infallible = writeln!(text, "{faults} fault rules; see `gpush-sim fault {} list`", host.dir().display());
    }
    Ok(text)
}

fn draw(text: &mut String, machine: &Machine, gpu: &Gpu, slot: &Slot) {
    let mode = match (slot.part.has_mig(), gpu.mig, gpu.mig_pending) {
        (false, ..) => "no MIG",
        (true, true, true) => "MIG on",
        (true, false, false) => "MIG off",
        (true, false, true) => "MIG off, on after a reset",
        (true, true, false) => "MIG on, off after a reset",
    };
    let identity = &slot.identity;
    let lost = if gpu.lost { "  LOST" } else { "" };
    let _infallible = writeln!(
        text,
        "\nGPU {}  {}  {}  {}  {mode}{lost}",
        gpu.index,
        identity.name,
        identity.pci_address(),
        identity.uuid
    );
    for setting in settings(gpu) {
        let _infallible = writeln!(text, "  {setting}");
    }
    if gpu.mig {
        let _infallible = writeln!(text, "  {}", bar(gpu, &slot.part));
    }
    for gi in &gpu.instances {
        let profile = slot.part.profile(gi.profile_id);
        let name = profile.map_or("?", |profile| profile.data.name.as_str());
        let _infallible = writeln!(text, "  GI {:<2} {name} at {}:{}", gi.id, gi.placement.start, gi.placement.size);
        for ci in &gi.instances {
            let name = profile.ok().and_then(|p| p.compute(ci.profile_id)).map_or("?", |c| c.name.as_str());
            let uuid = machine.mig_uuid(silicon::machine::ComputeInstanceHandle {
                gpu: gpu.index,
                gpu_instance: gi.id,
                id: ci.id,
                generation: ci.generation,
            });
            let _infallible =
                writeln!(text, "    CI {} {name} {}", ci.id, uuid.unwrap_or_else(|rc: Return| rc.to_string()));
        }
    }
    for process in &gpu.processes {
        let place = match (process.gpu_instance, process.compute_instance) {
            (Some(gi), Some(ci)) => format!("GI {gi} CI {ci}"),
            (Some(gi), None) => format!("GI {gi}"),
            (None, _) => "GPU".to_owned(),
        };
        let memory = match process.kind {
            ProcessKind::Handle => String::new(),
            ProcessKind::Compute | ProcessKind::Graphics | ProcessKind::Mps => format!(" {} MiB", process.memory_mib),
        };
        let _infallible =
            writeln!(text, "  {place}: {} {}{memory}", crate::pids::describe(process.pid.pid), process.kind.name());
    }
}

/// Returns the settings of a GPU that differ from their values after a boot.
fn settings(gpu: &Gpu) -> Vec<String> {
    let mode = COMPUTE_MODES.get(gpu.compute_mode as usize).copied().unwrap_or("?");
    [
        (gpu.compute_mode != 0).then(|| format!("compute mode {mode}")),
        (gpu.timeslice != Timeslice::Default).then(|| format!("time-slice {}", gpu.timeslice.name())),
        (!gpu.persistence).then(|| "persistence mode off: settings go with the last client".to_owned()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Draws a row of memory slices, with the profile names of the instances.
fn bar(gpu: &Gpu, part: &Part) -> String {
    let mut row = String::from("|");
    let mut slice = 0;
    while slice < part.model.memory_slices {
        let here = gpu.instances.iter().find(|gi| gi.placement.start == slice);
        let (text, size) = match here {
            Some(gi) => (part.profile(gi.profile_id).map_or("?", |p| p.data.name.as_str()), gi.placement.size),
            None => ("·", 1),
        };
        let width = (SLICE + 1) * usize::from(size.max(1)) - 1;
        let text: String = text.chars().take(width).collect();
        let _infallible = write!(row, "{text:^width$}|");
        slice += size.max(1);
    }
    row
}
