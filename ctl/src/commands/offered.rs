//! The kinds of shares that the GPUs of the host offer, for the hint of a command line without a share.

use gpush_api::{Gpu, GpuState, Mode};
use gpush_client::Client;

use crate::{args::Global, socket};

/// Returns an example option for each kind of share that the host offers; `None` if gpushd does not answer in time.
pub(crate) fn flags_of_shares(global: &Global) -> Option<Vec<&'static str>> {
    let runtime = super::runtime().ok()?;
    let mut client = Client::new(socket::chosen(global)).deadline(global.request_timeout);
    let gpus = runtime.block_on(client.gpus(false)).ok()?;
    Some(flags(&gpus))
}

/// The option of each mode, in the order in which they are proposed: a MIG device is what most programs need.
const FLAGS: [(Mode, &str); 4] = [
    (Mode::Mig, "--memory 10G"),
    (Mode::Mps, "--mps 25"),
    (Mode::Timeslice, "--timeslice"),
    (Mode::Exclusive, "--whole"),
];

fn flags(gpus: &[Gpu]) -> Vec<&'static str> {
    let offers = |mode: Mode| gpus.iter().any(|gpu| gpu.mode == mode && gpu.state == GpuState::Ready);
    FLAGS.into_iter().filter(|(mode, _)| offers(*mode)).map(|(_, flag)| flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_ready_gpus() {
        let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        let modes = [Mode::Exclusive, Mode::Mig, Mode::Mps, Mode::Unmanaged];
        gpus.iter_mut().zip(modes).for_each(|(gpu, mode)| gpu.mode = mode);
        assert_eq!(flags(&gpus), ["--memory 10G", "--mps 25", "--whole"]);
        gpus[2].state = GpuState::Cordoned;
        assert_eq!(flags(&gpus), ["--memory 10G", "--whole"]);
        assert!(flags(&[]).is_empty());
    }
}
