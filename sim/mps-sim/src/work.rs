//! A simulated computing client for hosts without a GPU. It prints what `tests/gpu/client.py`
//! prints on a real GPU, so that the checks of `tests/gpu` can be tested without a GPU.
//!
//! The client computes nothing. Its speed follows a simple model of an idle device:
//!
//! | | with MPS | without |
//! |---|---|---|
//! | large kernels | in proportion to the percentage | time-sliced: an equal part for each process |
//! | small kernels | each client at full speed, because the kernels fit together | time-sliced |
//!
//! If a duty is set (0 to 1), the kernels run for this part of the time, and the load of the process is this part of the
//! device.
//!
//! An allocation beyond the client's memory limit fails as out of memory. The device has
//! [`MULTIPROCESSORS`] multiprocessors. A client sees its percentage of these multiprocessors.

use std::{
    io,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use gpush_locked::Locked;
use serde_json::json;
use signal_hook::consts::SIGTERM;
use silicon::machine::ProcessKind;

use crate::{
    client::{Unreached, reach},
    place::Environment,
};

/// Number of multiprocessors of the device.
const MULTIPROCESSORS: u32 = 100;

/// Iterations per second with large kernels, of a process that has the whole device to itself. The next constant is for
/// small kernels.
const LARGE: f64 = 1000.0;
const SMALL: f64 = 100.0;

/// Interval between lines about the progress. A client on a real GPU prints only two lines per second. Here, the
/// interval is shorter, so that tests do not wait for long.
const TELLS: Duration = Duration::from_millis(50);

/// Memory of a process in MiB, in addition to its allocations.
const OWN_MEMORY: u64 = 512;

/// What a client does.
#[derive(Debug, Clone, Copy, Default)]
pub struct Work {
    /// Duration of the computation. `None` means until SIGTERM.
    pub seconds: Option<f64>,
    /// Device memory that the client allocates first, in MiB.
    pub allocate: u64,
    /// Whether to use kernels that occupy only a small part of the device.
    pub small: bool,
    /// Part of the time in which the kernels run. `None` means a load that depends on the pid.
    pub duty: Option<f64>,
    /// Whether to wait for a line on standard input before starting.
    pub wait: bool,
}

/// What a client may use: the limits from its MPS server, or a whole device without MPS.
#[derive(Debug, Clone, Copy)]
struct Given {
    mps: bool,
    percentage: f64,
    limit_mib: Option<u64>,
}

impl Given {
    /// Parses the server's first message.
    fn of(words: &str) -> Self {
        let word = |name: &str| words.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let percentage = word("percentage").and_then(|text| text.parse().ok()).unwrap_or(100.0);
        Self { mps: true, percentage, limit_mib: word("memory").and_then(|text| text.parse().ok()) }
    }

    /// Returns the speed in iterations per second. `others` is the number of other processes that
    /// share the device by time-slicing.
    fn speed(self, small: bool, others: usize) -> f64 {
        match (self.mps, small) {
            (true, true) => SMALL,
            (true, false) => LARGE * self.percentage / 100.0,
            #[expect(clippy::cast_precision_loss, reason = "a handful")]
            (false, small) => (if small { SMALL } else { LARGE }) / (others + 1) as f64,
        }
    }
}

/// Computes until the duration has passed, or SIGTERM arrives.
#[must_use]
pub fn main(work: Work) -> ExitCode {
    match run(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            outln!("{}", json!({ "state": "failed", "error": why }));
            ExitCode::FAILURE
        }
    }
}

fn run(work: Work) -> Result<(), String> {
    let ended = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGTERM, Arc::clone(&ended)).map_err(|error| error.to_string())?;
    let place = Environment::of_environment();
    let lost = Arc::new(Locked::new(None));
    let (given, device) = match reach(&place.pipe) {
        Err(Unreached::NoServer) => return Err("error 805".to_owned()),
        Err(Unreached::NoDaemon) => (Given { mps: false, percentage: 100.0, limit_mib: None }, place.device_name()),
        Ok((server, words)) => {
            let lost = Arc::clone(&lost);
            std::thread::spawn(move || {
                let last = server.receive().map_or_else(|_| "lost".into(), |message| message.bytes);
                *lost.lock() = Some(String::from_utf8_lossy(&last).into_owned());
            });
            let device = words.split(' ').find_map(|word| word.strip_prefix("device="));
            (Given::of(&words), device.unwrap_or_default().to_owned())
        }
    };
    if given.limit_mib.is_some_and(|limit| work.allocate > limit) {
        return Err("out of memory".to_owned());
    }
    let kind = if given.mps { ProcessKind::Mps } else { ProcessKind::Compute };
    place.occupy(&device, kind, OWN_MEMORY + work.allocate).map_err(|error| error.to_string())?;
    place.stay_idle().map_err(|error| error.to_string())?;
    let multiprocessors = whole(f64::from(MULTIPROCESSORS) * given.percentage / 100.0);
    let pid = std::process::id();
    outln!("{}", json!({ "state": "ready", "pid": pid, "device": device, "multiprocessors": multiprocessors }));
    let goes_on = || match &*lost.lock() {
        Some(why) => Err(why.clone()),
        None => Ok(!ended.load(Ordering::Relaxed)),
    };
    if work.wait {
        let begins = first_line();
        while goes_on()? && matches!(begins.recv_timeout(TELLS), Err(RecvTimeoutError::Timeout)) {}
    }
    place.work_for(work.duty).map_err(|error| error.to_string())?;
    let others = place.computing(&device).saturating_sub(1);
    let speed = given.speed(work.small, others);
    let began = Instant::now();
    let wanted = work.seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or(Duration::MAX);
    while goes_on()? && began.elapsed() < wanted {
        std::thread::sleep(TELLS.min(wanted.saturating_sub(began.elapsed())));
        outln!("{}", json!({ "state": "computing", "iterations": iterations(began.elapsed(), speed) }));
    }
    let seconds = began.elapsed().as_secs_f64();
    let mut ended = json!({
        "state": "ended",
        "iterations": iterations(began.elapsed(), speed),
        "seconds": seconds,
        "iterations_per_second": speed,
        "longest_pause_ms": 1e3 / speed,
    });
    if let Some(duty) = work.duty {
        ended["busy_seconds"] = json!(duty * seconds);
    }
    outln!("{ended}");
    Ok(())
}

/// Returns a channel. It receives a message when standard input has a line, or has ended.
fn first_line() -> mpsc::Receiver<()> {
    let (tell, reported) = mpsc::channel();
    std::thread::spawn(move || {
        let _whatever_it_is = io::stdin().read_line(&mut String::new());
        let _nobody_waits = tell.send(());
    });
    reported
}

/// Returns the number of iterations in a duration.
fn iterations(time: Duration, speed: f64) -> u64 {
    whole(time.as_secs_f64() * speed)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "neither negative nor large")]
fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_follows_the_model() {
        let with = Given::of("server=7 percentage=25.0 device=GPU-1 memory=2048");
        assert_eq!((with.limit_mib, with.speed(false, 3), with.speed(true, 3)), (Some(2048), 250.0, 100.0));
        let without = Given { mps: false, percentage: 100.0, limit_mib: None };
        assert_eq!((without.speed(false, 0), without.speed(false, 3), without.speed(true, 1)), (1000.0, 250.0, 50.0));
        assert_eq!(Given::of("server=7 percentage=50.0 device=GPU-1").limit_mib, None);
    }
}
