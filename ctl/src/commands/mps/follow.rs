//! `gpushctl mps start|stop|restart`: sends the request, and then polls the daemon until the change ends.
//!
//! ```text
//!          request ──► in progress ──► requested state   exit status 0
//!                          │    └────► another end state 1: it failed, or another user made another request
//!                          └──► --timeout reached        8, after Ctrl-C 130: gpushd continues
//! ```

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, MpsActionRequest, MpsDaemon, MpsState};
use gpush_client::{Client, Kind};
use gpush_core::duration;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

use super::super::events::may_pass;
use crate::{
    args::Followed,
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::mps::{change, displayed_argument, label},
};

/// First and longest pause between two polls.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// How long gpushctl waits for gpushd after the connection was lost.
const AWAY: Duration = Duration::from_secs(5);

/// How long gpushctl waits for a gpushd that does not know the daemon yet, because it has not read the GPUs since its
/// start.
const UNREAD: Duration = Duration::from_secs(60);

/// Exit status if the daemon did not reach the requested state.
const FAILED: u8 = 1;

/// The requested change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Start,
    Stop,
    Restart,
    Drain,
}

/// Whether and how long to wait for the end of the change.
#[derive(Debug, Clone, Copy)]
pub(super) enum Watch {
    Not,
    For {
        limit: Option<Duration>,
        quiet: bool,
        /// Whether gpushctl undoes the change if it does not finish in time.
        undone: bool,
    },
}

/// How far a change has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeState {
    InProgress,
    Done,
    Otherwise,
}

pub(super) async fn start(client: &mut Client, target: &str, watch: Watch, out: &Output) -> Outcome {
    let before = client.mps_daemon(target).await?;
    let accepted = client.mps_start(&before.target).await?;
    watch_change(client, Change::Start, &before, accepted, watch, out).await
}

pub(super) async fn end(
    client: &mut Client,
    what: Change,
    target: &str,
    how: &MpsActionRequest,
    watch: Watch,
    out: &Output,
) -> Outcome {
    // From now on, use the short name: the index may belong to another GPU at the next request.
    let before = client.mps_daemon(target).await?;
    let accepted = match what {
        Change::Start => client.mps_start(&before.target).await?,
        Change::Stop => client.mps_stop(&before.target, how).await?,
        Change::Restart => client.mps_restart(&before.target, how).await?,
        Change::Drain => client.mps_drain(&before.target, how).await?,
    };
    watch_change(client, what, &before, accepted, watch, out).await
}

/// Stops a daemon when it has no clients any more. If there is a limit and the daemon still has clients then, starts it
/// again.
pub(super) async fn stop_when_free(
    client: &mut Client,
    target: &str,
    limit: Option<Duration>,
    end_after_s: Option<u64>,
    Followed { timeout, detach, quiet }: Followed,
    out: &Output,
) -> Outcome {
    let undone = limit.is_some();
    if undone && (detach || timeout.is_some()) {
        let error = ApiError::new(Code::BadRequest, "`--wait` with a duration excludes `--detach` and `--timeout`")
            .cause("after the duration, gpushctl itself makes the daemon admit new clients again");
        return Err(error.hint("leave out the duration of `--wait`").into());
    }
    let before = client.mps_daemon(target).await?;
    let watch = if detach { Watch::Not } else { Watch::For { limit: limit.or(timeout), quiet, undone } };
    let how = MpsActionRequest { force: false, end_after_s };
    let ended = end(client, Change::Drain, &before.target, &how, watch, out).await;
    if undone && matches!(ended, Ok(status) if status == Code::TimedOut.exit_status() || status == INTERRUPTED) {
        let draining = client.mps_daemon(&before.target).await?;
        client.mps_start(&before.target).await?;
        out.remark(&change::not_stopped(&draining, &out.look));
    }
    ended
}

/// Returns the progress of a change. Compares the daemon before the change with `now`. `going` is true if an earlier
/// poll has shown the change in progress.
fn far(what: Change, before: &MpsDaemon, now: &MpsDaemon, going: bool) -> ChangeState {
    // If the daemon looks unchanged, gpushd has recorded the request but not begun yet.
    let moved = going || (before.state, before.since, before.pid) != (now.state, now.since, now.pid);
    match (what, now.state) {
        (Change::Start, MpsState::Ready) | (Change::Stop | Change::Drain, MpsState::Stopped) => ChangeState::Done,
        // A restarted gpushd reports another time for the same daemon, so only the pid shows another daemon.
        (Change::Restart, MpsState::Ready) if before.pid != now.pid => ChangeState::Done,
        (Change::Start | Change::Restart, MpsState::Fault | MpsState::GivenUp) if moved => ChangeState::Otherwise,
        // Another administrator has stopped the daemon since. The state alone does not show this: a restarted gpushd
        // reports a daemon as stopped until it starts the daemon, and as starting until it has examined the daemon.
        (Change::Start, MpsState::Stopped | MpsState::Draining) if moved && is_stopped_on_request(now) => {
            ChangeState::Otherwise
        }
        // Another administrator has started the daemon since.
        (Change::Stop | Change::Drain, MpsState::Starting | MpsState::Ready)
            if going && !is_stopped_on_request(now) =>
        {
            ChangeState::Otherwise
        }
        (
            Change::Start | Change::Stop | Change::Restart | Change::Drain,
            MpsState::Stopped
            | MpsState::Starting
            | MpsState::Ready
            | MpsState::Fault
            | MpsState::Hung
            | MpsState::BackingOff
            | MpsState::GivenUp
            | MpsState::Draining
            | MpsState::Stopping,
        ) => ChangeState::InProgress,
    }
}

/// Returns whether gpushd has recorded that the daemon stays stopped, or the daemon's target has been removed.
fn is_stopped_on_request(now: &MpsDaemon) -> bool {
    now.stays_stopped || now.ends.is_some()
}

/// Returns whether a daemon in this state is still changing.
fn is_intermediate(what: Change, state: MpsState) -> bool {
    match what {
        Change::Start => matches!(state, MpsState::Starting),
        Change::Stop | Change::Restart | Change::Drain => matches!(state, MpsState::Draining | MpsState::Stopping),
    }
}

/// Explains why the change has ended in another state than requested.
fn explain_other_state(what: Change, state: MpsState) -> &'static str {
    match (what, state) {
        (Change::Start | Change::Restart, MpsState::Stopped | MpsState::Draining | MpsState::Stopping) => {
            "another user has stopped the daemon in the meantime"
        }
        (
            Change::Start | Change::Restart,
            MpsState::Starting
            | MpsState::Ready
            | MpsState::Fault
            | MpsState::Hung
            | MpsState::BackingOff
            | MpsState::GivenUp,
        ) => "the daemon did not become ready",
        (Change::Stop | Change::Drain, _) => "another user has started the daemon again in the meantime",
    }
}

/// Returns whether the request has changed something: the daemon, or whether it stays stopped.
fn request_changed_daemon(what: Change, before: &MpsDaemon, now: &MpsDaemon) -> bool {
    let was_so = match what {
        Change::Start => before.state == MpsState::Ready && before.pid == now.pid,
        Change::Stop | Change::Drain => before.state == MpsState::Stopped,
        Change::Restart => false,
    };
    !was_so || before.stays_stopped != now.stays_stopped
}

/// Prints the state of a daemon after a change.
async fn show_end(
    client: &mut Client,
    what: Change,
    before: &MpsDaemon,
    now: &MpsDaemon,
    out: &Output,
) -> Result<(), Failure> {
    let is_stopped = now.state == MpsState::Stopped && !out.json;
    let in_maintenance = is_stopped && client.health().await.is_ok_and(|health| health.maintenance.is_some());
    out.change(request_changed_daemon(what, before, now), now, |look| change::ended(now, in_maintenance, look))
}

async fn watch_change(
    client: &mut Client,
    what: Change,
    before: &MpsDaemon,
    mut now: MpsDaemon,
    watch: Watch,
    out: &Output,
) -> Outcome {
    let Watch::For { limit: timeout, quiet, undone } = watch else {
        show_end(client, what, before, &now, out).await?;
        return Ok(0);
    };
    let mut progress = FollowProgress::new(quiet || out.json);
    // Without a limit, wait longer than any change takes.
    let limit = tokio::time::sleep(timeout.unwrap_or(duration::LONGEST));
    // Handle Ctrl-C before the first output, because a user may press it as soon as a line appears.
    let mut interrupt = signal(SignalKind::interrupt())
        .map_err(|error| ApiError::new(Code::Internal, format!("cannot handle Ctrl-C: {error}")))?;
    tokio::pin!(limit);
    let (mut going, mut pause) = (false, PAUSES.0);
    let mut away: Option<Instant> = None;
    loop {
        going |= is_intermediate(what, now.state);
        match far(what, before, &now, going) {
            ChangeState::InProgress => {}
            reached @ (ChangeState::Done | ChangeState::Otherwise) => {
                progress.end();
                show_end(client, what, before, &now, out).await?;
                if reached == ChangeState::Done {
                    return Ok(0);
                }
                out.remark(&format!("{}: {}\n", label(&now, &out.look), explain_other_state(what, now.state)));
                return Ok(FAILED);
            }
        }
        progress.update(&now, out);
        let asked = tokio::select! {
            _ = interrupt.recv() => {
                progress.end();
                if !undone {
                    out.remark(&continues_note(&now, None, out));
                }
                return Ok(INTERRUPTED);
            }
            () = &mut limit => {
                progress.end();
                if out.json {
                    out.change(request_changed_daemon(what, before, &now), &now, |_| String::new())?;
                } else if !undone {
                    out.remark(&continues_note(&now, timeout, out));
                }
                return Ok(Code::TimedOut.exit_status());
            }
            asked = poll_after(client, &before.target, pause) => asked,
        };
        pause = (pause * 3 / 2).min(PAUSES.1);
        match asked {
            Ok(newer) => (now, away) = (newer, None),
            // gpushd may be restarting, or may not have read the GPUs since its start. The daemon continues to run
            // meanwhile.
            Err(error) if may_pass(&error) => {
                let is_gone = matches!(error.kind, Kind::Connect | Kind::Lost);
                if away.get_or_insert_with(Instant::now).elapsed() > if is_gone { AWAY } else { UNREAD } {
                    progress.end();
                    return Err(if is_gone {
                        gpushd_ended_error(&now, error.error.message, out)
                    } else {
                        error.into()
                    });
                }
            }
            // If no rule requires the daemon, gpushd no longer lists the daemon after its end. So the change has
            // succeeded.
            Err(error) if ends(what) && error.error.code == Code::NotFound => {
                progress.end();
                now = MpsDaemon { state: MpsState::Stopped, pid: None, clients: Vec::new(), ..now };
                now.ends.get_or_insert_with(|| "it has ended".to_owned());
                show_end(client, what, before, &now, out).await?;
                return Ok(0);
            }
            Err(error) => {
                progress.end();
                return Err(error.into());
            }
        }
    }
}

/// Returns whether the change stops the daemon and does not start it again.
fn ends(what: Change) -> bool {
    match what {
        Change::Stop | Change::Drain => true,
        Change::Start | Change::Restart => false,
    }
}

/// Polls the daemon after a pause.
async fn poll_after(client: &mut Client, target: &str, pause: Duration) -> Result<MpsDaemon, gpush_client::Error> {
    tokio::time::sleep(pause).await;
    client.mps_daemon(target).await
}

fn continues_note(now: &MpsDaemon, waited: Option<Duration>, out: &Output) -> String {
    let (what, target) = (change::waits(now, &out.look), displayed_argument(now, &out.look));
    let waited = waited.map_or_else(
        || "gpushctl no longer waits".to_owned(),
        |limit| format!("not done within {}", duration::format(limit)),
    );
    format!("{what}; {waited}. gpushd continues: see `gpushctl mps show {target}`\n")
}

fn gpushd_ended_error(now: &MpsDaemon, cause: String, out: &Output) -> Failure {
    let (label, target) = (label(now, &out.look), displayed_argument(now, &out.look));
    let error = ApiError::new(Code::Unreachable, format!("cannot follow the MPS daemon of {label}: gpushd has ended"));
    let hint = format!("start gpushd, which has recorded the request; then run `gpushctl mps show {target}`");
    error.cause(cause).hint(hint).into()
}

/// Shows progress on stderr. On a terminal, redraws one line. Otherwise, prints a line for each new reason to wait.
enum FollowProgress {
    Line(ProgressBar),
    Lines { since: Instant, printed: String },
    Quiet,
}

impl FollowProgress {
    fn new(quiet: bool) -> Self {
        if quiet {
            Self::Quiet
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new_spinner();
            bar.set_style(ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
            Self::Line(bar)
        } else {
            Self::Lines { since: Instant::now(), printed: String::new() }
        }
    }

    fn update(&mut self, now: &MpsDaemon, out: &Output) {
        let text = change::waits(now, &out.look);
        match self {
            Self::Line(bar) => bar.set_message(out.look.fit(&text, out.look.width)),
            Self::Lines { since, printed } => {
                // Print a state only if it lasts, but always print that the daemon waits for clients.
                let ends = matches!(now.state, MpsState::Draining | MpsState::Stopping);
                let worth = (ends && !now.clients.is_empty()) || since.elapsed() > super::super::SILENCE;
                if worth && *printed != text {
                    out.remark(&format!("{text}\n"));
                    *printed = text;
                }
            }
            Self::Quiet => {}
        }
    }

    fn end(&self) {
        if let Self::Line(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    fn at(state: MpsState, seconds: i64, pid: Option<u32>) -> MpsDaemon {
        let since = jiff::Timestamp::from_second(seconds).unwrap();
        MpsDaemon { state, since, pid, ..fixtures::mps::daemon(0) }
    }

    #[test]
    fn change_ends_when_a_later_state_shows_its_result() {
        let ready = at(MpsState::Ready, 1, Some(7));
        let new = at(MpsState::Ready, 9, Some(8));
        let stopped = at(MpsState::Stopped, 1, None);
        let by_request = MpsDaemon { stays_stopped: true, ..at(MpsState::Stopped, 9, None) };
        let given_up = at(MpsState::GivenUp, 1, None);
        let again = at(MpsState::GivenUp, 9, None);
        for (what, before, now, going, reached) in [
            (Change::Start, &stopped, &ready, false, ChangeState::Done),
            (Change::Start, &ready, &ready, false, ChangeState::Done),
            (Change::Start, &stopped, &stopped, false, ChangeState::InProgress),
            (Change::Start, &stopped, &stopped, true, ChangeState::InProgress),
            (Change::Start, &stopped, &by_request, true, ChangeState::Otherwise),
            (Change::Start, &given_up, &given_up, false, ChangeState::InProgress),
            (Change::Start, &given_up, &again, false, ChangeState::Otherwise),
            (Change::Restart, &ready, &ready, false, ChangeState::InProgress),
            (Change::Restart, &ready, &ready, true, ChangeState::InProgress),
            (Change::Restart, &ready, &stopped, true, ChangeState::InProgress),
            (Change::Restart, &ready, &new, true, ChangeState::Done),
            (Change::Restart, &ready, &again, true, ChangeState::Otherwise),
            (Change::Stop, &ready, &ready, false, ChangeState::InProgress),
            (Change::Stop, &ready, &stopped, true, ChangeState::Done),
            (Change::Stop, &stopped, &stopped, false, ChangeState::Done),
            (Change::Drain, &ready, &at(MpsState::Draining, 2, Some(7)), true, ChangeState::InProgress),
            (Change::Drain, &ready, &ready, true, ChangeState::Otherwise),
        ] {
            assert_eq!(far(what, before, now, going), reached, "{what:?} {:?} to {:?}", before.state, now.state);
        }
    }

    /// Fault: after a restart of gpushd, `mps stop --wait` said that another user had started the daemon: the new gpushd shows
    /// the daemon as starting until it has examined it. `mps restart` took the new time of the same daemon for its end.
    #[test]
    fn restart_of_gpushd_ends_no_change() {
        let ready = at(MpsState::Ready, 1, Some(7));
        for state in [MpsState::Starting, MpsState::Ready] {
            let found = MpsDaemon { stays_stopped: true, ..at(state, 50, Some(7)) };
            for what in [Change::Drain, Change::Stop] {
                assert_eq!(far(what, &ready, &found, true), ChangeState::InProgress, "{what:?} {state:?}");
            }
            assert_eq!(far(Change::Restart, &ready, &at(state, 50, Some(7)), true), ChangeState::InProgress);
            let started = at(state, 50, Some(7));
            assert_eq!(far(Change::Drain, &ready, &started, true), ChangeState::Otherwise, "{state:?}");
        }
        let stopped = at(MpsState::Stopped, 1, None);
        assert_eq!(far(Change::Start, &stopped, &at(MpsState::Stopped, 50, None), true), ChangeState::InProgress);
    }
}
