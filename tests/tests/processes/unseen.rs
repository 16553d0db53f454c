//! Unreadable GPUs, maintenance, and a lost database. In these cases, gpushd treats no process as
//! unleased.

use gpush_api::{GpuState, MpsState, ProcessKind, UnleasedStep};
use gpush_tests::{
    agent::{Agent, Setup},
    mps::{Client, reaches},
};
use serde_json::json;

use super::{END, FAST, HOST, Job, NOBODY, OTHER, RULE, lease_of, listed, start_on, step_event};

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
