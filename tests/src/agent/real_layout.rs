//! The real state of a simulated GPU, read without gpushd and without NVML.

use serde_json::{Value, json};

use crate::host::Host;

/// Returns the instances of a GPU as `gpush-sim` reports them, in the order of placement:
/// `3g.40gb@4[3g.40gb@0]`. If MIG mode is off, the only element is `MIG off`.
///
/// # Panics
/// If the host does not have this GPU.
#[must_use]
pub fn real_layout(host: &Host, gpu: usize) -> Vec<String> {
    let show = host.show();
    let gpu = &show["gpus"][gpu];
    let model = gpu["model"].as_str().and_then(gpush_geometry::model).expect("a GPU of a known model");
    let state = &gpu["state"];
    if state["mig"] == json!(false) {
        return vec!["MIG off".to_owned()];
    }
    let number = |value: &Value| value.as_u64().expect("a number");
    let start = |value: &Value| number(&value["placement"]["start"]);
    let mut found = Vec::new();
    for instance in state["instances"].as_array().expect("instances") {
        let id = number(&instance["profile_id"]);
        let profile = model.gi_profiles.iter().find(|p| u64::from(p.id) == id).expect("a known profile");
        let compute = instance["instances"].as_array().expect("compute instances").iter().map(|compute| {
            let id = number(&compute["profile_id"]);
            let name = &profile.compute.iter().find(|c| u64::from(c.id) == id).expect("a known profile").name;
            format!("{name}@{}", start(compute))
        });
        let compute: Vec<String> = compute.collect();
        found.push((start(instance), format!("{}@{}[{}]", profile.name, start(instance), compute.join(" "))));
    }
    found.sort();
    found.into_iter().map(|(_, text)| text).collect()
}

/// Returns the id of the GPU instance that starts at a memory slice.
///
/// # Panics
/// If no GPU instance starts there.
#[must_use]
pub fn gi_at(host: &Host, gpu: usize, start: u64) -> u64 {
    let show = host.show();
    let instances = show["gpus"][gpu]["state"]["instances"].as_array().expect("instances").clone();
    let found = instances.iter().find(|instance| instance["placement"]["start"] == json!(start));
    found.unwrap_or_else(|| panic!("no GPU instance at {start}: {instances:?}"))["id"].as_u64().expect("an id")
}
