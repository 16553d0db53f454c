use gpush_api::{Gpu, GpuLayout, GpuState, LayoutSource, PlanRequest};

use super::*;
use crate::{config::Config, desired::plan_host, layout::Entry, preset};

mod bad;
mod good;
mod round;

fn file(text: &str) -> File {
    File::from_bytes(text.as_bytes(), "parted.yaml").unwrap_or_else(|errors| panic!("{errors}"))
}

fn only(text: &str) -> Label {
    file(text).select(None).unwrap().clone()
}

/// Returns the layouts that the only label of a text gives to a host, as `index layout` or
/// `index off`.
fn meant(text: &str, gpus: &[Gpu]) -> Result<Vec<String>, gpush_api::ApiError> {
    let file = file(text);
    let label = file.select(None)?;
    let layouts = resolve(&file, label, gpus, &[])?.layouts;
    let index = |uuid: &str| gpus.iter().find(|gpu| gpu.uuid == uuid).unwrap().index;
    let words = |one: &GpuLayout| if one.mig { one.layout.join(",") } else { "off".to_owned() };
    Ok(layouts.iter().map(|one| format!("{} {}", index(&one.gpu), words(one))).collect())
}

/// Returns a file with one label `x` that has these groups.
fn label(groups: &str) -> String {
    format!("version: v1\nmig-configs:\n  x:\n{groups}")
}
