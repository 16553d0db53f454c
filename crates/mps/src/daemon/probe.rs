//! Probes of a daemon. Probes run one at a time, each in a separate task, so a hung daemon does not
//! block the supervisor task.
//!
//! ```text
//! due or requested ─► probe ─► reply ─► settings corrected, clients known ──────► Answers, Fault
//!                       │   ─► another process holds the control connection ────► Busy
//!                       │   ─► any other error ─────────────────────────────────► Silent
//!                       └ the process ended, or `quit` begins: aborted
//! ```
//!
//! If a daemon does not answer, gpushd uses the clients of the last probe that are alive, and the
//! clients that the driver lists. gpushd never assumes that there are no clients if the clients are
//! unknown.

use std::sync::Arc;

use gpush_core::supervisor::{SupervisorEvent, SupervisorState};
use gpush_host::proc;
use tokio::time::Instant;

use super::{
    Reply, control_connection,
    health::{self, Health},
    pending,
    probe_task::{Probe, ProbeResult},
    protocol_in_use,
    settings::{self, AppliedSettings},
    task::{DEADLINE, START_INTERVAL, SupervisorTask},
};
use crate::protocol::control::ControlError;

impl SupervisorTask {
    /// Starts a probe. If a probe is in progress, the new probe follows it, because the probe in
    /// progress may report an older state.
    #[expect(clippy::disallowed_methods, reason = "the panic continues in the supervisor task")]
    pub(super) fn probe_now(&mut self, caller: Option<Reply>) {
        self.waiters.extend(caller);
        if self.probe.is_some() {
            return;
        }
        self.next_probe = None;
        let callers = std::mem::take(&mut self.waiters);
        let (Some(process), Some(control), Some(spec)) = (&self.process, self.control.clone(), &self.spec) else {
            callers.into_iter().for_each(|caller| drop(caller.send(Ok(()))));
            return;
        };
        let (pid, logs, before) = (process.pid, spec.logs.clone(), self.health.clone());
        let late = self.desired.as_ref().map_or(DEADLINE, |desired| desired.supervision.start);
        let desired = self.desired.as_ref().map(|desired| desired.policy.settings.clone());
        let driver_clients = Arc::clone(&self.sources.driver_clients);
        let task = tokio::spawn(async move {
            let mut health = health::probe(&control, pid, &logs, &before, late, DEADLINE).await?;
            if health.has_busy_server() {
                health.add_driver_clients(driver_clients().await.as_deref());
            }
            let settings = match &desired {
                Some(desired) => settings::apply(&control, &mut health.settings, desired, DEADLINE).await?,
                // The desired settings are not known yet. Read the current settings, which may have
                // changed since the start.
                None => AppliedSettings { effective: settings::read(&control, DEADLINE).await?, changes: Vec::new() },
            };
            Ok(ProbeResult { health, settings })
        });
        self.probe = Some(Probe { task, callers });
    }

    /// Aborts the probe in progress. The callers of that probe wait for the next probe.
    pub(super) fn abort_probe(&mut self) {
        self.waiters.extend(self.probe.take().map(Probe::callers).unwrap_or_default());
    }

    /// Aborts the probe in progress and starts no other probe. Returns the callers that were
    /// waiting.
    pub(super) fn cancel_probes(&mut self) -> Vec<Reply> {
        self.abort_probe();
        std::mem::take(&mut self.waiters)
    }

    pub(super) async fn handle_probe(&mut self, result: Result<ProbeResult, ControlError>) {
        let Some(pid) = self.process.as_ref().map(|process| process.pid) else { return };
        let starting = matches!(self.supervisor.state(), SupervisorState::Starting { .. });
        match result {
            Ok(ProbeResult { health, settings }) => {
                self.record_drift(&settings, starting);
                let fault = health.fault();
                let inside = health.client_count();
                if !self.is_multi_user() {
                    log_blocked(&self.target, &self.health, &health);
                }
                if let Some(lost) = health.newly_lost_server(&self.health) {
                    tracing::warn!(mps = self.target, "{lost}");
                    self.news = Some(lost);
                }
                self.record_servers(health.servers.iter().map(|(server, _)| *server).collect());
                (self.effective, self.health) = (Some(settings.effective), health);
                self.last_reply = Some(Instant::now());
                self.problems = fault.clone().into_iter().collect();
                self.connection_holders.clear();
                self.note_protocol(pid);
                self.step(SupervisorEvent::Clients(inside)).await;
                self.step(if fault.is_some() { SupervisorEvent::Fault } else { SupervisorEvent::Answers { pid } })
                    .await;
            }
            // A daemon that is starting may not listen on its socket yet, so probe again soon.
            Err(_) if starting => {
                self.next_probe = Some(Instant::now() + self.start_interval);
                self.start_interval = (self.start_interval * 2).min(START_INTERVAL.1);
            }
            Err(error) => self.handle_silence(pid, &error).await,
        }
    }

    /// Handles a probe without a reply.
    async fn handle_silence(&mut self, pid: i32, error: &ControlError) {
        self.record_servers(proc::children(pid));
        self.problems = vec![health::describe_no_reply(error, &self.dir, self.spec.as_ref())];
        self.problems.extend(protocol_in_use::unsupported(pid));
        if proc::is_suspended(pid) {
            self.problems.push(format!("the MPS daemon is suspended; to resume it: `kill -CONT {pid}`"));
        }
        let is_busy = matches!(error, ControlError::Busy);
        if let Some(spec) = &self.spec {
            let pipe = self.dir.pipe(spec.tenure);
            self.connection_holders =
                control_connection::holders(error, pid, &pipe, &self.target, &self.connection_holders).await;
        }
        // A `Busy` error already says that another process is connected.
        if !self.connection_holders.is_empty() && !is_busy {
            self.problems.push(control_connection::HELD.to_owned());
        }
        self.health.clients.retain(|(_, client)| proc::is_alive(*client));
        if let Some(control) = self.control.clone() {
            self.health.find_pending(pid, control.directory()).await;
        }
        // Clients may have connected since the last probe. Only the driver can list them.
        let clients = (self.sources.driver_clients)().await;
        self.health.add_driver_clients(clients.as_deref());
        let inside = self.health.client_count();
        self.step(SupervisorEvent::Clients(inside)).await;
        self.step(if is_busy { SupervisorEvent::Busy } else { SupervisorEvent::Silent }).await;
        self.next_probe = self.next_probe.map(|at| at.min(Instant::now() + self.probe_interval().min(DEADLINE)));
    }

    /// Records which of these processes are servers of the daemon, for the time after its end.
    fn record_servers(&mut self, processes: Vec<i32>) {
        let Some(daemon) = self.process.as_ref().and_then(|process| process.id) else { return };
        if let Err(error) = self.server_record.update(daemon, processes.into_iter()) {
            tracing::warn!(mps = self.target, "cannot record the MPS servers of the daemon: {error}");
        }
    }

    /// Records that another program changed settings of the daemon. Before version 550, any user
    /// with access can change settings.
    fn record_drift(&mut self, settings: &AppliedSettings, starting: bool) {
        let was_applied = self.effective.as_ref() == Some(&settings.effective);
        if settings.changes.is_empty() || starting {
            return;
        }
        let changes = settings.changes.join(", ");
        if was_applied {
            tracing::warn!(
                mps = self.target,
                "another program changed the settings of the MPS daemon ({changes}); gpushd restored the settings"
            );
            let at = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default();
            self.drift = Some(format!(
                "another program changed the settings of the MPS daemon ({changes}); gpushd restored the settings at \
                {at}"
            ));
        } else {
            tracing::info!(mps = self.target, "gpushd set the desired settings of the MPS daemon, which had {changes}");
        }
    }
}

/// Logs the clients that have begun to hang since the last probe. They hang until the clients of another user have
/// ended.
fn log_blocked(target: &str, before: &Health, now: &Health) {
    let known = pending::waiting_for_another_user(&before.servers, &before.waiting());
    for pid in pending::waiting_for_another_user(&now.servers, &now.waiting()).iter().filter(|pid| !known.contains(pid))
    {
        tracing::warn!(
            mps = target,
            pid,
            uid = proc::owner(*pid),
            command = proc::name(*pid),
            "a client waits because its MPS daemon serves another user"
        );
    }
}
