//! Clients of several users on one server, which runs as root. The rule has `users = "many"`, which
//! needs a control program with the option `-multiuser-server`.

use gpush_api::{MpsState, MpsUsers};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{Client, becomes, lease_for, reaches},
};
use nix::unistd::geteuid;
use serde_json::json;

const GPU: &str = "[[gpu]]\nmodel = \"l4\"\n";
const RULE: &str = "[mps]\nhealth = \"1s\"\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";
const NOBODY: u32 = 65534;
const OTHER: u32 = 65532;

fn host(driver: &str) -> Host {
    Host::up(&format!("driver = \"{driver}\"\n{GPU}")).opened()
}

fn rule(users: &str) -> String {
    format!("{RULE}mps = {{ users = \"{users}\" }}\n")
}

fn skipped() -> bool {
    let is_root = geteuid().is_root();
    if !is_root {
        println!("SKIPPED several users of an MPS daemon: only root can ask as another user");
    }
    !is_root
}

#[test]
fn clients_of_two_users_share_one_server_from_driver_555_on() {
    if skipped() {
        return;
    }
    let host = host("555.58.02");
    let agent = Agent::start_public(&host, &rule("many"));
    reaches(&agent, "0", MpsState::Ready);
    // While the operation that started the daemon ends, a finding says that the GPU is being changed.
    let ready = becomes(&agent, "0", "ready without findings, because the setting is no problem", |daemon| {
        daemon.findings.is_empty()
    });
    assert_eq!(ready.wanted.users, MpsUsers::Many);
    let shares = [NOBODY, OTHER].map(|uid| lease_for(&agent, uid, "0", &json!({ "percentage": 10 })).expect("a lease"));
    let clients = [NOBODY, OTHER].into_iter().zip(&shares).map(|(uid, share)| {
        let client = Client::begin(&host, &share.environment, Some(uid));
        let first = client.says();
        assert!(first.starts_with("active"), "{uid}: {first}");
        client
    });
    let clients: Vec<Client> = clients.collect();
    let seen = becomes(&agent, "0", "with both clients", |daemon| daemon.clients.len() == 2);
    assert_eq!(seen.servers.iter().map(|server| server.uid).collect::<Vec<_>>(), [Some(0)], "{seen:#?}");
    let mut users: Vec<_> = seen.clients.iter().map(|client| client.uid).collect();
    users.sort_unstable();
    assert_eq!(users, [Some(OTHER), Some(NOBODY)]);
    assert!(!seen.findings.iter().any(|finding| finding.contains("waits")), "{:?}", seen.findings);
    assert_eq!(seen.pid, ready.pid, "one daemon for both");
    clients.into_iter().for_each(Client::end);
}
