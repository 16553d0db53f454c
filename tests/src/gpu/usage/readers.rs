//! Whether a second reader of the GPU changes what the first one reads, or what its samples cost.

use std::{
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use serde_json::json;
use tokio::process::Command;

use super::{
    Drivers,
    duty::{OF_GPU, errors},
    figures::{CallTimes, SignalError},
    working,
};
use crate::gpu::{ground::Ground, report::Found, service::Service};

/// Duty of the client.
const DUTY: f64 = 0.5;

/// Pause between two samples of the second reader. It is no multiple of the first reader's, so that the samples are at
/// different moments.
const PAUSE: Duration = Duration::from_millis(230);

/// The second reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondReader {
    None,
    /// gpush's own sampler, with a driver session of its own.
    Sampler,
    /// `nvidia-smi dmon`.
    Dmon,
}

impl SecondReader {
    const ALL: [Self; 3] = [Self::None, Self::Sampler, Self::Dmon];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sampler => "another sampler",
            Self::Dmon => "nvidia-smi dmon",
        }
    }
}

/// Measures the signals with each second reader.
pub(super) async fn all(
    service: &mut Service,
    drivers: &Drivers,
    ground: &Ground,
    seconds: f64,
) -> Result<Found, String> {
    let mut reader = drivers.reader()?;
    let (client, pid) = working(service, DUTY).await?;
    let mut measured = Vec::new();
    for second in SecondReader::ALL {
        let read = reader.windows(seconds);
        let windows = match second {
            SecondReader::None => read.await?,
            SecondReader::Sampler => with_sampler(ground, read).await?,
            SecondReader::Dmon => match dmon() {
                Ok(mut dmon) => {
                    let windows = read.await?;
                    let ended = dmon.try_wait().map_err(|error| error.to_string())?;
                    let _ended_already = dmon.kill().await;
                    match ended {
                        None => windows,
                        Some(status) => {
                            measured.push((second, Err(format!("it ended with {status}"))));
                            continue;
                        }
                    }
                }
                Err(why) => {
                    measured.push((second, Err(why)));
                    continue;
                }
            },
        };
        measured.push((second, Ok(windows)));
    }
    let truth = client.stop().await?.duty()?;
    let mut rows = Vec::new();
    let mut words = Vec::new();
    for (second, windows) in measured {
        match windows {
            Ok(windows) => {
                let cells = errors(&windows, pid, truth).into_iter().map(SignalError::cell);
                let took = windows.iter().map(|window| Duration::from_micros(window.took_us)).collect();
                let took = CallTimes::of(took).ok_or("no window")?;
                words.push(format!("{}: {:.0} µs", second.name(), took.median_us));
                let took = [took.median_us, took.longest_us].map(|us| format!("{us:.0}"));
                rows.push([second.name().to_owned()].into_iter().chain(cells).chain(took).collect::<Vec<_>>());
            }
            Err(why) => words.push(format!("{}: not done, {why}", second.name())),
        }
    }
    let names = OF_GPU.iter().map(|(name, _)| *name).chain(["process", "sample, median µs", "longest µs"]);
    let columns: Vec<&str> = ["second reader"].into_iter().chain(names).collect();
    Ok(Found {
        ok: true,
        words: format!("a sample with a second reader: {}", words.join(", ")),
        figures: json!({ "columns": columns, "rows": rows, "duty": truth }),
    })
}

/// Runs a measurement while a second sampler reads the GPU.
async fn with_sampler<T>(ground: &Ground, measured: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let drivers = Drivers::open(ground)?;
    let is_over = AtomicBool::new(false);
    let second = async {
        let mut reader = drivers.reader()?;
        while !is_over.load(Ordering::Relaxed) {
            reader.read()?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok::<(), String>(())
    };
    let first = async {
        let outcome = measured.await;
        is_over.store(true, Ordering::Relaxed);
        outcome
    };
    let (outcome, second) = tokio::join!(first, second);
    second.map_err(|why| format!("the second sampler: {why}"))?;
    outcome
}

/// Starts `nvidia-smi dmon`, which reads the GPU once a second.
fn dmon() -> Result<tokio::process::Child, String> {
    let mut command = Command::new("nvidia-smi");
    command.args(["dmon", "-s", "pucm", "-d", "1"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.kill_on_drop(true).spawn().map_err(|error| format!("nvidia-smi can't be started: {error}"))
}
