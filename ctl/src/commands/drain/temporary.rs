//! Cordons that a command sets while it runs.

use std::time::Duration;

use gpush_api::{Gpu, ReasonRequest};
use gpush_client::Client;
use gpush_core::duration;

use super::idle::{WaitEnd, Waited, until_idle};
use crate::{
    exit::Failure,
    output::Output,
    render::names::{gpu_numbers, was_or_were},
};

/// The UUIDs of the GPUs that a command has cordoned while it runs, so that no new work starts on
/// them. A GPU that was already cordoned is not included and stays cordoned.
#[derive(Debug, Default)]
pub(in crate::commands) struct TemporaryCordons(Vec<String>);

impl TemporaryCordons {
    /// Cordons these GPUs, except those that are already cordoned.
    pub(in crate::commands) async fn of(client: &mut Client, gpus: &mut [Gpu], reason: &str) -> Result<Self, Failure> {
        let mut kept = Self::default();
        for gpu in gpus.iter_mut().filter(|gpu| gpu.cordons.is_empty()) {
            match client.cordon(gpu.uuid.as_str(), &ReasonRequest { reason: Some(reason.to_owned()) }).await {
                Ok(cordoned) => *gpu = cordoned,
                Err(error) => {
                    kept.clear(client).await;
                    return Err(error.into());
                }
            }
            kept.0.push(gpu.uuid.to_string());
        }
        Ok(kept)
    }

    /// Cordons these GPUs and waits until they are idle. If they do not become idle, clears the
    /// cordons.
    pub(in crate::commands) async fn idle(
        client: &mut Client,
        gpus: &mut [Gpu],
        reason: &str,
        limit: Duration,
        out: &Output,
    ) -> Result<(Waited, Self), Failure> {
        let kept = Self::of(client, gpus, reason).await?;
        let waited = until_idle(client, gpus, Some(limit), None, false, out).await;
        if !matches!(waited, Ok(WaitEnd { waited: Waited::Idle, lost: None, .. })) {
            kept.clear(client).await;
        }
        let WaitEnd { waited, left, lost } = waited?;
        if let Some(error) = lost {
            return Err(error.into());
        }
        match waited {
            Waited::Idle => {}
            Waited::TooLong => {
                let (numbers, within) = (gpu_numbers(&left), duration::format(limit));
                out.remark(&format!(
                    "{numbers} {} not idle within {within}; nothing was changed.\n",
                    was_or_were(&left)
                ));
            }
            Waited::Interrupted => out.remark("interrupted; nothing was changed.\n"),
        }
        Ok((waited, kept))
    }

    /// Clears the cordons. If a GPU has got a second cordon since then, keeps both cordons.
    pub(in crate::commands) async fn clear(&self, client: &mut Client) {
        for uuid in &self.0 {
            if client.gpu(uuid).await.is_ok_and(|gpu| gpu.cordons.len() == 1) {
                let _it_is_shown_as_cordoned = client.uncordon(uuid, &ReasonRequest { reason: None }).await;
            }
        }
    }
}
