//! Stops services and runs hooks around an operation that the driver refuses while a program has the GPU open.
//!
//! ```text
//!  service active? ─► noted ─► stopped ─► … ─► hook after noted ─► hook before ─► (steps)
//!                                                                                    │
//!  services started ◄──────────────── hook after ◄──────── undone in reverse order
//! ```
//!
//! Each stop of a service and each hook is a bracket. gpushd notes a bracket in the journal before the action begins,
//! and undoes the bracket when the operation ends. If gpushd has died, the next gpushd undoes the bracket. Starting a
//! stopped service twice does no harm, because starting a running service has no effect. If a service cannot be
//! started, the note stays in the journal, and health reports the service.
//!
//! Several operations may need to stop the same service. Each of these operations notes the
//! service. The operation that ends last starts the service again. A lock ensures that no operation
//! stops services while another operation starts services.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, OperationState};
use gpush_core::step::Bracket;
use gpush_host::helper::{End, Ended, Job};
use gpush_store::{OperationId, UnfinishedOperation, View};

use crate::{
    modes::mig::LOGGED,
    state::context::HostContext,
    system::{backoff::backoff, host_services::HostServices, tasks::TaskName},
};

/// Number of attempts to start a service.
const ATTEMPTS: u32 = 3;

/// Pause after the first attempt; twice as long after the second.
const PAUSE: Duration = Duration::from_millis(200);

/// First and longest pause between the later attempts in the background.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Name of the helper step for the hook before the operation.
const HOOK_BEFORE: &str = "hook-before";

/// Name of the helper step for the hook after the operation.
const HOOK_AFTER: &str = "hook-after";

/// Stops services and runs hooks before a change, and undoes these actions after the change. The
/// journal records each action, so that a later gpushd can undo it too.
#[derive(Debug, Clone)]
pub(crate) struct Services {
    pub(crate) context: Arc<HostContext>,
}

impl Services {
    /// Stops a service for an operation, if the service runs. Notes the service in the journal first.
    ///
    /// # Errors
    /// If the state of the service is unknown, or the service cannot be stopped. If the stop failed, gpushd starts the
    /// service again when the operation ends.
    pub(super) async fn stop(&self, operation: OperationId, service: &str) -> Result<(), ApiError> {
        let _lock = self.context.host_services.services.lock().await;
        let bracket = Bracket::Service { service: service.to_owned() };
        // If the service is noted already, stop it in any case: a previous gpushd may have noted the service and died
        // before it stopped the service.
        if !self.noted(operation).await?.contains(&bracket) {
            let runs = self.is_active(operation, service).await?;
            if !runs && self.noted_by_others(operation, &bracket).await?.is_empty() {
                return Ok(());
            }
            self.note(operation, &bracket).await?;
        }
        let ended = self.systemctl(operation, "stop", service).await?;
        if ended.end == End::Exited(0) {
            return Ok(());
        }
        Err(failed(&format!("stopping {service}"), &ended)
            .hint(format!("`systemctl status {service}` and `journalctl -u {service}` show the cause")))
    }

    /// Records in the journal which hook runs at the end of an operation.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub(super) async fn note_hook(&self, operation: OperationId, hook: &Bracket) -> Result<(), ApiError> {
        let noted = self.noted(operation).await?;
        if noted.iter().any(|bracket| matches!(bracket, Bracket::HookAfter { .. })) {
            return Ok(());
        }
        self.note(operation, hook).await
    }

    /// Runs the hook before an operation. Does nothing if the hook has already succeeded for this operation.
    ///
    /// # Errors
    /// If the hook fails.
    pub(super) async fn hook_before(
        &self,
        operation: OperationId,
        program: &str,
        env: BTreeMap<String, String>,
    ) -> Result<(), ApiError> {
        if self.context.host_services.helpers.ended_well(&operation.to_string(), HOOK_BEFORE) {
            return Ok(());
        }
        let ended = self.hook(operation, HOOK_BEFORE, program, env).await?;
        if ended.end == End::Exited(0) {
            return Ok(());
        }
        Err(failed(&format!("the hook {program}"), &ended).hint(
            "correct the hook under [mode_change] in the config, then \
            try again",
        ))
    }

    /// Undoes, in reverse order, the brackets of an operation that ends in `state`: starts the stopped services, runs
    /// the hook. Returns one sentence for each failure.
    pub(super) async fn undo_brackets(&self, operation: OperationId, state: OperationState) -> Vec<String> {
        let mut failures = Vec::new();
        let pending = match self.pending(operation).await {
            Ok(pending) => pending,
            Err(error) => {
                tracing::error!(
                    operation = %operation,
                    "operation {operation}: cannot read which services and hooks to roll back: {error}"
                );
                return failures;
            }
        };
        for (position, bracket) in pending.into_iter().rev() {
            // Hold the lock until the record is written. Otherwise two operations that stopped the same service could
            // each expect the other one to start it.
            let _lock = match &bracket {
                Bracket::Service { .. } => Some(self.context.host_services.services.lock().await),
                Bracket::HookAfter { .. }
                | Bracket::HookBefore { .. }
                | Bracket::Timeslice
                | Bracket::MpsDaemon { .. } => None,
            };
            if !self.undo_bracket(operation, state, &bracket, &mut failures).await {
                continue;
            }
            let recorded = self.context.store.write_ending(move |tx| tx.mark_undone(operation, position)).await;
            if let Err(error) = recorded {
                tracing::error!(
                    operation = %operation,
                    "operation {operation}: cannot record that a service or hook was rolled back: {error}"
                );
            }
        }
        for failure in &failures {
            tracing::error!(operation = %operation, "{failure}");
        }
        failures
    }

    /// Undoes one bracket: starts a stopped service, or runs a hook. For a service, the caller must hold the lock
    /// `services`. Returns `false` if gpushd must try again later.
    async fn undo_bracket(
        &self,
        operation: OperationId,
        state: OperationState,
        bracket: &Bracket,
        failures: &mut Vec<String>,
    ) -> bool {
        match bracket {
            Bracket::Service { service } => {
                if self.still_needed_stopped(operation, bracket).await {
                    return true;
                }
                let Err(why) = self.start(operation, service).await else { return true };
                failures.push(format!(
                    "{service} was stopped and cannot be started again: {why}; see `systemctl status {service}`"
                ));
                false
            }
            Bracket::HookAfter { program, env } => {
                let mut env = env.clone();
                env.insert("GPUSH_RESULT".to_owned(), state.name().to_owned());
                match self.hook(operation, HOOK_AFTER, program, env).await {
                    Ok(Ended { end: End::Exited(0), .. }) => {}
                    Ok(ended) => failures.push(format!("the hook {program} {}; {LOGGED}", ended.end)),
                    Err(error) => failures.push(format!("the hook {program}: {error}")),
                }
                // A hook runs only once, because a second run might do harm.
                true
            }
            Bracket::Timeslice | Bracket::MpsDaemon { .. } | Bracket::HookBefore { .. } => true,
        }
    }

    /// Returns whether another unfinished operation has stopped the same service. If so, that operation will start the
    /// service.
    async fn still_needed_stopped(&self, operation: OperationId, bracket: &Bracket) -> bool {
        // If the store cannot be read, start the service. If another operation needs the service to stay stopped, that
        // operation then fails, and its error names the service.
        let others = self.noted_by_others(operation, bracket).await;
        others.is_ok_and(|others| others.iter().any(|stage| !stage.is_final()))
    }

    /// Returns the states of the other operations that have noted the same bracket, such as the same stopped service.
    async fn noted_by_others(
        &self,
        operation: OperationId,
        bracket: &Bracket,
    ) -> Result<Vec<OperationState>, ApiError> {
        let bracket = bracket.clone();
        let stages = move |view: &View<'_>| {
            let has_noted = |other: &UnfinishedOperation| {
                let noted =
                    other.undo.iter().filter_map(|undo| serde_json::from_value::<Bracket>(undo.what.clone()).ok());
                noted.into_iter().any(|noted| noted == bracket)
            };
            let unfinished = view.unfinished()?.into_iter();
            let others = unfinished.filter(|other| other.record.id != operation && has_noted(other));
            Ok(others.map(|other| other.record.stage).collect())
        };
        Ok(self.context.store.read(stages).await?)
    }

    /// Starts services that an ended operation could not start. Tries again until the services run or gpushd exits.
    /// Until then, health reports the services. The next gpushd also tries again.
    pub(super) async fn retry_failed_starts(&self, operation: OperationId, state: OperationState) {
        let left = self.services_to_start(operation).await;
        if left.is_empty() {
            return;
        }
        self.context.host_services.not_started.lock().insert(operation, left);
        let services = self.clone();
        // gpushd does not wait for this task before it exits.
        self.context.tasks.spawn_for(TaskName::ServiceStart, format!("operation {operation}"), move || {
            services.clone().start_until_running(operation, state)
        });
    }

    async fn start_until_running(self, operation: OperationId, state: OperationState) {
        for pause in backoff(RETRY_PAUSE) {
            tokio::select! {
                () = self.context.stopping.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if self.context.state.maintenance().is_some() {
                continue;
            }
            self.undo_brackets(operation, state).await;
            let left = self.services_to_start(operation).await;
            let mut known = self.context.host_services.not_started.lock();
            if left.is_empty() {
                known.remove(&operation);
                return;
            }
            known.insert(operation, left);
        }
    }

    /// Returns the services that an operation stopped and that must still be started.
    async fn services_to_start(&self, operation: OperationId) -> Vec<String> {
        let noted = self.noted(operation).await.unwrap_or_default();
        let service = |bracket| if let Bracket::Service { service } = bracket { Some(service) } else { None };
        noted.into_iter().filter_map(service).collect()
    }

    /// Starts a service.
    async fn start(&self, operation: OperationId, service: &str) -> Result<(), String> {
        let mut attempt = 1;
        loop {
            let why = match self.systemctl(operation, "start", service).await {
                Ok(Ended { end: End::Exited(0), .. }) => return Ok(()),
                Ok(ended) => format!("`systemctl start` {}", ended.end),
                Err(error) => error.sentences().join(": "),
            };
            if attempt == ATTEMPTS {
                return Err(why);
            }
            tokio::time::sleep(PAUSE * attempt).await;
            attempt += 1;
        }
    }

    /// Returns the brackets (stopped services, hooks) of an operation that are not undone yet, in the order of the
    /// journal.
    async fn noted(&self, operation: OperationId) -> Result<Vec<Bracket>, ApiError> {
        Ok(self.pending(operation).await?.into_iter().map(|(_, bracket)| bracket).collect())
    }

    /// Returns the brackets (stopped services, hooks) that are not undone yet. The number is the position of the
    /// bracket in the journal.
    async fn pending(&self, operation: OperationId) -> Result<Vec<(u64, Bracket)>, ApiError> {
        let noted = self.context.store.read(move |view| view.undo(operation)).await?;
        let known = noted.into_iter().filter(|note| !note.undone).filter_map(|note| {
            let bracket = serde_json::from_value(note.what);
            let unknown = |error| {
                tracing::error!(
                    operation = %operation,
                    "operation {operation}: a service or hook is not rolled back, because its record cannot be read: {error}"
                );
            };
            Some((note.position, bracket.map_err(unknown).ok()?))
        });
        Ok(known.collect())
    }

    async fn note(&self, operation: OperationId, bracket: &Bracket) -> Result<(), ApiError> {
        let what = serde_json::to_value(bracket).map_err(|error| {
            ApiError::new(Code::Internal, "cannot record which service or hook to roll back").cause(error.to_string())
        })?;
        self.context.store.write(move |tx| tx.add_undo(operation, what.clone()).map(|_| ())).await?;
        Ok(())
    }

    async fn is_active(&self, operation: OperationId, service: &str) -> Result<bool, ApiError> {
        let ended = self.systemctl(operation, "is-active", service).await?;
        match ended.end {
            End::Exited(0) => Ok(true),
            // Exit status of `systemctl is-active`: 3 for a unit that is not active, 4 for a unit that does not exist.
            End::Exited(3 | 4) => Ok(false),
            End::Exited(_)
            | End::Signalled(_)
            | End::TimedOut
            | End::NotStarted(_)
            | End::Lost
            | End::Void
            | End::Hangs => Err(failed(&format!("the check of the state of {service}"), &ended)
                .hint(format!("check it with `systemctl is-active {service}`"))),
        }
    }

    async fn systemctl(&self, operation: OperationId, verb: &str, service: &str) -> Result<Ended, ApiError> {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        let job = Job {
            operation: operation.to_string(),
            step: format!("{verb}-{}", service.chars().map(plain).collect::<String>()),
            program: self.context.host_services.constants.systemctl.clone(),
            args: vec![verb.to_owned(), format!("{service}.service")],
            env: BTreeMap::new(),
            input: None,
            deadline: self.context.state.config().mode_change.timeout,
            routine: false,
        };
        self.context.host_services.helpers.run(job).await
    }

    async fn hook(
        &self,
        operation: OperationId,
        step: &str,
        program: &str,
        env: BTreeMap<String, String>,
    ) -> Result<Ended, ApiError> {
        let job = Job {
            operation: operation.to_string(),
            step: step.to_owned(),
            program: program.to_owned(),
            args: Vec::new(),
            env,
            input: None,
            deadline: self.context.state.config().mode_change.timeout,
            routine: false,
        };
        self.context.host_services.helpers.run(job).await
    }
}

/// Returns one health error for each service that an operation stopped and gpushd cannot start.
pub(crate) fn health(host_services: &HostServices) -> Vec<ApiError> {
    let known = host_services.not_started.lock();
    let each = known.iter().flat_map(|(operation, services)| services.iter().map(move |one| (operation, one)));
    each.map(|(operation, service)| {
        ApiError::new(
            Code::Internal,
            format!(
                "{service} was stopped for operation {operation}, and cannot be \
            started"
            ),
        )
        .cause("gpushd keeps trying")
        .hint(format!("`systemctl status {service}` and `journalctl -u {service}` show the cause"))
    })
    .collect()
}

fn failed(what: &str, ended: &Ended) -> ApiError {
    ApiError::new(Code::Internal, format!("{what} failed: the command {}", ended.end)).cause(LOGGED)
}
