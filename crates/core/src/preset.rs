//! Hosts for offline planning: presets, and hosts saved by `gpushctl gpu list --json`.
//!
//! `gpushctl mig apply --dry-run` and `config check` can plan for another host. The GPUs of that host come
//! from a preset, which the simulator also has, or from a file that was saved on a real host. A
//! preset GPU has MIG mode on, no instances, and a UUID of the form `GPU-00000000-…`. No real GPU
//! has such a UUID, so users cannot confuse a preset with a real host.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{
    ApiError, Architecture, Code, ComputeProfile, Engines, Gpu, GpuIndex, GpuProfile, GpuState, Memory, Mig, Mode,
    Placement,
};
use gpush_geometry::{Model, PRESETS};
use jiff::Timestamp;

use crate::{nearest::nearest, quote::Quoted};

/// Prefix of the UUID of every preset GPU.
pub const UUID_PREFIX: &str = "GPU-00000000-0000-0000-0000-";

/// Returns the names of all presets with their descriptions.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    PRESETS.iter().map(|preset| (preset.name, preset.about))
}

/// Returns the GPUs of a preset.
///
/// # Errors
/// No preset has this name. The error lists the presets.
pub fn gpus(name: &str) -> Result<Vec<Gpu>, ApiError> {
    let Some(preset) = PRESETS.iter().find(|preset| preset.name.eq_ignore_ascii_case(name)) else {
        let known: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        let error = ApiError::new(Code::NotFound, format!("no preset is named {}", Quoted(name)))
            .cause(format!("the presets are: {}", known.join(", ")));
        return Err(match nearest(name, known.iter().copied()) {
            Some(meant) => error.hint(format!("did you mean `{meant}`?")),
            None => error.hint("name one of these, or a file that `gpushctl gpu list --json` wrote"),
        });
    };
    let mut gpus = Vec::new();
    for (key, count) in preset.gpus {
        let model = gpush_geometry::model(key).ok_or_else(|| {
            ApiError::new(
                Code::Internal,
                format!("preset `{}` names the GPU model `{key}`, which gpush does not know", preset.name),
            )
        })?;
        for _ in 0..*count {
            let index = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
            gpus.push(gpu(&model, GpuIndex(index)));
        }
    }
    Ok(gpus)
}

/// Returns an idle GPU of a model at an index, as offline planning assumes it.
pub(crate) fn gpu(model: &Model, index: GpuIndex) -> Gpu {
    Gpu {
        index,
        uuid: format!("{UUID_PREFIX}{:012x}", index.0).into(),
        pci: format!("0000:{:02x}:00.0", gpush_geometry::preset_bus(index.0)),
        pci_id: model.boards.first().map(|board| format!("0x{}10DE", board.device_id)),
        pci_subsystem: model
            .boards
            .first()
            .and_then(|board| board.subsystem_id.as_ref())
            .map(|id| format!("0x{id}10DE")),
        minor: index.0,
        name: product(model),
        architecture: architecture(model.architecture),
        passed_through: false,
        memory: Memory { total_mib: model.board_memory_mib, used_mib: 0 },
        mode: Mode::NoRule,
        rule: None,
        access: None,
        layout: None,
        overridden: None,
        drift: Vec::new(),
        pending: Vec::new(),
        state: GpuState::Ready,
        reasons: Vec::new(),
        mig: model.has_mig().then(|| Mig {
            enabled: true,
            reset_pending: false,
            memory_slices: model.memory_slices,
            compute_slices: model.compute_slices,
            instances: Vec::new(),
            profiles: Arc::new(model.gi_profiles.iter().map(profile).collect()),
        }),
        compute_mode: None,
        timeslice: None,
        nvlink: None,
        sensors: gpush_api::Sensors::default(),
        processes: Vec::new(),
        cordons: Vec::new(),
        leases: Vec::new(),
        mps_daemons: BTreeSet::new(),
        processes_known: true,
        processes_error: None,
        unleased: Vec::new(),
        blocked_by: Vec::new(),
        observed_at: Timestamp::UNIX_EPOCH,
        stale: false,
    }
}

/// Returns the product name that the driver would report: the name of the model's first board.
fn product(model: &Model) -> String {
    model.boards.first().map_or(&model.product, |board| &board.product).clone()
}

/// Converts an architecture of the geometry data to the API's type.
#[must_use]
pub fn architecture(of: gpush_geometry::Architecture) -> Architecture {
    match of {
        // The API does not distinguish architectures before Volta.
        gpush_geometry::Architecture::Pascal => Architecture::Legacy,
        gpush_geometry::Architecture::Volta => Architecture::Volta,
        gpush_geometry::Architecture::Turing => Architecture::Turing,
        gpush_geometry::Architecture::Ampere => Architecture::Ampere,
        gpush_geometry::Architecture::Ada => Architecture::Ada,
        gpush_geometry::Architecture::Hopper => Architecture::Hopper,
        gpush_geometry::Architecture::Blackwell => Architecture::Blackwell,
    }
}

/// Converts a profile of the geometry data to the form in which the driver would report it.
#[must_use]
pub fn profile(of: &gpush_geometry::GpuProfile) -> GpuProfile {
    let engines = of.engines;
    GpuProfile {
        name: of.name.clone(),
        id: of.id,
        index: of.index,
        slices: of.slices,
        max: of.max,
        remaining: None,
        memory_mib: of.memory_mib,
        sm: of.sm,
        engines: Engines {
            copy: engines.copy,
            decoder: engines.decoder,
            encoder: engines.encoder,
            jpeg: engines.jpeg,
            ofa: engines.ofa,
        },
        gfx: of.gfx,
        placements: placements(&of.placements),
        compute: of
            .compute
            .iter()
            .map(|compute| ComputeProfile {
                name: compute.name.clone(),
                id: compute.id,
                index: compute.index,
                slices: compute.slices,
                max: compute.max,
                sm: compute.sm,
                placements: placements(&compute.placements),
            })
            .collect(),
    }
}

fn placements(of: &[(u8, u8)]) -> Vec<Placement> {
    of.iter().map(|&(start, size)| Placement { start, size }).collect()
}

/// Maximum size of a saved host in bytes: about a thousand times the size of a host with 8 GPUs.
const MOST_BYTES: usize = 64 << 20;

/// Reads a host from the output of `gpushctl gpu list --json` or `gpu show --json`. Errors refer to
/// the file as `source`.
///
/// # Errors
/// The file has another format or contains impossible values. In that case, no part of the file is
/// used.
pub fn saved(bytes: &[u8], source: &str) -> Result<Vec<Gpu>, ApiError> {
    let again =
        "name a preset, such as dgx-a100, or a file that `gpushctl gpu list --json > HOST.json` wrote on the host";
    let wrong = |cause: String| {
        ApiError::new(Code::BadRequest, format!("{source} is not a saved state of a host")).cause(cause).hint(again)
    };
    if bytes.len() > MOST_BYTES {
        return Err(wrong(format!("the file has {} bytes; the limit is {MOST_BYTES}", bytes.len())));
    }
    let text = std::str::from_utf8(bytes)
        .map_err(|error| wrong(format!("the file is not UTF-8: byte {} can't be read", error.valid_up_to())))?;
    if text.trim().is_empty() {
        return Err(wrong("the file is empty".to_owned()));
    }
    let gpus: Vec<Gpu> = if text.trim_start().starts_with('{') {
        vec![serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?]
    } else {
        serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?
    };
    if gpus.is_empty() {
        return Err(wrong("the file lists no GPU".to_owned()));
    }
    for (at, gpu) in gpus.iter().enumerate() {
        possible(gpu).map_err(|cause| wrong(format!("GPU {} ({}): {cause}", gpu.index, gpu.uuid)))?;
        if let Some(other) = gpus[..at].iter().find(|other| other.index == gpu.index || other.uuid == gpu.uuid) {
            return Err(wrong(format!("the file lists GPU {} ({}) twice", other.index, other.uuid)));
        }
    }
    Ok(gpus)
}

/// Refuses values that no driver reports. The planner relies on spans that end within the GPU.
fn possible(gpu: &Gpu) -> Result<(), String> {
    let Some(mig) = &gpu.mig else { return Ok(()) };
    if mig.profiles.is_empty() {
        return Err("the file does not contain the MIG profiles of this GPU".to_owned());
    }
    let within = |what: &str, of: Placement, slices: u8| {
        let end = u32::from(of.start) + u32::from(of.size);
        if of.size > 0 && end <= u32::from(slices) {
            Ok(())
        } else {
            Err(format!("{what} takes slices {} to {end}, but the GPU has only {slices} slices", of.start))
        }
    };
    if !(1..=MOST_SLICES).contains(&mig.memory_slices) || !(1..=MOST_SLICES).contains(&mig.compute_slices) {
        return Err(format!(
            "no GPU has {} memory slices and {} compute \
            slices",
            mig.memory_slices, mig.compute_slices
        ));
    }
    for profile in mig.profiles.iter() {
        for placement in &profile.placements {
            within(&profile.name, *placement, mig.memory_slices)?;
        }
        for compute in &profile.compute {
            for placement in &compute.placements {
                within(&compute.name, *placement, MOST_SLICES)?;
            }
        }
    }
    for instance in &mig.instances {
        let what = format!("GPU instance {}", instance.id);
        within(&what, instance.placement, mig.memory_slices)?;
        for compute in &instance.compute {
            if let Some(placement) = compute.placement {
                within(&format!("compute instance {} of {what}", compute.id), placement, MOST_SLICES)?;
            }
        }
    }
    for (at, instance) in mig.instances.iter().enumerate() {
        if let Some(other) = mig.instances[..at].iter().find(|other| other.placement.overlaps(instance.placement)) {
            return Err(format!("GPU instances {} and {} overlap", other.id, instance.id));
        }
    }
    Ok(())
}

/// Maximum number of slices in a saved file. No existing or likely GPU has more.
const MOST_SLICES: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_its_gpus() {
        let mut seen = 0;
        for preset in PRESETS {
            let gpus = gpus(preset.name).unwrap();
            assert_eq!(gpus.len(), preset.gpus.iter().map(|(_, n)| *n as usize).sum::<usize>());
            for (at, gpu) in gpus.iter().enumerate() {
                assert_eq!(gpu.index.0 as usize, at);
                assert!(gpu.uuid.as_str().starts_with(UUID_PREFIX) && gpu.uuid.as_str().len() == 40, "{}", gpu.uuid);
                assert!(gpu.name.starts_with("NVIDIA ") || gpu.name.starts_with("Tesla "), "{}", gpu.name);
                assert_eq!(possible(gpu), Ok(()));
                seen += 1;
            }
        }
        println!("{seen} GPUs of {} presets", PRESETS.len());
    }

    #[test]
    fn unknown_preset_lists_known_ones() {
        let error = gpus("dgx-a10").unwrap_err();
        assert_eq!(error.hint.as_deref(), Some("did you mean `dgx-a100`?"));
        assert!(error.causes[0].contains("rtx-pro-6000x2"));
    }

    #[test]
    fn saved_host_reads_back() {
        let host = gpus("mixed").unwrap();
        let text = serde_json::to_string_pretty(&host).unwrap();
        assert_eq!(saved(text.as_bytes(), "host.json").unwrap(), host);
        let one = serde_json::to_string(&host[0]).unwrap();
        assert_eq!(saved(one.as_bytes(), "gpu.json").unwrap(), host[..1]);
    }

    #[test]
    fn impossible_saved_host_is_refused() {
        let host = gpus("dgx-a100").unwrap();
        let changed = |change: &dyn Fn(&mut Vec<Gpu>)| {
            let mut host = host.clone();
            change(&mut host);
            serde_json::to_vec(&host).unwrap()
        };
        let cases: Vec<(&str, Vec<u8>, &str)> = vec![
            ("empty", b" \n".to_vec(), "the file is empty"),
            ("not JSON", b"GPU 0: A100".to_vec(), "expected"),
            ("another JSON", b"[{\"a\": 1}]".to_vec(), "missing field"),
            ("no GPU", b"[]".to_vec(), "lists no GPU"),
            ("not UTF-8", b"[\xff]".to_vec(), "byte 1"),
            ("no profiles", changed(&|h| h[3].mig.as_mut().unwrap().profiles = Arc::default()), "GPU 3"),
            ("twice", changed(&|h| h[1].index = GpuIndex(0)), "twice"),
            (
                "beyond the part",
                changed(&|h| {
                    Arc::make_mut(&mut h[0].mig.as_mut().unwrap().profiles)[0].placements[0] =
                        Placement { start: 255, size: 255 }
                }),
                "slices 255 to 510",
            ),
            ("no slices", changed(&|h| h[0].mig.as_mut().unwrap().memory_slices = 0), "no GPU has"),
        ];
        for (what, bytes, says) in &cases {
            let error = saved(bytes, "host.json").expect_err(what);
            assert!(error.message.starts_with("host.json is not a saved state"), "{what}");
            assert!(error.causes[0].contains(says), "{what}: {}", error.causes[0]);
            assert!(error.hint.is_some());
        }
        println!("{} files refused", cases.len());
    }
}
