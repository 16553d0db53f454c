//! Changes to and from mode `timeslice` with the real programs. An operation starts when gpushd has
//! removed earlier time-slice settings. It ends when gpushd has read back the level and the compute
//! mode. If a setting could not be applied, the operation reports that.

use gpush_api::{Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
    mps,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const HOPPER: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n";
const MIG: &str = "mode = \"mig\"\nlayout = [\"3g.40gb*2\"]";
const MPS: &str = "mode = \"mps\"";
const TURNS: &str =
    "mode = \"timeslice\"\ntimeslice = { replicas = 1, level = \"long\", compute_mode = \"exclusive_process\" }";

fn rule(how: &str) -> String {
    format!("[[gpu]]\nmatch = [\"0\"]\n{how}\n")
}

fn wanted() -> Value {
    json!({ "selectors": ["0"], "layout_source": "wanted" })
}

/// Returns the level and the compute mode, read without gpushd.
fn turns(host: &Host) -> (String, u64) {
    let state = host.show()["gpus"][0]["state"].clone();
    (state["timeslice"].as_str().expect("a level").to_owned(), state["compute_mode"].as_u64().expect("a mode"))
}

fn is(level: &str, mode: u64) -> (String, u64) {
    (level.to_owned(), mode)
}

/// Returns the state that the GPU must have under a rule: level, compute mode, MIG mode, and number
/// of MPS daemons.
fn reached(how: &str) -> (&'static str, u64, bool, usize) {
    match how {
        TURNS => ("long", 3, false, 0),
        MPS => ("default", 3, false, 1),
        _ => ("default", 0, true, 0),
    }
}

fn stands(host: &Host, how: &str) -> bool {
    let (level, mode, mig, daemons) = reached(how);
    turns(host) == is(level, mode)
        && (real_layout(host, 0) != ["MIG off"]) == mig
        && mps::controls(&mps::base(host)).len() == daemons
}

fn done(agent: &Agent) -> Operation {
    let operation = agent.follow(agent.begin_with(&wanted()).unwrap_or_else(|error| panic!("{error:?}")));
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    assert_eq!(operation.progress[0].done, operation.progress[0].total, "{operation:#?}");
    operation
}

#[test]
fn killed_mode_change_is_finished_by_next_gpushd() {
    let host = Host::up(HOPPER);
    let mut agent = Agent::start(&host, &rule(TURNS));
    agent.await_that("the level is set", || turns(&host) == is("long", 3));
    let mut killed = 0;
    for (round, how) in [MPS, TURNS, MIG, TURNS, MPS, TURNS, MIG, TURNS].into_iter().enumerate() {
        agent.reload(rule(how));
        let operation = agent.begin_with(&wanted()).unwrap_or_else(|error| panic!("{error:?}"));
        // Kill gpushd after 0, 1 or 2 steps. An operation has only a few steps.
        let step = u32::try_from(round).expect("a small number") % 3;
        let now = agent.follow_until(operation, |now| now.state.is_final() || now.progress[0].done >= step);
        killed += u32::from(!now.state.is_final());
        agent.signal(Signal::SIGKILL);
        agent.wait();
        agent = Agent::start(&host, &rule(how));
        let ended = agent.follow(agent.operation(&now.id));
        if ended.state != OperationState::Done {
            // If gpushd has rolled the operation back, this call requests the change again.
            let _done = done(&agent);
        }
        agent.await_that("the desired state", || stands(&host, how));
        assert_eq!(agent.gpu(0).drift, [] as [String; 0], "{how}");
    }
    println!("killed on the way {killed} of 8 times");
    assert!(killed > 0, "it was never on the way");
}
