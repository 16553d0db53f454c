//! gpushd under load: cheap reads during expensive requests, a hostile account, memory use after many
//! requests, and random steps.

mod hostile;
mod leases;
mod memory;
mod steps;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
};
use serde_json::json;

/// Number of clients that send expensive requests without a pause.
const HEAVY: usize = 50;

/// Number of cheap reads that the test measures.
const LIGHT: usize = 100;

fn percentile(times: &mut [Duration], of_hundred: usize) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) * of_hundred / 100]
}

/// Measures how long cheap reads take while clients send expensive requests without a pause.
fn under_load(agent: &Agent, what: &str, heavy: impl Fn() -> usize + Sync) {
    let times = |path: &str| -> Vec<Duration> {
        let one = |_| {
            let begun = Instant::now();
            assert_eq!(agent.get(path).status, 200);
            begun.elapsed()
        };
        (0..LIGHT).map(one).collect()
    };
    let calm = percentile(&mut times("/v1/version"), 99);
    let (stop, answers) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let (mut version, mut health) = std::thread::scope(|scope| {
        for _ in 0..HEAVY {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    let bytes = heavy();
                    answers.lock().expect("no thread panicked").push((begun.elapsed(), bytes));
                }
            });
        }
        // Wait until every client has sent a request that is not answered yet.
        while answers.lock().expect("no thread panicked").len() < HEAVY {
            std::thread::yield_now();
        }
        let light = (times("/v1/version"), times("/v1/health"));
        stop.store(true, Ordering::Relaxed);
        light
    });
    let answers = answers.into_inner().expect("no thread panicked");
    let bytes = answers.iter().map(|(_, bytes)| *bytes).max().expect("an answer");
    let mut waits: Vec<Duration> = answers.iter().map(|(time, _)| *time).collect();
    let usual = percentile(&mut waits, 50);
    let (version, health) = (percentile(&mut version, 99), percentile(&mut health, 99));
    println!(
        "{what}: {HEAVY} clients, {} answers of {bytes} bytes, half within {usual:?}; p99 of a light read: \
         /v1/version {version:?}, /v1/health {health:?}, in calm {calm:?}",
        answers.len()
    );
    // If a cheap read had to wait for expensive requests, it would take as long as an expensive
    // request.
    assert!(version * 2 < usual, "{what}: /v1/version took {version:?}, a heavy answer {usual:?}");
    assert!(health < usual, "{what}: /v1/health took {health:?}, a heavy answer {usual:?}");
}

#[test]
fn cheap_reads_are_not_delayed_by_expensive_requests() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 16\nmig = true\n");
    let agent = Agent::start(&host, "");
    let body = json!({"selectors": ["all"], "layout_source": {"entries": ["1g.10gb*7"]}});
    under_load(&agent, "plans", || agent.post("/v1/mig/plan", &body).body.len());
    under_load(&agent, "GPUs", || agent.get("/v1/gpus?profiles=true").body.len());
    for round in 0..40 {
        let layout: &[&str] = if round % 2 == 0 { &["1g.10gb*7"] } else { &["none"] };
        assert_eq!(agent.apply(&["all"], layout).state, OperationState::Done, "round {round}");
    }
    under_load(&agent, "operations", || agent.get("/v1/operations").body.len());
}

/// The reading of one GPU hangs, and six plans wait for it. Reads must not wait for the plans. This
/// includes reads of the user who requested the plans.
#[test]
fn reads_are_not_delayed_by_plans_for_hung_gpu() {
    let host = Host::up("a30x4");
    let agent = Setup::on(&host).config("# --constants driver.read=3000ms\n").start();
    agent.settle_reads();
    host.fault("nvmlDeviceGetGpuInstances --gpu 0 --hang");
    let body = json!({"selectors": ["0"], "layout_source": {"entries": ["2g.12gb*2"]}});
    let plans = Mutex::new(Vec::new());
    let mut reads = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let begun = Instant::now();
                let answer = agent.post("/v1/mig/plan", &body);
                assert!(answer.json()["plans"][0]["error"].is_object(), "it can't be read");
                plans.lock().expect("no thread panicked").push(begun.elapsed());
            });
        }
        while plans.lock().expect("no thread panicked").len() < 6 {
            let begun = Instant::now();
            assert_eq!(agent.gpus().len(), 4);
            reads.push(begun.elapsed());
        }
    });
    host.clear_faults();
    let slowest = reads.iter().max().expect("a read");
    let longest = plans.into_inner().expect("no thread panicked").into_iter().max().expect("a plan");
    println!("{} reads during the plans, the slowest {slowest:?}; the longest plan {longest:?}", reads.len());
    assert!(*slowest * 2 < longest, "a read took {slowest:?}, the longest plan {longest:?}");
}
