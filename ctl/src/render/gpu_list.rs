//! The list of GPUs.

use gpush_api::Gpu;

use super::{
    Appearance,
    appearance::{gib, product},
    listing::Listing,
    names, sensors,
    table::{Align, Narrow},
};

/// Columns of `gpu list` that only `-o wide` shows.
const WIDE: [&str; 6] = ["RULE", "UTIL", "TEMP", "POWER", "ECC", "DEVICE"];

/// Lists the GPUs of `gpushctl gpu list`.
pub(crate) fn gpus(gpus: &[Gpu], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [
        ("GPU", Right),
        ("PRODUCT", Left),
        ("PCI", Left),
        ("USED GIB", Right),
        ("GIB", Right),
        ("MODE", Left),
        ("RULE", Left),
        ("MIG", Left),
        ("STATE", Left),
        ("UTIL", Right),
        ("TEMP", Right),
        ("POWER", Right),
        ("ECC", Right),
        ("DEVICE", Left),
        ("UUID", Left),
    ];
    let product_columns = if look.wraps && look.width < 100 { 14 } else { 24 };
    let is_shown = |name: &str| match name {
        "USED GIB" => look.exact,
        name => look.wide || !WIDE.contains(&name),
    };
    let rows = gpus
        .iter()
        .map(|gpu| {
            let [utilization, temperature, power, ecc] = sensors::cells(&gpu.sensors);
            let has_memory = gpu.memory.total_mib != 0;
            let dash = || "-".to_owned();
            let row = [
                gpu.index.to_string(),
                look.fit(&look.clean(product(&gpu.name)), product_columns),
                look.clean(&gpu.pci),
                if has_memory { gib(gpu.memory.used_mib) } else { dash() },
                match (has_memory, look.exact) {
                    (false, _) => dash(),
                    (true, true) => gib(gpu.memory.total_mib),
                    (true, false) => format!("{}/{}", gib(gpu.memory.used_mib), gib(gpu.memory.total_mib)),
                },
                gpu.mode.name().to_owned(),
                gpu.rule.as_ref().map_or_else(|| "-".to_owned(), |rule| look.clean(rule)),
                mig(gpu),
                names::state(gpu.state).0.to_owned() + if gpu.drift.is_empty() { "" } else { ", drift" },
                utilization,
                temperature,
                power,
                ecc,
                format!("/dev/nvidia{}", gpu.minor),
                look.clean(gpu.uuid.as_str()),
            ];
            let cells = columns.iter().zip(row).filter(|((name, _), _)| is_shown(name));
            cells.map(|(_, cell)| cell).collect()
        })
        .collect();
    let shown: Vec<_> = columns.iter().copied().filter(|(name, _)| is_shown(name)).collect();
    // If there is not enough room, leave out other columns before shortening a UUID, because users copy UUIDs.
    let narrow = Narrow { uuids: Some("UUID"), ..Narrow::spare(&["PCI", "UUID"]) };
    Listing::new(&shown, rows, narrow, look)
        .names(gpus.iter().map(|gpu| gpu.index.to_string()))
        .uuids(gpus.iter().map(|gpu| gpu.uuid.clone()))
        .or_empty("The driver shows no GPU on this host.")
}

/// Returns whether MIG mode is on, and the number of instances: `on, 4`.
fn mig(gpu: &Gpu) -> String {
    match &gpu.mig {
        None => "-".to_owned(),
        Some(mig) => match (mig.enabled, mig.pending_mode()) {
            (true, true) => format!("on, {}", mig.instances.len()),
            (true, false) => "on > off".to_owned(),
            (false, true) => "off > on".to_owned(),
            (false, false) => "off".to_owned(),
        },
    }
}
