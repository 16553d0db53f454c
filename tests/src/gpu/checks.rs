//! The checks. A check starts with a running MPS daemon without clients, and leaves the daemon in
//! that state.
//!
//! A check fails only because of an outcome, or because of a ratio of times within one run. It
//! prints times but does not check them, because a time is valid for one machine only.

use std::time::{Duration, Instant};

use gpush_api::{MpsDaemon, MpsState, MpsUsers};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use super::{
    client::{Client, Work},
    report::{Found, Report},
    service::{Service, TARGET},
};

/// Percentages whose throughput is measured. The last percentage is the reference.
const PERCENTAGES: [u32; 3] = [25, 50, 100];

/// Number of measurements of each percentage. The check uses the median.
const TIMES: usize = 3;

/// How much a throughput may exceed its percentage, in percentage points. A percentage limits the
/// number of multiprocessors, not the throughput: if fewer multiprocessors compute, each has a
/// higher clock rate and more memory bandwidth.
const SLACK: f64 = 20.0;

/// A memory limit in MiB. The next constants are allocations below and above this limit. A client
/// also needs memory for matrices and libraries, so the allocations are not close to the limit.
const LIMIT_MIB: u64 = 2048;
const BELOW_MIB: u64 = 1024;
const ABOVE_MIB: u64 = 3072;

/// Numbers of small clients that compute at the same time.
const NUMBERS: [usize; 4] = [1, 2, 4, 8];

/// Runs all checks in order, even if a check fails.
pub async fn all(service: &mut Service, seconds: f64, report: &mut Report) {
    report.add("throughput", throughput(service, seconds).await);
    report.add("memory limit", memory_limit(service).await);
    report.add("client killed", client_killed(service).await);
    report.add("daemon killed", daemon_killed(service).await);
    report.add("agent killed", agent_killed(service).await);
    // This check stops the daemon, so it is the last one.
    report.add("small clients", small_clients(service, seconds).await);
}

/// Checks that each percentage limits a client's throughput, and that a higher percentage gives a
/// higher throughput.
async fn throughput(service: &mut Service, seconds: f64) -> Result<Found, String> {
    service.idle().await?;
    let mut speeds = vec![Vec::new(); PERCENTAGES.len()];
    let mut multiprocessors = [0; PERCENTAGES.len()];
    // The percentages alternate. If the GPU heats up and becomes slower, all percentages are
    // affected equally.
    for _ in 0..TIMES {
        for (at, percentage) in PERCENTAGES.iter().enumerate() {
            let work = Work { seconds: Some(seconds), wait: true, ..Work::default() };
            let mut client = service.run(&["--mps", &percentage.to_string()], work)?;
            let ready = client.ready().await?;
            service.serves(ready.pid).await?;
            multiprocessors[at] = ready.multiprocessors;
            client.begin().await?;
            speeds[at].push(client.ended().await?.iterations_per_second);
        }
    }
    let medians: Vec<f64> = speeds.iter().cloned().map(median).collect();
    let ratios: Vec<f64> = medians.iter().map(|speed| speed / medians[PERCENTAGES.len() - 1]).collect();
    let grows = ratios.windows(2).all(|two| two[0] < two[1]);
    let bounded = ratios.iter().zip(PERCENTAGES).all(|(ratio, most)| ratio * 100.0 <= f64::from(most) + SLACK);
    let each: Vec<String> = ratios.iter().zip(PERCENTAGES).map(|(ratio, of)| format!("{of} %: {ratio:.2}")).collect();
    let columns = ["active thread percentage", "multiprocessors", "iterations/s, median", "of 100 %"];
    let rows: Vec<_> = (0..PERCENTAGES.len())
        .map(|at| json!([PERCENTAGES[at], multiprocessors[at], medians[at], ratios[at]]))
        .collect();
    Ok(Found {
        ok: grows && bounded,
        words: format!("{} of {:.1} iterations/s", each.join(", "), medians[PERCENTAGES.len() - 1]),
        figures: json!({ "columns": columns, "rows": rows, "each": speeds }),
    })
}

/// Checks that an allocation above a client's limit fails. An allocation below the limit, or
/// without a limit, must succeed.
async fn memory_limit(service: &mut Service) -> Result<Found, String> {
    service.idle().await?;
    let limit = format!("{LIMIT_MIB}M");
    let limited = ["--mps", "--memory", limit.as_str()];
    let allocating = |mib| Work { allocate: mib, ..Work::NONE };
    service.run(&limited, allocating(BELOW_MIB))?.ended().await.map_err(|why| format!("{BELOW_MIB} MiB: {why}"))?;
    // If even this allocation fails, the GPU may be too small for the check.
    service
        .run(&["--mps"], allocating(ABOVE_MIB))?
        .ended()
        .await
        .map_err(|why| format!("{ABOVE_MIB} MiB, no limit: {why}"))?;
    let mut above = service.run(&limited, allocating(ABOVE_MIB))?;
    let printed = match above.ended().await {
        Ok(_) => "went through".to_owned(),
        Err(why) => why,
    };
    above.gone().await?;
    Ok(Found {
        ok: printed == "out of memory",
        words: format!("limit {LIMIT_MIB} MiB: {BELOW_MIB} MiB went through, {ABOVE_MIB} MiB: {printed}"),
        figures: json!({ "limit_mib": LIMIT_MIB, "below_mib": BELOW_MIB, "above_mib": ABOVE_MIB, "above": printed }),
    })
}

/// Kills a client while it computes. Checks that no other client ends, and that the share of the
/// killed client becomes free.
async fn client_killed(service: &mut Service) -> Result<Found, String> {
    service.idle().await?;
    let half = ["--mps", "50"];
    let (mut victim, mut other) = (service.run(&half, Work::default())?, service.run(&half, Work::default())?);
    let (pid, others) = (victim.ready().await?.pid, other.ready().await?.pid);
    service.serves(pid).await?;
    service.serves(others).await?;
    victim.computes().await?;
    other.computes().await?;
    let killed = Instant::now();
    kill_now(pid)?;
    victim.gone().await?;
    other.computes().await.map_err(|why| format!("the other client did not survive it: {why}"))?;
    let gone = |daemon: &MpsDaemon| daemon.clients.iter().all(|client| client.pid != Some(pid));
    service.becomes("without the client that was killed", gone).await?;
    let forgotten = killed.elapsed();
    let mut next = service.run(&half, Work::default())?;
    let ready = next.ready().await.map_err(|why| format!("the next client: {why}"))?;
    service.serves(ready.pid).await?;
    next.computes().await?;
    next.stop().await?;
    let ended = other.stop().await?;
    Ok(Found {
        ok: true,
        words: format!(
            "the other computed on, longest pause {:.0} ms; gone from gpushd's view after {} ms; the next one computes",
            ended.longest_pause_ms,
            forgotten.as_millis()
        ),
        figures: json!({ "other": ended, "forgotten_ms": milliseconds(forgotten) }),
    })
}

/// Kills a control daemon. Checks that gpushd notices this, that it waits until the client of the
/// daemon's server has ended, and that it then starts another daemon. The result also says what
/// happened to the client.
async fn daemon_killed(service: &mut Service) -> Result<Found, String> {
    let before = service.idle().await?;
    let pid = before.pid.ok_or("gpushd does not tell the daemon's pid")?;
    let mut client = service.run(&["--mps", "50"], Work::default())?;
    service.serves(client.ready().await?.pid).await?;
    client.computes().await?;
    let killed = Instant::now();
    kill_now(pid)?;
    let missed = |daemon: &MpsDaemon| daemon.pid != Some(pid) || daemon.state != MpsState::Ready;
    service.becomes("missed", missed).await?;
    let noticed = killed.elapsed();
    let became = match client.computes().await {
        Ok(()) => "computed on".to_owned(),
        Err(why) => format!("lost its work ({why})"),
    };
    let left = Instant::now();
    // Ignore an error: a client that has lost its context reports nothing more.
    let _ended = client.stop().await;
    let serves = |daemon: &MpsDaemon| daemon.pid != Some(pid) && daemon.state == MpsState::Ready;
    service.becomes("ready again", serves).await?;
    let again = left.elapsed();
    let mut next = service.run(&["--mps", "50"], Work::default())?;
    let ready = next.ready().await.map_err(|why| format!("the next client: {why}"))?;
    service.serves(ready.pid).await?;
    next.computes().await?;
    let computes = left.elapsed();
    next.stop().await?;
    Ok(Found {
        ok: true,
        words: format!(
            "noticed after {} ms; its client {became}; from that one's end to ready again {} ms, to a new client that \
             computes {} ms",
            noticed.as_millis(),
            again.as_millis(),
            computes.as_millis()
        ),
        figures: json!({
            "noticed_ms": milliseconds(noticed),
            "its_client": became,
            "ready_again_ms": milliseconds(again),
            "new_client_computes_ms": milliseconds(computes),
        }),
    })
}

/// Kills gpushd. Checks that no other process ends, and that the next gpushd adopts the MPS daemon
/// and its client.
async fn agent_killed(service: &mut Service) -> Result<Found, String> {
    let before = service.idle().await?;
    let mut client = service.run(&["--mps", "50"], Work::default())?;
    let pid = client.ready().await?.pid;
    service.serves(pid).await?;
    client.computes().await?;
    service.kill().await?;
    let without = client.computes().await;
    let started = Instant::now();
    service.start().await?;
    without.map_err(|why| format!("while there was no gpushd: {why}"))?;
    // gpushd finds a daemon through its directory. At this moment, the driver may not have
    // identified the GPU of the daemon yet.
    let found = |daemon: &MpsDaemon| daemon.state == MpsState::Ready && daemon.gpu.is_some();
    let after = service.becomes("ready", found).await?;
    let adopted = started.elapsed();
    service.serves(pid).await?;
    client.computes().await?;
    let ended = client.stop().await?;
    let same = before.pid == after.pid;
    let which = if same { "the same daemon" } else { "another daemon" };
    Ok(Found {
        ok: same,
        words: format!(
            "{which}, ready {} ms after the start of the next gpushd; the client's longest pause {:.0} ms",
            adopted.as_millis(),
            ended.longest_pause_ms
        ),
        figures: json!({ "same_daemon": same, "ready_again_ms": milliseconds(adopted), "client": ended }),
    })
}

/// Checks that small clients have more throughput together through MPS than with time-slicing.
async fn small_clients(service: &mut Service, seconds: f64) -> Result<Found, String> {
    service.idle().await?;
    let work = Work { seconds: Some(seconds), small: true, wait: true, ..Work::default() };
    // All clients use one lease, as in a job that starts several programs.
    let granted = service.lease(&[]).await?;
    let mut with = Vec::new();
    for number in NUMBERS {
        let (mut clients, mut pids) = (Vec::new(), Vec::new());
        for _ in 0..number {
            clients.push(service.with(Some(&granted), work)?);
        }
        for client in &mut clients {
            pids.push(client.ready().await?.pid);
        }
        for pid in pids {
            service.serves(pid).await?;
        }
        with.push(together(&mut clients).await?);
    }
    service.release(&granted).await?;
    // When gpushd has seen that the last client of the lease has ended, the lease ends.
    service.idle().await?;
    service.ctl::<serde_json::Value>(&["mps", "stop", TARGET]).await?;
    let mut without = Vec::new();
    for number in NUMBERS {
        let mut clients = Vec::new();
        for _ in 0..number {
            clients.push(service.with(None, work)?);
        }
        for client in &mut clients {
            client.ready().await?;
        }
        without.push(together(&mut clients).await?);
    }
    service.ctl::<serde_json::Value>(&["mps", "start", TARGET]).await?;
    let ratios: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with / without).collect();
    let each: Vec<String> = ratios.iter().zip(NUMBERS).map(|(ratio, of)| format!("{of}: {ratio:.2}")).collect();
    let columns = ["small clients", "MPS, iterations/s", "time-slicing, iterations/s", "MPS to time-slicing"];
    let rows: Vec<_> = (0..NUMBERS.len()).map(|at| json!([NUMBERS[at], with[at], without[at], ratios[at]])).collect();
    Ok(Found {
        ok: ratios[NUMBERS.len() - 1] > 1.0,
        words: format!("throughput with MPS to without, by number of clients: {}", each.join(", ")),
        figures: json!({ "columns": columns, "rows": rows }),
    })
}

/// Uids of two users without privileges and without files.
const STRANGERS: [u32; 2] = [65_534, 65_533];

/// Checks that clients of two users compute through one server, which runs as root. Kills the
/// client of one user, and checks that the other client still computes.
///
/// # Errors
/// If one of these checks fails.
pub async fn several_users(service: &mut Service) -> Result<Found, String> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(Found::not_done("only root can start programs of two users"));
    }
    let idle = service.idle().await?;
    if idle.wanted.users != MpsUsers::Many {
        return Ok(Found::not_done("this control daemon serves one user at a time"));
    }
    service.open_to_all_users()?;
    let half = ["--mps", "50"];
    let mut clients = Vec::new();
    for uid in STRANGERS {
        clients.push(service.run_as(uid, &half, Work::default())?);
    }
    let mut pids = Vec::new();
    for client in &mut clients {
        pids.push(client.ready().await?.pid);
        client.computes().await?;
    }
    for pid in &pids {
        service.serves(*pid).await?;
    }
    let daemon = service.daemon().await?;
    let servers: Vec<_> = daemon.servers.iter().map(|server| server.uid).collect();
    let mut users: Vec<_> = daemon.clients.iter().filter_map(|client| client.uid).collect();
    users.sort_unstable_by(|a, b| b.cmp(a));
    if servers != [Some(0)] || users != STRANGERS {
        return Err(format!("servers of {servers:?}, clients of {users:?}"));
    }
    let (Some(mut other), Some(mut victim)) = (clients.pop(), clients.pop()) else {
        return Err("two clients were started".to_owned());
    };
    kill_now(pids[0])?;
    victim.gone().await?;
    other.computes().await.map_err(|why| format!("the client of the other user did not survive a kill: {why}"))?;
    let ended = other.stop().await?;
    Ok(Found {
        ok: true,
        words: format!(
            "two users computed through one server of root; one was killed, the other computed on, longest pause {:.0} ms",
            ended.longest_pause_ms
        ),
        figures: json!({ "other": ended }),
    })
}

/// Lets all clients compute at the same time. Returns the sum of their iterations per second.
async fn together(clients: &mut [Client]) -> Result<f64, String> {
    for client in clients.iter_mut() {
        client.begin().await?;
    }
    let mut sum = 0.0;
    for client in clients {
        sum += client.ended().await?.iterations_per_second;
    }
    Ok(sum)
}

fn kill_now(pid: u32) -> Result<(), String> {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)
        .map_err(|errno| format!("pid {pid} can't be killed: {errno}"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
