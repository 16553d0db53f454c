//! Faults of MPS daemons, one at a time. `gpushctl mps show` reports each of them. A fault must not
//! lead to a second daemon on a target, and must not end clients that could continue.

mod hung;
mod logs;
mod places;
mod servers;

use std::path::Path;

use gpush_api::{Code, MpsDaemon, MpsState};
use gpush_tests::mps::{Served, base, becomes, is_open, lease, parts, pid_of, reaches};
use serde_json::json;

/// Waits until the daemon is in this state, with a reason that contains these words. Checks that
/// access is closed unless the state is `ready`.
fn reported_as(served: &Served, state: MpsState, words: &str) -> MpsDaemon {
    let reported =
        |daemon: &MpsDaemon| daemon.state == state && daemon.reasons.iter().any(|reason| reason.contains(words));
    let daemon = becomes(&served.agent, "0", &format!("{} for {words:?}", state.name()), reported);
    assert!(served.controls().len() <= 1, "{:?}", parts(&base(&served.host)));
    let ill = served.agent.get("/v1/health").json()["errors"].to_string();
    assert_eq!(ill.contains("cannot grant a lease on GPU 0"), state != MpsState::Ready, "{state:?}: {ill}");
    if state != MpsState::Ready {
        let refused = lease(&served.agent, "0", &json!({})).expect_err("no lease is granted");
        assert_eq!(refused.code, Code::Conflict, "{refused:?}");
        assert!(!is_open(Path::new(daemon.pipe_directory.as_deref().expect("a pipe directory"))), "{daemon:#?}");
    }
    daemon
}

/// Waits until the daemon of the target is ready. Returns whether it is still the first daemon.
fn serves(served: &Served) -> bool {
    let ready = reaches(&served.agent, "0", MpsState::Ready);
    assert_eq!(served.controls(), [pid_of(&ready)]);
    pid_of(&ready) == served.pid
}
