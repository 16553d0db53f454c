//! An open top: keys, answers, signals and the clock, each of which changes the picture.

use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_util::StreamExt as _;
use gpush_api::{ApiError, Code};
use gpush_client::Client;
use jiff::Timestamp;
use signal_hook::low_level::emulate_default_handler;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use super::{
    answers::HostAnswers,
    draw,
    feed::{self, Report, Request},
    keys,
    state::{Effect, State},
    terminal::Screen,
};
use crate::{
    exit::{self, Failure, INTERRUPTED, Outcome},
    output::Output,
    render::Appearance,
};

/// Pause between two readings of GPUs and processes, which need driver calls. gpushd answers several requests within a
/// second from one reading, and all tops read at the same moments. So ten open tops cause no more readings than one.
const READ_ALL: Duration = Duration::from_secs(5);

/// Maximum number of orders and of reports that wait.
const QUEUE: usize = 8;

/// Shows the picture until the user quits.
pub(super) async fn run(
    client: &mut Client,
    first: HostAnswers,
    selectors: &[String],
    interval: Duration,
    out: &Output,
) -> Outcome {
    let (orders, ordered) = mpsc::channel(QUEUE);
    let (reports, reported) = mpsc::channel(QUEUE);
    let silent = out.without_remarks();
    let feed = feed::serve(client, selectors, &silent, first.clone(), ordered, reports);
    let mut session = Session { state: State::new(first), orders, waits: false, read_all: present_interval(), out };
    tokio::select! {
        outcome = session.show(reported, interval) => outcome,
        () = feed => Err(ApiError::new(Code::Internal, "the requests to gpushd have ended").into()),
    }
}

struct Session<'o> {
    state: State,
    orders: mpsc::Sender<Request>,
    /// Whether an order has no report yet.
    waits: bool,
    /// The number of the interval of [`READ_ALL`] in which everything was read last.
    read_all: i64,
    out: &'o Output,
}

/// The signals that end or stop the program.
struct EndSignals {
    terminate: Signal,
    hang_up: Signal,
    interrupt: Signal,
}

impl EndSignals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for a signal. Returns its number.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.hang_up.recv() => SignalKind::hangup().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }
}

fn terminal_error(error: &std::io::Error) -> Failure {
    exit::io("cannot use the terminal", error).hint("use `gpushctl top --once`").into()
}

impl Session<'_> {
    fn look(&self) -> Appearance {
        Appearance { now: Timestamp::now(), ..self.out.look }
    }

    async fn show(&mut self, mut reports: mpsc::Receiver<Report>, interval: Duration) -> Outcome {
        let mut signals = EndSignals::listen().map_err(|error| exit::io("cannot handle signals", &error))?;
        let mut screen = Some(Screen::open().map_err(|error| terminal_error(&error))?);
        let mut events = EventStream::new();
        let mut next = Box::pin(tokio::time::sleep(until_next(Timestamp::now(), interval)));
        let is_colored = self.out.is_colored();
        loop {
            let look = self.look();
            let state = &mut self.state;
            if let Some(screen) = &mut screen {
                let drawn = screen.draw(|frame| draw::picture(frame, state, is_colored, &look));
                drawn.map_err(|error| terminal_error(&error))?;
            }
            let effect = tokio::select! {
                event = events.next() => match event {
                    Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                        keys::action(self.state.key_context(), key).and_then(|action| self.state.act(action, &look))
                    }
                    // The next loop draws the picture with the new size.
                    Some(Ok(_)) => None,
                    Some(Err(error)) => return Err(terminal_error(&error)),
                    None => Some(Effect::Quit),
                },
                Some(report) = reports.recv() => {
                    self.report(report, &look);
                    None
                }
                () = &mut next => {
                    next = Box::pin(tokio::time::sleep(until_next(Timestamp::now(), interval)));
                    self.order_next();
                    None
                }
                number = signals.next() => {
                    // Restore the terminal first: the signal ends this process.
                    drop(screen.take());
                    let _ = emulate_default_handler(number);
                    return Ok(INTERRUPTED);
                }
            };
            match effect {
                None => {}
                Some(Effect::Quit) => return Ok(0),
                Some(Effect::Interrupt) => return Ok(INTERRUPTED),
                Some(Effect::ReadAll) => self.order(Request::All),
                Some(Effect::ReadPast(lease)) => self.order(Request::Past(lease)),
                Some(Effect::Change(change)) => self.order(Request::Change(change)),
                Some(Effect::Suspend) => {
                    drop(screen.take());
                    // Returns when the shell continues this process.
                    let _ = emulate_default_handler(signal_hook::consts::SIGTSTP);
                    screen = Some(Screen::open().map_err(|error| terminal_error(&error))?);
                    self.order(Request::All);
                }
            }
        }
    }

    /// Orders the next answers, unless gpushd has not answered yet.
    fn order_next(&mut self) {
        if self.waits {
            self.state.waits_for_answer(Timestamp::now());
            return;
        }
        let present = present_interval();
        let is_due = present != self.read_all;
        self.read_all = present;
        self.order(if is_due { Request::All } else { Request::Figures });
    }

    fn order(&mut self, order: Request) {
        match self.orders.try_send(order) {
            Ok(()) => self.waits = true,
            Err(_) => self.state.message = Some("gpushd has not answered the last requests yet".to_owned()),
        }
    }

    fn report(&mut self, report: Report, look: &Appearance) {
        match report {
            Report::Answers(answers) => {
                self.waits = false;
                self.state.answered(*answers);
            }
            Report::Past(past) => {
                self.waits = false;
                self.state.past = past;
            }
            Report::Changed(change, changed) => {
                self.state.message = Some(match *changed {
                    Ok(lease) => change.done(&lease, look),
                    Err(error) => look.clean(&error.message),
                });
            }
        }
    }
}

/// Returns the number of the present interval of [`READ_ALL`], from the epoch on.
fn present_interval() -> i64 {
    Timestamp::now().as_second() / i64::try_from(READ_ALL.as_secs()).unwrap_or(1)
}

/// Returns the time until the next multiple of the interval on the clock, so that all tops ask at the same moments.
fn until_next(now: Timestamp, interval: Duration) -> Duration {
    let now = u128::try_from(now.as_millisecond()).unwrap_or(0);
    let interval = interval.as_millis().max(1);
    Duration::from_millis(u64::try_from(interval - now % interval).unwrap_or(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// gpushd answers requests within a second from one reading, so tops that ask at the same moment share it.
    #[test]
    fn tops_with_one_interval_ask_at_the_same_moments() {
        let interval = Duration::from_secs(2);
        let next = |ms: i64| {
            let wait = until_next(Timestamp::from_millisecond(ms).unwrap(), interval);
            ms + i64::try_from(wait.as_millis()).unwrap()
        };
        for started in [10_000, 10_001, 11_500, 11_999] {
            assert_eq!(next(started), 12_000, "{started}");
        }
        assert_eq!(next(12_000), 14_000);
    }
}
