//! How overrides end, and which overrides survive a reboot.

use super::*;

#[test]
fn expired_override_stays_expired_and_layout_stays() {
    let host = Host::up(HOST);
    let agent = started(&host);
    short(&agent);
    assert_eq!(only(&agent).reason, "for a moment");
    let drifts = |gpu: Gpu| (gpu.overridden.is_none() && gpu.drift.len() == 2).then_some(());
    agent.until("expiry", || drifts(agent.gpu(0)));
    agent.until("record of it", || (overrides(&agent).generation == 2).then_some(()));
    agent.wait_for_log("has expired");
    agent.stop();
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(overrides(&agent), Overrides { generation: 2, overrides: Vec::new() });
    assert_eq!(real_layout(&host, 0), WHOLE);
    // The second override expires while gpushd does not run.
    short(&agent);
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    agent.until("expiry", || (overrides(&agent).generation == 4).then_some(()));
    assert_eq!((overrides(&agent).overrides, real_layout(&host, 0)), (Vec::new(), WHOLE.map(str::to_owned).to_vec()));
}

#[test]
fn auto_reconcile_follows_override_and_its_end() {
    let host = Host::up(HOST);
    let agent = settled(Agent::start(&host, &format!("auto_reconcile = true\n{CONFIG}")));
    short(&agent);
    agent.until("the rule's layout", || (real_layout(&host, 0) == HALVES).then_some(()));
    // The layout may exist before the operation that applies it has ended. So wait for the
    // operation.
    let _ = agent.settle();
    done(&agent, &whole("to be cleared"));
    // While the override is active, a repair of drift restores the layout of the override.
    assert_eq!(agent.apply_once(&["0"], &["1g.10gb"]).state, OperationState::Done);
    agent.signal(Signal::SIGHUP);
    agent.until("the override's layout", || (real_layout(&host, 0) == WHOLE).then_some(()));
    let _ = agent.settle();
    assert_eq!(clear(&agent, "0").status, 200);
    agent.until("the rule's layout", || (real_layout(&host, 0) == HALVES).then_some(()));
}

#[test]
fn new_boot_applies_override_layout() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("also after a reboot"));
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let agent = started(&host);
    assert_eq!(
        (real_layout(&host, 0), real_layout(&host, 1)),
        (WHOLE.map(str::to_owned).to_vec(), HALVES.map(str::to_owned).to_vec())
    );
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));
    assert_eq!(only(&agent).reason, "also after a reboot", "the agent's own operation leaves it");
    // If an override has expired, gpushd does not apply it at boot.
    short(&agent);
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let expired = Instant::now() + Duration::from_secs(3);
    while Instant::now() < expired {
        std::thread::sleep(Duration::from_millis(50));
    }
    let agent = started(&host);
    assert_eq!((real_layout(&host, 0), overrides(&agent).overrides.len()), (HALVES.map(str::to_owned).to_vec(), 0));
}

#[test]
fn impossible_override_at_boot_leaves_gpu_and_is_reported() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("blocked at boot"));
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    // A process uses the GPU before the agent starts.
    let other = Setup::on(&host).named("first").start();
    assert_eq!(other.apply(&["0"], &["1g.10gb@0"]).state, OperationState::Done);
    other.stop();
    let _ = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    let agent = Agent::start(&host, CONFIG);
    agent.await_that("the layout of GPU 1 is applied, and GPU 0 is reported", || {
        real_layout(&host, 1) == HALVES && causes(&agent).contains("this layout is an override by")
    });
    assert_eq!(real_layout(&host, 0), ["1g.10gb@0[1g.10gb@0]"], "neither the override's layout nor the rule's");
    let printed = causes(&agent);
    assert!(printed.contains("this layout is an override by"), "{printed}");
    assert!(printed.contains("1g.10gb@0 is in use") && printed.contains("`gpushctl gpu holders 0`"), "{printed}");
    assert!(printed.contains("the GPU is in use: gpushd tries again"), "{printed}");
    assert_eq!(agent.gpu(0).drift, ["missing 7g.80gb", "extra 1g.10gb@0"]);
    assert_eq!(only(&agent).reason, "blocked at boot");
}
