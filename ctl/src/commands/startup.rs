//! Waits until gpushd has done the work of its start, before a command that changes GPUs.
//!
//! After the boot, gpushd reads the GPUs and applies their layouts. A change that a script requests meanwhile would be
//! refused, because an operation of gpushd itself changes the GPU. So the command first waits, but not for long: it then
//! sends its request, and the answer names what is left.

use std::time::Duration;

use gpush_api::{Gpu, Health, LayoutsAtStart};
use gpush_client::{Client, Error, Kind};
use tokio::time::Instant;

use super::{SILENCE, events::may_pass};
use crate::output::Output;

/// How long a command waits for the work of gpushd's start.
const LONGEST: Duration = Duration::from_secs(60);

/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(100);

/// Waits until gpushd has applied the layouts of this boot and knows the GPUs.
pub(super) async fn wait_until_finished(client: &mut Client, out: &Output) {
    let (began, mut is_remarked) = (Instant::now(), false);
    while began.elapsed() < LONGEST {
        // The command itself reports why gpushd does not answer.
        let Ok(health) = client.health().await else { return };
        let gpus = client.gpus(false).await;
        let Some(what) = unfinished(&health, &gpus) else { return };
        if began.elapsed() > SILENCE && !is_remarked {
            let text = format!("{what}; waiting up to {}", gpush_core::duration::format(LONGEST));
            out.remark(&(out.look.wrap("", &text).join("\n") + "\n"));
            is_remarked = true;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns the startup work that is not finished; `None` if all is finished, or if waiting does not help.
fn unfinished(health: &Health, gpus: &Result<Vec<Gpu>, Error>) -> Option<&'static str> {
    match gpus {
        _ if health.maintenance.is_some() => None,
        Err(error) if error.kind == Kind::Answer && may_pass(error) => Some("gpushd has not read the GPUs yet"),
        Err(_) => None,
        Ok(gpus) => {
            // A GPU that the driver cannot identify is not listed. It is never settled, so do not wait for it.
            let is_settled = |layouts: &LayoutsAtStart| {
                layouts.complete || gpus.iter().all(|gpu| layouts.settled.contains(&gpu.uuid))
            };
            let is_complete = health.layouts_at_start.as_ref().is_none_or(is_settled);
            (!is_complete).then_some("gpushd has not yet applied all layouts since the host booted")
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ApiError, Code, Maintenance};

    use super::*;
    use crate::render::fixtures;

    #[test]
    fn change_waits_for_startup_layouts_and_first_gpu_reading() {
        let answer = |error: ApiError| Err::<Vec<Gpu>, _>(Error { kind: Kind::Answer, error: Box::new(error) });
        let unread = || answer(ApiError::new(Code::Unavailable, "the GPUs are not known yet").retryable());
        let no_driver = || answer(ApiError::new(Code::DriverUnavailable, "the driver is not loaded"));
        let gpus = fixtures::mixed();
        let known = || Ok(gpus.clone());
        let mut health = fixtures::status(gpus.clone(), false).health;
        let settled = |number: usize| LayoutsAtStart {
            settled: gpus.iter().take(number).map(|gpu| gpu.uuid.clone()).collect(),
            ..LayoutsAtStart::default()
        };
        health.layouts_at_start = Some(LayoutsAtStart { complete: true, ..LayoutsAtStart::default() });
        assert_eq!(unfinished(&health, &known()), None);
        assert!(unfinished(&health, &unread()).is_some());
        assert_eq!(unfinished(&health, &no_driver()), None, "it may never be loaded");
        health.layouts_at_start = Some(settled(1));
        assert!(unfinished(&health, &known()).is_some());
        health.layouts_at_start = Some(settled(gpus.len()));
        assert_eq!(unfinished(&health, &known()), None, "only a GPU that is not listed is not settled");
        health.maintenance = Some(Maintenance { reason: None, by: None, since: jiff::Timestamp::UNIX_EPOCH });
        assert_eq!(unfinished(&health, &unread()), None, "gpushd does nothing in maintenance");
    }
}
