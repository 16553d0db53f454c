//! Checks GPU indexes of the command line.

use anyhow::bail;
use silicon::Host;

/// Returns an error if the host has no GPU with this index.
pub(crate) fn known_gpu(host: &Host, gpu: u32) -> anyhow::Result<()> {
    match host.hardware().slots.len() as u32 {
        0 => bail!("the host has no GPU"),
        1 if gpu > 0 => bail!("there is no GPU {gpu}: the host has GPU 0 alone"),
        count if gpu >= count => bail!("there is no GPU {gpu}: the host has GPUs 0 to {}", count - 1),
        _ => Ok(()),
    }
}
