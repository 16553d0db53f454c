//! GPUs that are not seen as they are, and a database that was lost: nobody on them is a stray.

use gpush_api::{GpuState, MpsState, ProcessKind, StrayStep};
use gpush_tests::{
    agent::{Agent, Setup},
    mps::{Client, reaches},
};
use serde_json::json;

use super::{END, FAST, HOST, Job, NOBODY, OTHER, RULE, done, lease_of, listed, start, start_on, told, witness};

const TWO: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";

#[test]
fn no_stray_is_ended_on_an_unreadable_gpu() {
    let config = format!("[driver]\nread_ms = 1000\n{END}{FAST}{}", RULE.replace("\"0\"", "\"0-1\""));
    let Some((host, agent)) = start_on("strays on a GPU that can't be read", TWO, &config) else { return };
    reaches(&agent, "1", MpsState::Ready);
    host.fault("nvmlDeviceGetMemoryInfo --gpu 0 --rc UNKNOWN");
    agent.until("it is unknown", || (agent.gpu(0).state == GpuState::Unknown).then_some(()));
    // What was read last is all that there is: the next reading would tell of it.
    let mut job = Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
    job = job.on(&host, "--gpu 0 --kind compute");
    witness(&host, &agent, "--gpu 1 --kind compute");
    assert!(job.lives());
    host.clear_faults();
    // Once it is seen, it is one.
    agent.until("it is ended", || (!job.lives()).then_some(()));
}

#[test]
fn no_process_is_a_stray_in_maintenance() {
    let Some((host, agent)) = start("strays in maintenance", "[processes]\nstray = \"end\"\ngrace_s = 3600\n") else {
        return;
    };
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    assert!(done(&agent, deaf.pid()).starts_with("asked to end"));
    assert_eq!(agent.post("/v1/maintenance/enter", &json!({ "reason": "x" })).status, 200);
    let seen = listed(&agent, deaf.pid()).expect("it is shown as it was");
    assert_eq!((seen.stray, seen.stray_action), (None, None));
    assert!(deaf.lives());
}

#[test]
fn no_process_is_a_stray_until_database_loss_is_accepted() {
    let config = format!("{END}{FAST}{RULE}");
    let Some((host, agent)) = start_on("strays with the database lost", HOST, &config) else { return };
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
    agent.until("it is held", || (agent.gpu(0).state == GpuState::Held).then_some(()));
    agent.until("its daemon is back", || {
        let pid = client.pid().cast_unsigned();
        listed(&agent, pid).filter(|one| one.process.kind == ProcessKind::MpsClient)
    });
    let seen = listed(&agent, client.pid().cast_unsigned()).expect("it is listed");
    assert_eq!((seen.stray, seen.stray_action), (None, None));
    assert!(client.lives() && client.said().is_empty());
    assert_eq!(agent.post("/v1/recover", &json!({})).status, 200);
    // Nobody knows of its share any more, and it may have had one: also when gpushd is started anew.
    let pid = client.pid().cast_unsigned();
    let left = |agent: &Agent| {
        agent.until("it is left", || {
            let seen = listed(agent, pid)?;
            seen.stray_action.filter(|done| done.contains("from before the database was lost"))
        })
    };
    left(&agent);
    agent.kill();
    let agent = Agent::start_public(&host, &config);
    left(&agent);
    // Whoever comes now has none for certain.
    let mut listener = agent.listen("?kinds=stray", None);
    let other =
        Job::start(std::process::Command::new("/bin/sleep").arg("1000"), OTHER).on(&host, "--gpu 0 --kind compute");
    told(&mut listener, other.pid(), StrayStep::Asked);
    assert!(client.lives() && client.said().is_empty());
    // Its daemon stands as it did: what stands is accepted.
    assert_eq!(reaches(&agent, "0", MpsState::Ready).pid, before.pid);
    assert!(agent.gpu(0).drift.is_empty());
    // And so does its compute mode, until the rule is another.
    drop(client);
    agent.reload("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n");
    let wanted = json!({ "selectors": ["0"], "layout_source": "wanted" });
    assert_eq!(agent.follow(agent.begin_with(&wanted).expect("it begins")).state, gpush_api::OperationState::Done);
    assert_eq!(agent.gpu(0).compute_mode.unwrap_or_default(), gpush_api::ComputeMode::Default);
}
