//! Loss of recorded state. If a part of the state directory is missing, gpushd reports the loss. It
//! does not guess what was lost, and changes no GPU.

use std::fs;

use gpush_api::{GpuState, Health, OperationState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
};
use serde_json::json;

const CONFIG: &str = r#"
[[gpu]]
match = ["0"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb"]
"#;

fn health(agent: &Agent) -> Health {
    serde_json::from_value(agent.get("/v1/health").json()).expect("health")
}

/// Starts gpushd, creates an override for GPU 0, and stops gpushd. GPU 0 then has the layout of the
/// override and no process.
fn overridden(host: &Host) {
    let agent = Agent::start(host, CONFIG);
    let complete = || health(&agent).layouts_at_start.is_some_and(|layouts| layouts.complete);
    agent.await_that("layouts", complete);
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
}

#[test]
fn emptied_state_directory_holds_gpus_and_keeps_their_layout() {
    let host = Host::up("dgx-a100");
    let state = Setup::on(&host).state_dir();
    overridden(&host);
    fs::remove_dir_all(&state).expect("the state directory can be removed");
    host.start_trace();
    // If gpushd had lost the override, it would now apply the layout of the rule, because of
    // `auto_reconcile`.
    let agent = Agent::start(&host, &format!("auto_reconcile = true\n{CONFIG}"));
    agent.await_that("GPU 0 held", || agent.gpu(0).state == GpuState::Held);
    let health = health(&agent);
    let cause = health.errors.iter().find(|cause| cause.message.contains("the database was lost")).expect("a cause");
    assert!(cause.causes.iter().any(|cause| cause.contains("was deleted")), "{cause:?}");
    assert!(cause.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl recover`")), "{cause:?}");
    agent.stop();
    assert_eq!(host.trace(), [], "no driver call changed anything");
}

#[test]
fn database_damaged_before_a_boot_is_reported_and_holds_nothing() {
    let host = Host::up("dgx-a100");
    let state = Setup::on(&host).state_dir();
    overridden(&host);
    fs::write(state.join("gpush.db"), "no database").expect("the database can be written");
    host.sim::<&str>("reboot", &[]);
    let agent = Agent::start(&host, CONFIG);
    agent.await_that("layouts", || health(&agent).layouts_at_start.is_some_and(|layouts| layouts.complete));
    assert_eq!((agent.gpu(0).state, agent.gpu(0).drift), (GpuState::Ready, Vec::new()));
    let reported = || health(&agent).errors.iter().any(|cause| cause.message.contains("lost before this boot"));
    assert!(reported(), "{:?}", health(&agent));
    let recovered = agent.post("/v1/recover", &json!({})).json();
    assert_eq!(recovered["released"], json!([]));
    assert!(recovered["kept"].as_str().is_some_and(|kept| fs::metadata(kept).is_ok()), "{recovered}");
    assert!(!reported(), "{:?}", health(&agent));
    agent.stop();
}
