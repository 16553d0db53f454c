//! Results of `gpu cordon`, `drain` and `uncordon`, one line for each GPU or lease.

use std::time::Duration;

use gpush_api::{ApiError, Gpu, GpuIndex, Lease, LeaseId};
use gpush_core::duration;

use super::{Appearance, names};

/// Draws the result of `gpu cordon`.
pub(crate) fn cordoned(gpus: &[Gpu], look: &Appearance) -> String {
    lines(gpus, look, |gpu| match gpu.cordons.iter().map(|cordon| cordon.reason.as_str()).find(|why| !why.is_empty()) {
        Some(reason) => format!("cordoned: {reason}"),
        None => "cordoned".to_owned(),
    })
}

/// Draws the result of `gpu drain --detach`.
pub(crate) fn draining(gpus: &[Gpu], look: &Appearance) -> String {
    let indexes = gpus.iter().map(|gpu| gpu.index.to_string()).collect::<Vec<_>>().join(",");
    let idle = if gpus.len() == 1 { "the GPU is idle" } else { "the GPUs are idle" };
    let next = format!("`gpushctl gpu drain {indexes}` (administrator) waits until {idle}");
    cordoned(gpus, look) + &look.wrap("", &next).join("\n") + "\n"
}

/// Draws the result of `gpu drain` after the GPUs have become idle.
pub(crate) fn drained(gpus: &[Gpu], look: &Appearance) -> String {
    lines(gpus, look, |_| "cordoned, and nothing uses it".to_owned())
}

/// Draws the result of `gpu uncordon`. `before` are the GPUs before the command.
pub(crate) fn uncordoned(before: &[Gpu], gpus: &[Gpu], look: &Appearance) -> String {
    let was_cordoned = |gpu: &Gpu| before.iter().any(|one| one.uuid == gpu.uuid && !one.cordons.is_empty());
    lines(gpus, look, |one| {
        let what = if was_cordoned(one) { "no longer cordoned" } else { "was not cordoned" };
        format!("{what}; its state is {}", names::state(one.state).0)
    })
}

/// Draws why a drain is still waiting for a GPU.
pub(crate) fn waits(index: GpuIndex, why: &str, look: &Appearance) -> String {
    look.wrap(&format!("GPU {index}  "), &format!("waiting: {}", look.clean(why))).join("\n") + "\n"
}

/// Draws that a drain has ended a lease. `notice` is the time until its processes end.
pub(crate) fn lease_ended(gpu: GpuIndex, lease: &Lease, notice: Duration, look: &Appearance) -> String {
    let user = lease.holder.user.clone().unwrap_or_else(|| format!("uid {}", lease.holder.uid));
    let when = if notice.is_zero() { "now".to_owned() } else { format!("in {}", duration::format(notice)) };
    let text = format!("ended lease {} of {}; its processes end {when}", lease.id, look.clean(&user));
    look.wrap(&format!("GPU {gpu}  "), &text).join("\n") + "\n"
}

/// Draws why a drain cannot end a lease.
pub(crate) fn lease_not_ended(gpu: GpuIndex, lease: LeaseId, error: &ApiError, look: &Appearance) -> String {
    let text = format!("lease {lease} can't be ended: {}", look.clean(&error.message));
    look.wrap(&format!("GPU {gpu}  "), &text).join("\n") + "\n"
}

fn lines(gpus: &[Gpu], look: &Appearance, what: impl Fn(&Gpu) -> String) -> String {
    let line = |gpu: &Gpu| look.wrap(&format!("GPU {}  ", gpu.index), &look.clean(&what(gpu))).join("\n") + "\n";
    gpus.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn uncordon_names_gpus_that_were_not_cordoned() {
        let mut before = fixtures::mixed();
        before.truncate(2);
        let now = before.clone();
        before[1].cordons = vec![gpush_api::Cordon {
            cause: "admin".into(),
            reason: String::new(),
            by: None,
            since: jiff::Timestamp::UNIX_EPOCH,
        }];
        let text = uncordoned(&before, &now, &fixtures::look(80, Charset::Ascii));
        assert_eq!(
            text,
            "GPU 0  was not cordoned; its state is ready\nGPU 1  no longer cordoned; its state is ready\n"
        );
    }

    #[test]
    fn detached_drain_names_the_command_that_waits() {
        let look = fixtures::look(80, Charset::Ascii);
        let mut gpus = fixtures::mixed();
        gpus.truncate(2);
        let all = draining(&gpus, &look);
        assert_eq!(
            all,
            "GPU 0  cordoned\nGPU 1  cordoned\n`gpushctl gpu drain 0,1` (administrator) waits until the GPUs are idle\n"
        );
        assert!(
            draining(&gpus[..1], &look)
                .ends_with("`gpushctl gpu drain 0` (administrator) waits until the GPU is idle\n")
        );
    }
}
