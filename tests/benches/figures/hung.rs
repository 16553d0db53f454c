//! Durations of commands for other GPUs while the reading of one GPU hangs.

use std::time::Duration;

use gpush_tests::hung_gpu::{Compared, compare};

use crate::report::Report;

/// Number of runs of each command in each condition.
const ROUNDS: usize = 15;

/// Measures each command twice: while no GPU hangs, and while one GPU hangs.
pub(crate) fn run() -> Report {
    let mut report = Report::new(
        "One GPU hangs",
        &format!(
            "The simulated host has four H100 GPUs. GPUs 0 and 1 are shared through MPS, GPU 2 has MIG mode enabled, \
             and GPU 3 is time-sliced. Except for `status`, each command concerns one GPU. Each command runs {ROUNDS} \
             times while all GPUs answer, and {ROUNDS} times while the reading of GPU 1 hangs. The table shows medians \
             in ms. It does not include resets, maintenance and runs of `nvidia-smi` that open all GPUs, because these \
             operations wait for each other."
        ),
        &["", "all answer", "GPU 1 hangs"],
    );
    let compared = compare(ROUNDS);
    let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
    for one in &compared {
        report.rows.push(vec![one.name.to_owned(), ms(one.usual), ms(one.hung)]);
    }
    let is_slow = |one: &&Compared| one.hung > one.usual * 2 + Duration::from_millis(100);
    let slow: Vec<&str> = compared.iter().filter(is_slow).map(|one| one.name).collect();
    let measured =
        if slow.is_empty() { format!("{} of {} commands", compared.len(), compared.len()) } else { slow.join(", ") };
    report.target(
        "commands for other GPUs while one hangs",
        "at most 2 times as long, plus 100 ms",
        &measured,
        slow.is_empty(),
    );
    report
}
