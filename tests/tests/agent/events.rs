//! Events. A listener gets each event once, and does not slow down gpushd. If a listener has missed
//! events, gpushd reports that to the listener.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    time::{Duration, Instant},
};

use gpush_api::{Event, EventKind, EventPayload, GpuIndex, GpuState, OperationState, ResyncReason, TargetUuid};
use gpush_tests::{
    agent::{Agent, Listener, PATIENCE, number, state},
    host::Host,
};
use nix::sys::signal::Signal;

/// Returns the resident memory of a process in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn assert_consecutive(events: &[Event]) {
    let numbers: Vec<u64> = events.iter().map(number).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

#[test]
fn each_change_is_one_event_in_order() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let mut listener = agent.listen("", None);
    let begun = agent.begin_with(&serde_json::json!({
        "selectors": ["0", "1"], "layout_source": {"entries": ["3g.40gb", "1g.10gb"]}, "reason": "a secret? no"
    }));
    let id = begun.unwrap().id;
    let reported = listener.until_end_of(&id);
    assert_consecutive(&reported);
    let states: Vec<OperationState> = reported.iter().filter_map(|event| Some(state(event)?.1)).collect();
    assert_eq!((states[0], states[states.len() - 1]), (OperationState::Running, OperationState::Done));
    // When a step begins, gpushd sends an event with the number of finished steps: on each of the
    // two GPUs, from 0 of 4 to 4 of 4.
    for gpu in 0..2 {
        let mut done: Vec<u32> = reported
            .iter()
            .filter_map(|event| match &event.what {
                EventPayload::Operation(change) => Some(change.progress[gpu].done),
                _ => None,
            })
            .collect();
        done.dedup();
        assert_eq!(done, [0, 1, 2, 3, 4], "GPU {gpu}");
    }
    assert!(!serde_json::to_string(&reported).unwrap().contains("\"plans\""));

    // Before the end of the operation, an event shows that the GPU is free and has its new
    // instances. gpushd sends this event even if no client reads the GPU.
    let gpu = reported.iter().rev().find_map(|event| match &event.what {
        EventPayload::Gpu(change) if change.gpu == 1 => Some(change),
        _ => None,
    });
    let gpu = gpu.unwrap_or_else(|| panic!("{reported:?}"));
    assert_eq!((gpu.state, gpu.instances.len(), gpu.mig), (GpuState::Ready, 2, Some(true)));

    // An event names the MIG devices that an operation destroys.
    let before: BTreeSet<TargetUuid> = gpu.instances.iter().flat_map(|one| one.device_uuids.clone()).collect();
    assert_eq!(before.len(), 2, "{gpu:?}");
    let begun = agent.begin_with(&serde_json::json!({"selectors": ["1"], "layout_source": {"entries": ["7g.80gb"]}}));
    let reported = listener.until_end_of(&begun.unwrap().id);
    let destroyed = reported.iter().flat_map(|event| match &event.what {
        EventPayload::Gpu(change) => change.destroyed_device_uuids.clone(),
        _ => Vec::new(),
    });
    assert_eq!(destroyed.collect::<BTreeSet<_>>(), before);

    agent.write_config("[log]\nlevel = \"nonsense\"\n");
    agent.signal(Signal::SIGHUP);
    let EventPayload::Config(change) = listener.next_of(EventKind::Config).what else { panic!("another kind") };
    assert!(!change.taken && change.error.unwrap().message.contains("has errors"));
    agent.write_config("[driver]\nlibrary = \"libother.so.1\"\n");
    agent.signal(Signal::SIGHUP);
    let EventPayload::Config(change) = listener.next_of(EventKind::Config).what else { panic!("another kind") };
    assert_eq!((change.taken, change.pending_restart), (true, vec!["driver.library".to_owned()]));

    host.sim("xid", &["63", "--gpu", "3"]);
    let EventPayload::Xid(xid) = listener.next_of(EventKind::Xid).what else { panic!("another kind") };
    assert_eq!((xid.gpu, xid.xid, xid.gi), (Some(GpuIndex(3)), 63, None));
    assert_eq!(xid.gpu_uuid, agent.gpu(3).uuid);

    // When the agent stops, the stream ends without an error.
    agent.signal(Signal::SIGTERM);
    while listener.event().is_some() {}
    assert!(agent.wait().success(), "{}", agent.log());
}

#[test]
fn driver_appearance_is_an_event() {
    let host = Host::up("a30x4");
    host.fault("nvmlInit --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, "");
    let mut listener = agent.listen("?kinds=driver", Some("before-0"));
    let mut next = || match listener.event().unwrap().what {
        EventPayload::Driver(change) => (change.driver.is_some(), change.before.is_some(), change.error.is_some()),
        EventPayload::Resync(resync) => {
            assert_eq!(resync.reason, ResyncReason::OtherRun);
            (false, false, false)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(next(), (false, false, false));
    host.clear_faults();
    // Each request makes the agent try to load the driver again.
    let until = Instant::now() + PATIENCE;
    while agent.get("/v1/gpus").status != 200 {
        assert!(Instant::now() < until, "{}", agent.log());
    }
    let reported: (bool, bool, bool) = loop {
        match next() {
            // Ignore an earlier event, which may report that the driver is missing.
            (false, false, true) => {}
            other => break other,
        }
    };
    assert_eq!(reported, (true, false, false));
}

/// No client reads a GPU, and gpushd does not poll the GPUs.
#[test]
fn cordons_xids_and_maintenance_are_events_without_a_reader() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "[health]\npoll = \"0s\"\n");
    agent.settle_reads();
    let mut listener = agent.listen("", None);
    let reaches = |listener: &mut Listener, gpu: u32, state: GpuState| {
        listener.until(|event| match &event.what {
            EventPayload::Gpu(change) => (change.gpu, change.state) == (GpuIndex(gpu), state),
            _ => false,
        })
    };
    assert_eq!(agent.post("/v1/gpus/2/cordon", &serde_json::json!({ "reason": "a test" })).status, 200);
    reaches(&mut listener, 2, GpuState::Cordoned);
    assert_eq!(agent.post("/v1/gpus/2/uncordon", &serde_json::json!({})).status, 200);
    reaches(&mut listener, 2, GpuState::Ready);
    host.sim("xid", &["79", "--gpu", "1"]);
    let events = reaches(&mut listener, 1, GpuState::Cordoned);
    assert!(events.iter().any(|event| matches!(&event.what, EventPayload::Xid(xid) if xid.xid == 79)), "{events:?}");
    assert_eq!(agent.post("/v1/maintenance/enter", &serde_json::json!({ "reason": "a test" })).status, 200);
    reaches(&mut listener, 0, GpuState::Maintenance);
    assert_eq!(agent.post("/v1/maintenance/leave", &serde_json::json!({})).status, 200);
    reaches(&mut listener, 0, GpuState::Ready);
    let lines = agent.log().lines().filter(|line| line.contains("Xid 79")).count();
    assert_eq!(lines, 1, "the Xid is logged once:\n{}", agent.log());
}

#[test]
fn unread_event_stream_delays_nothing_and_bounds_memory() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let all = ["0", "1", "2", "3", "4", "5", "6", "7"];
    let mut well = agent.listen("?kinds=operation", None);
    let mut deaf = agent.listen("", None);
    let mut silent = Vec::new();
    for _ in 0..20 {
        // This client reads nothing, not even the head of the response.
        let mut stream = agent.connect();
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        silent.push(stream);
    }
    let mut apply = |layout: &str| {
        let operation = agent.begin(&all, &[layout]).unwrap();
        let reported = well.until_end_of(&operation.id);
        assert_eq!(agent.operation(&operation.id).state, OperationState::Done);
        reported.len()
    };
    let mut reported = apply("1g.10gb*7") + apply("none");
    let before = resident(agent.pid());
    while reported < 3000 {
        reported += apply("1g.10gb*7") + apply("none");
    }
    let after = resident(agent.pid());
    println!("{reported} events; resident {before} KiB, then {after} KiB");
    // gpushd stores the last thousand events once, not once for each listener that has not read
    // them. On this host, an event has at most 1.5 kB.
    assert!(after < before + 8 * 1024, "{before} KiB, then {after} KiB");
    // If a listener begins to read late, it first gets the events that gpushd has already sent.
    // Then it gets a resync instead of the events that it has missed.
    let heard = deaf.until(|event| matches!(event.what, EventPayload::Resync(_)));
    let Some(EventPayload::Resync(resync)) = heard.last().map(|event| &event.what) else { panic!("{heard:?}") };
    assert_eq!(resync.reason, ResyncReason::Missed);
    assert_consecutive(&heard[..heard.len() - 1]);
    assert!(number(&heard[heard.len() - 1]) > number(&heard[heard.len() - 2]) + 1000);
    // Listeners that do not read must not delay the stop of gpushd.
    let begun = Instant::now();
    agent.signal(Signal::SIGTERM);
    assert!(agent.wait().success(), "{}", agent.log());
    println!("stopped after {} ms", begun.elapsed().as_millis());
    assert!(begun.elapsed() < Duration::from_secs(5));
    for mut stream in silent {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.is_empty());
    }
}

#[test]
fn two_hundred_listeners_get_the_same_events() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let mut listeners: Vec<Listener> = (0..200).map(|_| agent.listen("?kinds=operation", None)).collect();
    let operation = agent.begin(&["0", "1"], &["1g.10gb*7"]).unwrap();
    let reported: Vec<Vec<Event>> = listeners.iter_mut().map(|one| one.until_end_of(&operation.id)).collect();
    assert!(reported.iter().all(|heard| *heard == reported[0]));
    println!("{} listeners heard {} events each", reported.len(), reported[0].len());
    let begun = Instant::now();
    agent.signal(Signal::SIGTERM);
    assert!(listeners.iter_mut().all(|listener| listener.event().is_none()));
    assert!(agent.wait().success(), "{}", agent.log());
    println!("stopped after {} ms", begun.elapsed().as_millis());
    assert!(begun.elapsed() < Duration::from_secs(4), "streams end by themselves");
}
