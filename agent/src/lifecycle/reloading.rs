//! Reloads the config, and applies it to the log.

use gpush_api::{ApiError, ConfigChange, EventPayload, PendingRestart, Reloaded};
use gpush_host::notify::{self, Notification};

use super::config;
use crate::{
    reconcile::reload::{Reload, ReloadCommand},
    state::{context::HostContext, words},
    system::logging::Log,
};

/// What a reload changes: the state and the level of the log.
pub(super) struct Reloading<'a> {
    pub(super) reload: &'a Reload,
    /// `None` if the command line sets the log level.
    pub(super) level: Option<&'a Log>,
}

impl Reloading<'_> {
    /// Reads the config again. Reports the result in the log, as an event, and to systemd.
    ///
    /// # Errors
    /// As [`Reload::carry_out`].
    pub(super) async fn carry_out(&self, wish: ReloadCommand) -> Result<Reloaded, ApiError> {
        let Self { reload, level } = self;
        let HostContext { settings, state, .. } = &*reload.context;
        let reloaded = reload.carry_out(wish).await;
        match &reloaded {
            Ok(reloaded) => {
                if let Some(log) = level {
                    log.set_level(settings.config().log.level);
                }
                tracing::info!("the config was reloaded");
                for one in &reloaded.ended {
                    tracing::info!(
                        gpu = one.gpu_uuid.as_str(),
                        "GPU {}: the override by {} was cleared",
                        one.gpu_uuid,
                        words::actor(&one.by)
                    );
                }
                for PendingRestart { key, in_force, in_file } in settings.pending_restart() {
                    let [in_force, in_file] =
                        [in_force, in_file].map(|value| value.unwrap_or_else(|| "not set".to_owned()));
                    tracing::warn!(
                        "{key} changes only when gpushd is restarted: present value {in_force}, value in the config \
                        file {in_file}"
                    );
                }
                let pending_restart = settings.pending_restart().into_iter().map(|one| one.key).collect();
                state.events().publish(EventPayload::Config(ConfigChange {
                    taken: true,
                    error: None,
                    pending_restart,
                }));
                notify::send(Notification::Status("the config was reloaded".to_owned()));
            }
            Err(error) => {
                config::log(error);
                let change = ConfigChange { taken: false, error: Some(error.clone()), pending_restart: Vec::new() };
                state.events().publish(EventPayload::Config(change));
                let first = words::first_cause(error).unwrap_or_else(|| error.message.clone());
                let text = format!("the config has errors and was not loaded: {first}");
                notify::send(Notification::Status(words::with_hint(text, error)));
            }
        }
        reloaded
    }
}
