//! Cost of samples and of `/metrics`: driver calls, processor time, memory, and the error of the attribution.

use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use gpush_api::{GpuUuid, HostUsage, LeaseGrant, LeaseId, LeaseUsage};
use gpush_nvml::{
    Hardware,
    proto::GpuRef,
    sample::{InstanceRef, Wanted},
};
use gpush_tests::{
    agent::{Agent, Setup},
    driver::{hardware, mig},
    host::Host,
};
use serde_json::{Value, json};

use crate::{
    bare::{self, Bare, Sampler},
    client::Client,
    ctl,
    footprint::{kib, ran, workers},
    report::{Report, median, percentile},
};

/// Eight GPUs that hold seven GPU instances each.
const HOST: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 8\n";
/// Measured samples of all GPUs. The first ones begin the windows.
const ROUNDS: usize = 60;
const FIRST_ROUNDS: usize = 4;
/// Number of scrapes with [`LEASES`] leases.
const SCRAPES: usize = 300;
const LEASES: usize = 200;
/// Interval of a scraper, and how often it scrapes.
const INTERVAL: Duration = Duration::from_secs(15);
const INTERVALS: u32 = 4;
/// A fault rule that never takes effect. It counts the driver calls of all programs.
const COUNTER: &str = "nvml* --after 1000000000 --rc UNKNOWN";

/// Eight GPUs with 25 replicas each.
const REPLICAS: &str = "[limits]\nchanges_burst = 10000\n\
                        [[gpu]]\nmatch = [\"all\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 25 }\n";

/// A whole GPU, two GPU instances, and a GPU with replicas.
const SHARES: &str = "[[gpu]]\nmatch = \"0\"\nmode = \"exclusive\"\n\
                      [[gpu]]\nmatch = \"1\"\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"3g.40gb\"]\n\
                      [[gpu]]\nmatch = \"2\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n";

/// Returns the number of driver calls since the last [`Host::clear_faults`], for which [`COUNTER`] must be set.
fn calls(host: &Host) -> u64 {
    let rules: Value = serde_json::from_str(&host.sim("fault", &["list", "--json"])).expect("JSON");
    let counter = rules.as_array().and_then(|rules| rules.iter().find(|row| row["rule"]["function"] == "nvml*"));
    counter.and_then(|row| row["seen"].as_u64()).expect("a count")
}

/// Driver calls and processor time in ms of one sample of all GPUs.
struct Cost {
    calls: f64,
    processor_ms: f64,
}

/// Measures rounds of samples. `sample` takes one, and `processor` returns the processor seconds until now.
fn cost(host: &Host, mut sample: impl FnMut(), processor: impl Fn() -> f64) -> Cost {
    let (mut used, mut before) = (0.0, 0);
    for round in 0..FIRST_ROUNDS + ROUNDS {
        host.sim("clock", &["advance", "15s"]);
        if round == FIRST_ROUNDS {
            (used, before) = (0.0, calls(host));
        }
        let begun = processor();
        sample();
        used += processor() - begun;
    }
    let rounds = ROUNDS as f64;
    Cost { calls: (calls(host) - before) as f64 / rounds, processor_ms: used * 1e3 / rounds }
}

/// Creates the instances, and returns the ids of the GPU instances of each GPU.
async fn instances(hardware: &Hardware, gpus: &[GpuRef]) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for gpu in gpus {
        let reading = hardware.read(&gpu.uuid).await.expect("a reading");
        all.push(mig(&reading).instances.iter().map(|one| one.id).collect());
    }
    all
}

/// The cost of a sample of gpushd, of its driver calls alone, and of the same figures with nvml-wrapper.
fn samples() -> [Cost; 3] {
    let host = Host::up(HOST);
    let agent = ctl::agent(&host);
    ctl::must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "1g.10gb*7"]);
    drop(agent);
    host.sim("clock", &["stop"]);
    host.fault(COUNTER);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let hardware = runtime.block_on(async { hardware(&host) });
    let (gpus, ids) = runtime.block_on(async {
        let listed = hardware.list().await.expect("GPUs");
        let gpus: Vec<GpuRef> =
            listed.iter().map(|listed| GpuRef::from(listed.identity.as_ref().expect("an identity"))).collect();
        let ids = instances(&hardware, &gpus).await;
        (gpus, ids)
    });
    assert!(ids.iter().all(|ids| ids.len() == 7), "{ids:?}");
    let sample = || {
        runtime.block_on(async {
            for (gpu, ids) in gpus.iter().zip(&ids) {
                let instances = ids.iter().map(|gi| InstanceRef { gi: *gi, generation: 1 }).collect();
                let sample = hardware.sample(gpu.clone(), Some(instances), Wanted::default()).await;
                assert!(sample.expect("a sample").energy_mj.is_some());
            }
        });
    };
    let own = std::process::id();
    let processor = || ran(own) + workers(own).into_iter().map(ran).sum::<f64>();
    let ours = cost(&host, sample, processor);
    drop(hardware);
    let gpus = json!([gpus, ids]).to_string();
    let [calls, wrapper] = [Sampler::DriverCalls, Sampler::NvmlWrapper].map(|sampler| {
        let mut program = bare::sampling(&host, sampler, &gpus);
        let pid = program.0.id();
        cost(&host, || one_round(&mut program), || ran(pid))
    });
    [ours, calls, wrapper]
}

/// Lets the bare program take a sample, and waits for its end.
fn one_round(program: &mut Bare) {
    let mut byte = [b'\n'];
    program.0.stdin.as_mut().expect("a pipe").write_all(&byte).expect("it reads");
    program.0.stdout.as_mut().expect("a pipe").read_exact(&mut byte).expect("it answers");
}

/// Scrapes of an agent with many leases.
struct Scrapes {
    seconds: Vec<f64>,
    bytes: usize,
    calls: u64,
}

fn scrapes() -> Scrapes {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 8\nmig = false\n");
    let agent = Setup::on(&host).config(REPLICAS).env("GPUSH_LOG", "info").env("MALLOC_ARENA_MAX", "1").start();
    let _operations = agent.settle();
    let mut client = Client::connect(agent.socket()).expect("a connection");
    for _ in 0..LEASES {
        client.timed("POST", "/v1/leases", r#"{"share": {"kind": "timeslice"}}"#, 200);
    }
    host.fault(COUNTER);
    let scrape = |client: &mut Client| client.ask("GET", "/metrics", "").expect("an answer");
    // A sample is due every 15 s. The scrapes are measured directly after one.
    let (status, _, _) = scrape(&mut client);
    assert_eq!(status, 200);
    let at = agent.until("sample", || sampled(&agent));
    agent.until("next sample", || sampled(&agent).filter(|next| *next > at));
    let before = calls(&host);
    let mut answers: Vec<(u16, Vec<u8>, f64)> = (0..SCRAPES).map(|_| scrape(&mut client)).collect();
    let calls = calls(&host) - before;
    let (_, body, _) = answers.pop().expect("a scrape");
    let series = String::from_utf8_lossy(&body).matches("gpush_lease_info{").count();
    assert_eq!(series, LEASES, "all leases are in the answer");
    Scrapes { seconds: answers.into_iter().map(|(_, _, took)| took).collect(), bytes: body.len(), calls }
}

/// Returns the time of the oldest sample.
fn sampled(agent: &Agent) -> Option<jiff::Timestamp> {
    let usage: HostUsage = serde_json::from_value(agent.get("/v1/usage").json()).expect("usage");
    usage.gpu_usage.iter().map(|gpu| gpu.sampled_at).min().flatten()
}

/// Resident and proportional memory in MiB: a bare program, gpushd with its worker, and both with samples. Also the
/// processor time in percent of a core with a scraper.
struct Footprint {
    rows: Vec<(&'static str, f64, f64)>,
    share: f64,
}

fn footprint() -> Footprint {
    let host = Host::up(HOST);
    let bare = bare::initialised(&host);
    let agent = ctl::agent(&host);
    ctl::must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "1g.10gb*7"]);
    for _ in 0..100 {
        assert_eq!(agent.gpus().len(), 8);
    }
    let memory =
        |pids: &[u32]| ["Rss:", "Pss:"].map(|line| pids.iter().map(|pid| kib(*pid, line) / 1024.0).sum::<f64>());
    let mut rows = Vec::new();
    let mut row = |what, pids: &[u32]| {
        let [resident, proportional] = memory(pids);
        rows.push((what, resident, proportional));
    };
    row("bare program", &[bare.0.id()]);
    let own = agent.pid();
    let (before, workers_before) = ([vec![own], workers(own)].concat(), workers(own));
    row("gpushd and its worker, without samples", &before);
    let mut client = Client::connect(agent.socket()).expect("a connection");
    client.timed("GET", "/metrics", "", 200);
    agent.until("sample", || sampled(&agent));
    let all = [vec![own], workers(own)].concat();
    let begun: f64 = all.iter().copied().map(ran).sum();
    for _ in 0..INTERVALS {
        let next = Instant::now() + INTERVAL;
        client.timed("GET", "/metrics", "", 200);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let used = all.iter().copied().map(ran).sum::<f64>() - begun;
    let share = used / (INTERVAL * INTERVALS).as_secs_f64() * 100.0;
    row("gpushd and its worker, with samples", &before);
    let new: Vec<u32> = workers(own).into_iter().filter(|pid| !workers_before.contains(pid)).collect();
    row("the worker for samples", &new);
    Footprint { rows, share }
}

/// Returns the index of a GPU.
fn index(agent: &Agent, uuid: &GpuUuid) -> u32 {
    agent.gpus().into_iter().find(|gpu| gpu.uuid == *uuid).expect("a GPU of the host").index.0
}

/// Returns the largest errors of the attribution in points: of the activity of a whole GPU and of GPU instances, and of
/// the shares of leases in the energy of a GPU with replicas.
fn attribution() -> (f64, f64) {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 3\n");
    let agent = Setup::on(&host).config(SHARES).start();
    agent.wait_for_layouts_at_start();
    let _operations = agent.settle();
    let mut client = Client::connect(agent.socket()).expect("a connection");
    let mut lease = |share: Value, sm: u32| {
        let body = json!({ "share": share }).to_string();
        let (status, answer, _) = client.ask("POST", "/v1/leases", &body).expect("an answer");
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&answer));
        let LeaseGrant { lease, .. } = serde_json::from_slice(&answer).expect("a lease");
        let member = &lease.members[0];
        let place = match member.target.as_str() == member.gpu_uuid.as_str() {
            true => format!("--gpu {}", index(&agent, &member.gpu_uuid)),
            false => format!("--mig {}", member.target),
        };
        host.process_of_lease(&format!("{place} --sm {sm}"), &lease.id.to_string());
        (lease.id, f64::from(sm))
    };
    let instance = || json!({ "kind": "mig_profile", "profile": "3g.40gb" });
    let exact = [lease(json!({ "kind": "whole" }), 37), lease(instance(), 20), lease(instance(), 70)];
    // The process of the last lease only keeps its context, so its energy is what each replica gets without work.
    let replicas = [10, 25, 40, 0].map(|sm| lease(json!({ "kind": "timeslice" }), sm));
    let watch = || -> HostUsage { serde_json::from_value(agent.get("/v1/usage?watch=true").json()).expect("usage") };
    // The first window of a lease also has time before its process.
    let settled = agent.until("three samples with work", || {
        let usage = watch();
        let is_settled = |lease: &LeaseUsage| lease.busy_s >= 3 || lease.lease_id == replicas[3].0;
        (usage.lease_usage.len() == 7 && usage.lease_usage.iter().all(is_settled)).then_some(usage)
    });
    let oldest = |usage: &HostUsage| usage.gpu_usage.iter().map(|gpu| gpu.sampled_at).min().flatten();
    let later = agent.until("samples of ten seconds", || {
        let usage = watch();
        let span = oldest(&usage)?.duration_since(oldest(&settled)?);
        (span.as_secs() >= 10).then_some(usage)
    });
    let of = |usage: &HostUsage, id: LeaseId| -> LeaseUsage {
        usage.lease_usage.iter().find(|lease| lease.lease_id == id).expect("an open lease").clone()
    };
    let activity = |id| of(&later, id).target_usage[0].sm_activity.expect("an activity") * 100.0;
    let errors = exact.map(|(id, truth)| (activity(id) - truth).abs());
    let energy = |id| of(&later, id).energy_j - of(&settled, id).energy_j;
    let work = replicas.map(|(id, _)| energy(id) - energy(replicas[3].0));
    let (sum, load) = (work.iter().sum::<f64>(), replicas.iter().map(|(_, sm)| sm).sum::<f64>());
    let shares = replicas.iter().zip(work).map(|((_, sm), joules)| (joules / sum - sm / load).abs() * 100.0);
    (errors.into_iter().fold(0.0, f64::max), shares.fold(0.0, f64::max))
}

/// Measures samples and `/metrics`.
pub(crate) fn run() -> Report {
    let [ours, plain, wrapper] = samples();
    let scrapes = scrapes();
    let Footprint { rows, share } = footprint();
    let (exact, estimates) = attribution();
    let mut report = Report::new(
        "Samples and metrics",
        &format!(
            "The host has 8 H100 GPUs with 56 instances. The table shows the means of {ROUNDS} samples of all GPUs. A \
             sample reads energy, power, limits, processes and the utilization of three of the seven GPU instances of \
             each GPU. The simulated driver runs in the worker, so its time is part of all rows. For comparison, a program makes only \
             the driver calls, and a loop reads the same figures with nvml-wrapper, which needs more calls. Then {LEASES} leases hold replicas of 8 GPUs, and a client reads `/metrics` {SCRAPES} \
             times. The footprint is measured while a scraper reads `/metrics` every {} s, {INTERVALS} times. Finally, \
             simulated processes with known loads work for leases of a whole GPU, of GPU instances and of replicas. For \
             the first two, the error is the largest difference between the activity of a lease and the load of its \
             process. For replicas, it is the difference between the share of a lease in the energy of the work and the \
             share of its process in the work.",
            INTERVAL.as_secs()
        ),
        &["", "driver calls", "processor ms", "resident MiB", "proportional MiB"],
    );
    let costs = [
        ("a sample of gpushd", &ours),
        ("its driver calls alone", &plain),
        ("the same figures with nvml-wrapper", &wrapper),
    ];
    for (what, cost) in costs {
        let cells = [what.to_owned(), format!("{:.1}", cost.calls), format!("{:.2}", cost.processor_ms)];
        report.rows.push([&cells[..], &[String::new(), String::new()]].concat());
    }
    for (what, resident, proportional) in &rows {
        let cells = [(*what).to_owned(), String::new(), String::new()];
        report.rows.push([&cells[..], &[format!("{resident:.1}"), format!("{proportional:.1}")]].concat());
    }
    let beside = ours.processor_ms - plain.processor_ms;
    report.target("driver calls of a sample", "at most 70", &format!("{:.1}", ours.calls), ours.calls <= 70.0);
    report.target("a sample beside its driver calls", "at most 1 ms", &format!("{beside:.2} ms"), beside <= 1.0);
    let p95 = percentile(scrapes.seconds.clone(), 0.95) * 1e3;
    let shown = format!(
        "{p95:.1} ms (median {:.1} ms) for {} KiB",
        median(scrapes.seconds.clone()) * 1e3,
        scrapes.bytes / 1024
    );
    report.target(&format!("a scrape with {LEASES} leases, p95"), "at most 5 ms", &shown, p95 <= 5.0);
    let counted = format!("{} in {SCRAPES} scrapes", scrapes.calls);
    report.target("driver calls of a scrape", "0", &counted, scrapes.calls == 0);
    report.target("processor with a scraper", "under 0.2 % of a core", &format!("{share:.3} %"), share < 0.2);
    let of = |at: usize, column: fn(&(&str, f64, f64)) -> f64| rows.get(at).map_or(f64::NAN, column);
    let above = of(2, |row| row.1) - of(0, |row| row.1);
    let shown = format!("{above:.1} MiB, and {:.1} MiB for the worker for samples", of(3, |row| row.1));
    report.target("resident memory with samples, above a bare program", "at most 22 MiB", &shown, above <= 22.0);
    report.target("error of whole GPUs and GPU instances", "0", &format!("{exact:.2} points"), exact < 0.005);
    report.target("error of replicas", "at most 2 points", &format!("{estimates:.2} points"), estimates <= 2.0);
    report
}
