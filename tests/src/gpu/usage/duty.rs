//! The measurement error of each activity signal at several duty cycles, with one client and with two clients under MPS.

use std::collections::BTreeMap;

use serde_json::json;

use super::{
    Drivers,
    figures::{SignalError, grows},
    reader::SignalWindow,
    working,
};
use crate::gpu::{client::Work, report::Found, service::Service};

/// Duties of the client that is alone.
const DUTIES: [f64; 5] = [0.1, 0.3, 0.5, 0.7, 0.9];

/// Duties of the two clients under MPS.
const PAIRS: [[f64; 2]; 3] = [[0.1, 0.5], [0.5, 0.25], [0.9, 0.45]];

/// A signal of the whole GPU.
type Signal = fn(&SignalWindow) -> Option<f64>;

/// The signals of the whole GPU, with their names.
pub(super) const OF_GPU: [(&str, Signal); 3] = [
    ("GPM engine", |window| window.gpm_engine),
    ("GPM SM", |window| window.gpm_sm),
    ("utilization", |window| window.utilization),
];

/// Returns the error of each signal of the GPU, and of the utilization of a process.
pub(super) fn errors(windows: &[SignalWindow], pid: u32, truth: f64) -> Vec<Option<SignalError>> {
    let of = |signal: &dyn Fn(&SignalWindow) -> Option<f64>| {
        SignalError::of(&windows.iter().map(signal).collect::<Vec<_>>(), truth)
    };
    OF_GPU.iter().map(|(_, signal)| of(signal)).chain([of(&|window| of_process(window, pid))]).collect()
}

fn of_process(window: &SignalWindow, pid: u32) -> Option<f64> {
    window.processes.get(&pid).copied().flatten()
}

/// Measures the error with one client.
pub(super) async fn alone(service: &mut Service, drivers: &Drivers, seconds: f64) -> Result<Found, String> {
    let names = || OF_GPU.iter().map(|(name, _)| *name).chain(["process"]);
    let mut reader = drivers.reader()?;
    let (mut rows, mut all) = (Vec::<Vec<String>>::new(), Vec::new());
    for duty in DUTIES {
        let (client, pid) = working(service, duty).await?;
        let windows = reader.windows(seconds).await?;
        let truth = client.stop().await?.duty()?;
        let errors = errors(&windows, pid, truth);
        let cells = errors.iter().map(|error| SignalError::cell(*error));
        rows.push([format!("{:.0}", duty * 100.0), format!("{:.1}", truth * 100.0)].into_iter().chain(cells).collect());
        all.push(errors);
    }
    let of_signal = |at: usize| all.iter().map(|errors| errors[at]).collect::<Vec<_>>();
    let signals: BTreeMap<&str, Vec<Option<SignalError>>> =
        names().enumerate().map(|(at, name)| (name, of_signal(at))).collect();
    let words: Vec<String> = names().map(|name| format!("{name} {}", largest(&signals[name]))).collect();
    let columns: Vec<&str> = ["duty, %", "measured by the client, %"].into_iter().chain(names()).collect();
    Ok(Found {
        ok: signals.values().any(|errors| grows(errors)),
        words: format!("largest errors at duties of 10 to 90 %: {}", words.join(", ")),
        figures: json!({ "columns": columns, "rows": rows, "signals": signals }),
    })
}

/// Returns the largest error of a signal as text.
fn largest(errors: &[Option<SignalError>]) -> String {
    let known = errors.iter().flatten().map(|error| error.largest);
    known.reduce(f64::max).map_or_else(|| "not reported".to_owned(), |largest| format!("±{largest:.1} points"))
}

/// Measures the utilization of two processes under MPS, each with half of the GPU.
pub(super) async fn under_mps(service: &mut Service, drivers: &Drivers, seconds: f64) -> Result<Found, String> {
    let mut reader = drivers.reader()?;
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    for pair in PAIRS {
        service.idle().await?;
        let work = |duty| Work { duty: Some(duty), ..Work::default() };
        let mut clients =
            [service.run(&["--mps", "50"], work(pair[0]))?, service.run(&["--mps", "50"], work(pair[1]))?];
        let mut pids = Vec::new();
        for client in &mut clients {
            pids.push(client.ready().await?.pid);
        }
        for (client, pid) in clients.iter_mut().zip(&pids) {
            service.serves(*pid).await?;
            client.computes().await?;
        }
        let windows = reader.windows(seconds).await?;
        let mut row = Vec::new();
        for (client, pid) in clients.into_iter().zip(pids) {
            let truth = client.stop().await?.duty()?;
            let values: Vec<Option<f64>> = windows.iter().map(|window| of_process(window, pid)).collect();
            let error = SignalError::of(&values, truth);
            row.extend([format!("{:.1}", truth * 100.0), SignalError::cell(error)]);
            all.push(error);
        }
        // The kernels of the clients run at the same time, so nothing says how long the GPU as a whole is busy.
        let of_gpu = OF_GPU.iter().map(|(_, signal)| {
            let values: Vec<f64> = windows.iter().filter_map(signal).collect();
            super::figures::mean(&values)
                .map_or_else(|| "not reported".to_owned(), |mean| format!("{:.1}", mean * 100.0))
        });
        row.extend(of_gpu);
        rows.push(row);
    }
    let clients = ["duty of A, %", "process A", "duty of B, %", "process B"];
    let columns: Vec<&str> = clients.into_iter().chain(OF_GPU.iter().map(|(name, _)| *name)).collect();
    Ok(Found {
        ok: true,
        words: format!("largest error of the utilization of a process: {}", largest(&all)),
        figures: json!({ "columns": columns, "rows": rows, "processes": all }),
    })
}
