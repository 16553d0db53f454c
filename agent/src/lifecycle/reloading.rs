//! Reloads the config, and applies it to the socket and the log.

use gpush_api::{ApiError, Code, ConfigChange, EventPayload, PendingRestart, Reloaded};
use gpush_core::config::Config;
use gpush_host::notify::{self, Notification};
use gpush_locked::Locked;

use super::{access, config};
use crate::{
    reconcile::reload::{Reload, ReloadCommand},
    serve::listen::socket::{SocketError, SocketFile},
    state::{context::HostContext, words},
    system::logging::Log,
};

/// The access of the socket and the level of the log, which a reload changes in addition to the state.
pub(super) struct Reloading<'a> {
    pub(super) reload: &'a Reload,
    pub(super) socket_file: &'a SocketFile,
    /// `None` if the command line sets the log level.
    pub(super) level: Option<&'a Log>,
}

impl Reloading<'_> {
    /// Reads the config again. Reports the result in the log, as an event, and to systemd.
    ///
    /// # Errors
    /// As [`Reload::carry_out`].
    pub(super) async fn carry_out(&self, wish: ReloadCommand) -> Result<Reloaded, ApiError> {
        let Self { reload, socket_file, level } = self;
        let HostContext { settings, state, .. } = &*reload.context;
        let in_force = Locked::new(settings.config().as_ref().clone());
        let live = |wanted: &Config| {
            let mut before = in_force.lock();
            let access = access(wanted);
            if self::access(&before) != access {
                socket_file.set_access(&access).map_err(|error| to_api(&error))?;
            }
            if let Some(log) = level.filter(|_| before.log != wanted.log) {
                log.set_level(wanted.log.level);
            }
            before.clone_from(wanted);
            Ok(())
        };
        let reloaded = self.reload.carry_out(wish, live).await;
        match &reloaded {
            Ok(reloaded) => {
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

fn to_api(error: &SocketError) -> ApiError {
    let mut answer = ApiError::new(Code::ConfigInvalid, error.to_string());
    let mut at: &dyn std::error::Error = error;
    while let Some(source) = at.source() {
        answer = answer.cause(source.to_string());
        at = source;
    }
    answer.hint("correct socket_group and socket_mode under [api], then run `gpushctl config reload`")
}
