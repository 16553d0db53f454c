//! How gpushd splits the energy of a GPU between two leases under MPS.

use std::time::{Duration, Instant};

use gpush_api::HostUsage;
use jiff::Timestamp;
use serde_json::json;
use tokio::time::sleep;

use super::{
    Drivers,
    figures::{active_energy, mean, parts},
    settle,
};
use crate::gpu::{PATIENCE, client::Work, report::Found, service::Service};

/// The duties of the clients. A client without a duty has memory on the GPU and does not work.
const CASES: [(&str, [Option<f64>; 2]); 2] =
    [("one works, one is idle", [Some(0.8), None]), ("both work, 2:1", [Some(0.6), Some(0.3)])];

/// How often gpushd is asked for figures. While it is asked, it takes a sample each second.
const ASK: Duration = Duration::from_millis(500);

/// Measures both cases.
pub(super) async fn of_two(service: &mut Service, drivers: &Drivers, seconds: f64) -> Result<Found, String> {
    service.idle().await?;
    let mut reader = drivers.reader()?;
    let power: Vec<f64> = reader.windows(seconds).await?.iter().filter_map(|window| window.power_w).collect();
    let idle_w = mean(&power).ok_or("the driver does not report the power")?;
    let (mut rows, mut words) = (Vec::new(), Vec::new());
    let mut ok = true;
    for (case, duties) in CASES {
        let Split { energies_j, seconds, expected } = split(service, duties, seconds).await?;
        let active = active_energy(&energies_j, idle_w, seconds);
        let measured = parts(&active);
        ok &= measured[0] > measured[1];
        words.push(format!(
            "{case}: {:.0} % of the active energy for the first, expected {:.0} %",
            measured[0] * 100.0,
            expected[0] * 100.0
        ));
        let points = |values: &[f64]| values.iter().map(|value| format!("{:.0}", value * 100.0)).collect::<Vec<_>>();
        let joules: Vec<String> = energies_j.iter().map(|energy| format!("{energy:.0}")).collect();
        let [joules, measured, expected] =
            [joules, points(&measured), points(&expected)].map(|values| values.join(" : "));
        rows.push(json!([case, format!("{seconds:.0}"), joules, measured, expected]));
    }
    let columns = ["case", "seconds", "energy, J", "active energy, %", "expected, %"];
    Ok(Found {
        ok,
        words: format!("{}; {idle_w:.0} W without a client", words.join("; ")),
        figures: json!({ "columns": columns, "rows": rows, "idle_w": idle_w }),
    })
}

/// What two leases got.
struct Split {
    energies_j: Vec<f64>,
    seconds: f64,
    /// The parts of the active energy by the duties.
    expected: Vec<f64>,
}

async fn split(service: &mut Service, duties: [Option<f64>; 2], seconds: f64) -> Result<Split, String> {
    service.idle().await?;
    let mut clients = Vec::new();
    for duty in duties {
        // A client that waits for a command has memory on the GPU, and does not work.
        let work = Work { duty, wait: duty.is_none(), ..Work::default() };
        // The leases must be in the order of the clients, so the next client starts when this one has its lease.
        let mut client = service.run(&["--mps", "50"], work)?;
        service.serves(client.ready().await?.pid).await?;
        clients.push(client);
    }
    for (client, _) in clients.iter_mut().zip(duties).filter(|(_, duty)| duty.is_some()) {
        client.computes().await?;
    }
    settle(seconds).await;
    let before = energies(service, 2).await?;
    // One sample may answer several requests, so the samples tell the time. The share of a lease is known after two.
    let shortest = seconds.max(2.0);
    let (after, seconds) = loop {
        sleep(ASK).await;
        let after = energies(service, 2).await?;
        let seconds = after.sampled_at.duration_since(before.sampled_at).as_secs_f64();
        if seconds >= shortest {
            break (after, seconds);
        }
    };
    let mut truths = Vec::new();
    for (client, duty) in clients.into_iter().zip(duties) {
        let ended = client.stop().await?;
        truths.push(if duty.is_some() { ended.duty()? } else { 0.0 });
    }
    let energies_j = before.leases_j.iter().zip(after.leases_j).map(|(before, after)| after - before).collect();
    Ok(Split { energies_j, seconds, expected: parts(&truths) })
}

/// What a sample of the GPU says.
struct Energies {
    sampled_at: Timestamp,
    /// The energy of each lease until the sample in J, in the order of the leases.
    leases_j: Vec<f64>,
}

/// Returns the energies of the leases at the newest sample.
async fn energies(service: &Service, leases: usize) -> Result<Energies, String> {
    let until = Instant::now() + PATIENCE;
    loop {
        let usage: HostUsage = service.ctl(&["top", "--once"]).await?;
        let sampled_at = usage.gpu_usage.first().and_then(|gpu| gpu.sampled_at);
        if let Some(sampled_at) = sampled_at.filter(|_| usage.lease_usage.len() == leases) {
            let mut energies: Vec<_> = usage.lease_usage.iter().map(|lease| (lease.lease_id, lease.energy_j)).collect();
            energies.sort_by_key(|(id, _)| *id);
            return Ok(Energies { sampled_at, leases_j: energies.into_iter().map(|(_, energy)| energy).collect() });
        }
        if Instant::now() > until {
            return Err(format!("gpushd does not report the use of {leases} leases"));
        }
        sleep(ASK).await;
    }
}
