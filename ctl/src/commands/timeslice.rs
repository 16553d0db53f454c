//! `gpushctl timeslice list|show`.

use gpush_api::{ApiError, Code, Gpu, Mode};
use gpush_client::Client;

use crate::{args::Timeslice, exit::Outcome, output::Output, render::timeslice};

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
    gpus.retain(|gpu: &Gpu| gpu.mode == Mode::Timeslice);
    match command {
        Timeslice::List(_) => out.list(&gpus, |look| timeslice::list(&gpus, look))?,
        Timeslice::Show(_) => out.show(&gpus, |look| timeslice::show(&gpus, look))?,
    }
    Ok(0)
}
