//! The system clock is set back, or was wrong earlier. libfaketime changes the clock only for
//! gpushd.

use std::{fs, path::PathBuf};

use gpush_api::{AuditRecord, EndReason, GpuState, LeaseState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{lease_becomes, lease_now},
};
use serde_json::json;

use crate::leases::request;

const CONFIG: &str = "[[gpu]]\nname = \"lab\"\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"3g.40gb*2\"]\n";

/// Returns the path of libfaketime (Debian's package `faketime`). If it is not installed, prints
/// that the test `what` is skipped, and returns `None`.
fn faketime(what: &str) -> Option<PathBuf> {
    let found = fs::read_dir("/usr/lib").ok()?.flatten().map(|dir| dir.path().join("faketime/libfaketimeMT.so.1"));
    let library = found.into_iter().find(|library| library.is_file());
    if library.is_none() {
        println!("SKIPPED {what}: Debian's package faketime is not installed");
    }
    library
}

/// A file that sets the system clock of an agent: `+2d` means two days ahead. The monotonic clock
/// of the agent does not change.
struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    fn of(host: &Host, library: PathBuf) -> Self {
        Self { library, file: host.scratch("clock") }
    }

    fn set(&self, offset: &str) {
        // libfaketime may read the file at any moment, so replace it atomically.
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{offset}\n")).and_then(|()| fs::rename(&new, &self.file)).expect("a clock");
    }

    fn start(&self, host: &Host) -> Agent {
        let setup = Setup::on(host).config(CONFIG).env("LD_PRELOAD", self.library.display().to_string());
        let setup = setup.env("FAKETIME_TIMESTAMP_FILE", self.file.display().to_string());
        let agent = setup.env("FAKETIME_NO_CACHE", "1").env("DONT_FAKE_MONOTONIC", "1").start();
        agent.until("complete record", || {
            (agent.get("/v1/health").json()["layouts_at_start"]["complete"] == json!(true)).then_some(())
        });
        agent
    }
}

fn done(agent: &Agent, entries: &[&str]) -> Operation {
    let operation = agent.apply(&["0"], entries);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    operation
}

fn audit(agent: &Agent) -> Vec<AuditRecord> {
    serde_json::from_value(agent.get("/v1/audit?limit=1000").json()).expect("an audit trail")
}

#[test]
fn clock_set_back_while_running_keeps_operation_order() {
    let Some(library) = faketime("a clock that is set back under way") else { return };
    let host = Host::up("dgx-a100");
    let clock = Clock::of(&host, library);
    clock.set("+2d");
    let agent = clock.start(&host);
    let ahead = done(&agent, &["7g.80gb"]);
    let seconds_ahead = (ahead.created_at - jiff::Timestamp::now()).get_seconds();
    assert!(seconds_ahead > 86_400, "the clock of gpushd is ahead: {ahead:?}");
    // The override expires after three seconds, although the system clock was changed meanwhile.
    let now = ahead.created_at.max(ahead.ended_at.expect("an end"));
    let body = json!({
        "selectors": ["1"], "layout_source": { "entries": ["7g.80gb"] },
        "expires_at": (now + jiff::SignedDuration::from_secs(3)).to_string(),
    });
    assert_eq!(agent.follow(agent.begin_with(&body).expect("an operation")).state, OperationState::Done);
    assert!(agent.gpu(1).overridden.is_some());
    clock.set("-1d");
    let back = done(&agent, &["3g.40gb", "1g.10gb"]);
    assert!(back.created_at < ahead.created_at, "{back:?}");
    agent.until("end of the override", || agent.gpu(1).overridden.is_none().then_some(()));
    // gpushd orders readings by monotonic time, so no reading seems to come from the future after
    // the system clock was set back.
    let gpu = agent.gpu(0);
    assert_eq!((gpu.state, gpu.stale), (GpuState::Ready, false), "{:?}", gpu.reasons);
    let trail = audit(&agent);
    assert!(trail.is_sorted_by_key(|record| record.sequence), "{trail:?}");
    agent.stop();
}

#[test]
fn start_with_earlier_clock_keeps_records_and_warns() {
    let Some(library) = faketime("a start with an earlier clock") else { return };
    let host = Host::up("dgx-a100");
    let clock = Clock::of(&host, library);
    clock.set("+2d");
    let agent = clock.start(&host);
    let ahead = done(&agent, &["7g.80gb"]);
    let trail = audit(&agent).len();
    agent.kill();
    clock.set("-1d");
    let agent = clock.start(&host);
    agent.wait_for_log("clock");
    let back = done(&agent, &["3g.40gb", "1g.10gb"]);
    assert!(back.created_at < ahead.created_at, "{back:?}");
    assert_ne!(back.id, ahead.id);
    // gpushd orders the list of operations by number, not by time.
    let listed = agent.get("/v1/operations?limit=1").json();
    assert_eq!(listed[0]["id"], json!(back.id));
    let after = audit(&agent);
    assert!(after.len() > trail && after.is_sorted_by_key(|record| record.sequence), "{after:?}");
    assert_eq!(agent.operation(&ahead.id).state, OperationState::Done);
    agent.stop();
}

/// A lease ends when its duration has passed on the system clock or on the monotonic clock. So a
/// user cannot make a lease longer by setting the system clock back.
#[test]
fn lease_expires_although_the_clock_is_set_back_or_forward() {
    let Some(library) = faketime("leases and a clock that is set") else { return };
    let host = Host::up("dgx-a100");
    let clock = Clock::of(&host, library);
    clock.set("+0");
    let agent = clock.start(&host);
    let lease = |seconds: u64| {
        let body = json!({ "share": { "kind": "mig_profile", "profile": "3g.40gb" }, "duration_s": seconds });
        request(&agent, &body).expect("a lease").lease.id
    };
    let (short, long) = (lease(3), lease(3600));
    clock.set("-1d");
    assert_eq!(lease_becomes(&agent, short, LeaseState::Ended).reason, Some(EndReason::Expired));
    assert_eq!(lease_now(&agent, long).state, LeaseState::Active);
    clock.set("+2h");
    assert_eq!(lease_becomes(&agent, long, LeaseState::Ended).reason, Some(EndReason::Expired));
}
