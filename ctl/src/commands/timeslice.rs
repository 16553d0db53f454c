//! `gpushctl timeslice list|show`.

use gpush_api::{ApiError, Code, ComputeMode, Gpu, GpuIndex, GpuUuid, LeaseUse, Mode, TimesliceView};
use gpush_client::Client;
use serde::Serialize;

use crate::{
    args::Timeslice,
    exit::Outcome,
    output::Output,
    render::{gpu::of_other_modes, timeslice},
};

/// A GPU in the output of `gpushctl timeslice list|show -o json`.
#[derive(Debug, Serialize)]
pub(super) struct TimeslicedGpu<'g> {
    gpu: GpuIndex,
    gpu_uuid: &'g GpuUuid,
    name: &'g str,
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_mode: Option<ComputeMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeslice: Option<&'g TimesliceView>,
    leases: &'g [LeaseUse],
}

impl<'g> From<&'g Gpu> for TimeslicedGpu<'g> {
    fn from(gpu: &'g Gpu) -> Self {
        Self {
            gpu: gpu.index,
            gpu_uuid: &gpu.uuid,
            name: &gpu.name,
            compute_mode: gpu.compute_mode,
            timeslice: gpu.timeslice.as_ref(),
            leases: &gpu.leases,
        }
    }
}

pub(super) async fn run(client: &mut Client, command: &Timeslice, out: &Output) -> Outcome {
    let (Timeslice::List(which) | Timeslice::Show(which)) = command;
    let selectors = which.selectors();
    let all = client.gpus(false).await?;
    let mut gpus = super::select_of(client, all, &selectors).await?;
    let other = gpus.iter().find(|gpu| gpu.mode != Mode::Timeslice).map(|gpu| (gpu.index, gpu.mode));
    match (command, other) {
        (Timeslice::Show(_), Some((index, mode))) if !selectors.is_empty() => {
            let message = format!("GPU {index} is not time-sliced: its mode is `{}`", mode.name());
            let error = ApiError::new(Code::NotFound, message);
            return Err(error.hint("list time-sliced GPUs with 'gpushctl timeslice list'").into());
        }
        (Timeslice::Show(_) | Timeslice::List(_), _) => {}
    }
    let none = (!selectors.is_empty()).then(|| of_other_modes(&gpus, "time-sliced"));
    gpus.retain(|gpu: &Gpu| gpu.mode == Mode::Timeslice);
    let document: Vec<TimeslicedGpu<'_>> = gpus.iter().map(TimeslicedGpu::from).collect();
    match command {
        Timeslice::List(_) => out.list(&document, |look| {
            let list = timeslice::list(&gpus, look);
            match &none {
                Some(none) => list.or_empty(&look.wrap("", none).join("\n")),
                None => list,
            }
        })?,
        Timeslice::Show(_) => out.show(&document, |look| timeslice::show(&gpus, look))?,
    }
    Ok(0)
}
