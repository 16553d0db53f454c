//! Unreadable GPUs, maintenance, and a lost database. In these cases, gpushd treats no process as
//! unleased.

use gpush_api::{GpuState, MpsState, ProcessKind, UnleasedStep};
use gpush_tests::{
    agent::{Agent, Setup},
    mps::{Client, reaches},
};
use serde_json::json;

use super::{END, FAST, HOST, Job, NOBODY, OTHER, RULE, done, lease_of, listed, start, start_on, step_event, witness};

const TWO: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";

#[test]
fn no_unleased_process_is_ended_on_an_unreadable_gpu() {
    let config = format!("[driver]\nread_ms = 1000\n{END}{FAST}{}", RULE.replace("\"0\"", "\"0-1\""));
    let Some((host, agent)) = start_on("unleased processes on a GPU that can't be read", TWO, &config) else { return };
    reaches(&agent, "1", MpsState::Ready);
    host.fault("nvmlDeviceGetMemoryInfo --gpu 0 --rc UNKNOWN");
    agent.until("the GPU is unknown", || (agent.gpu(0).state == GpuState::Unknown).then_some(()));
    // The next reading would list the process, but the reading fails.
    let mut job = Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
    job = job.on(&host, "--gpu 0 --kind compute");
    witness(&host, &agent, "--gpu 1 --kind compute");
    assert!(job.lives());
    host.clear_faults();
    // When gpushd can read the GPU again, it finds the unleased process.
    agent.until("the process is ended", || (!job.lives()).then_some(()));
}

#[test]
fn no_process_is_unleased_in_maintenance() {
    let Some((host, agent)) =
        start("unleased processes in maintenance", "[processes]\nunleased = \"end\"\ngrace_s = 3600\n")
    else {
        return;
    };
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    assert!(done(&agent, deaf.pid()).starts_with("asked to end"));
    assert_eq!(agent.post("/v1/maintenance/enter", &json!({ "reason": "x" })).status, 200);
    let seen = listed(&agent, deaf.pid()).expect("the process is still listed");
    assert_eq!((seen.unleased, seen.unleased_action), (None, None));
    assert!(deaf.lives());
}

/// If the database is lost, gpushd does not know which leases it granted before the loss.
#[test]
fn no_process_is_unleased_until_database_loss_is_accepted() {
    let config = format!("{END}{FAST}{RULE}");
    let Some((host, agent)) = start_on("unleased processes with the database lost", HOST, &config) else { return };
    let before = reaches(&agent, "0", MpsState::Ready);
    let taken = lease_of(NOBODY, &agent);
    let mut client = Client::begin(&host, &taken.environment, Some(NOBODY));
    assert!(client.says().starts_with("active"));
    let mut setup = Setup::on(&host);
    let state = setup.state_dir();
    agent.kill();
    for entry in std::fs::read_dir(&state).expect("the state directory").flatten() {
        if entry.file_name().to_string_lossy().starts_with("gpush.db") {
            std::fs::remove_file(entry.path()).expect("a database");
        }
    }
    setup = setup.config(config.clone());
    let agent = setup.start();
    agent.until("the GPU is held", || (agent.gpu(0).state == GpuState::Held).then_some(()));
    agent.until("its client is listed", || {
        let pid = client.pid().cast_unsigned();
        listed(&agent, pid).filter(|one| one.process.kind == ProcessKind::MpsClient)
    });
    let seen = listed(&agent, client.pid().cast_unsigned()).expect("the client is listed");
    assert_eq!((seen.unleased, seen.unleased_action), (None, None));
    assert!(client.lives() && client.printed().is_empty());
    assert_eq!(agent.post("/v1/recover", &json!({})).status, 200);
    // The lease is lost with the database, but the client may have started with this lease. So
    // gpushd must not end the client, even after a restart.
    let pid = client.pid().cast_unsigned();
    let left = |agent: &Agent| {
        agent.until("the process is not ended", || {
            let seen = listed(agent, pid)?;
            seen.unleased_action.filter(|done| done.contains("before the database was lost"))
        })
    };
    left(&agent);
    agent.kill();
    let agent = Agent::start_public(&host, &config);
    left(&agent);
    // A process that starts now cannot belong to a lost lease. So gpushd asks it to end.
    let mut listener = agent.listen("?kinds=unleased", None);
    let other =
        Job::start(std::process::Command::new("/bin/sleep").arg("1000"), OTHER).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, other.pid(), UnleasedStep::Asked);
    assert!(client.lives() && client.printed().is_empty());
    // gpushd keeps the daemon that runs.
    assert_eq!(reaches(&agent, "0", MpsState::Ready).pid, before.pid);
    assert!(agent.gpu(0).drift.is_empty());
    // Until the rule changes, gpushd also keeps the compute mode.
    drop(client);
    agent.reload("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n");
    let wanted = json!({ "selectors": ["0"], "layout_source": "wanted" });
    assert_eq!(
        agent.follow(agent.begin_with(&wanted).expect("the operation begins")).state,
        gpush_api::OperationState::Done
    );
    assert_eq!(agent.gpu(0).compute_mode.unwrap_or_default(), gpush_api::ComputeMode::Default);
}
