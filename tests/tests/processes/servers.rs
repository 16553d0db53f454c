//! MPS servers. gpushd finds them in `/proc`, even if their daemon has not reported them.

use gpush_api::MpsState;
use gpush_tests::{
    agent::Setup,
    mps::{Client, Role, base, clear_faults, fault, parts, reaches},
};

use super::{END, HOST, NOBODY, RULE, all, lease_of, listed, start_on, witness};

#[test]
fn new_mps_server_is_shown_as_server_and_not_as_unleased() {
    // The next probe of the daemon is an hour away. So the list of servers from gpushd's last probe
    // does not contain the new server.
    let config = format!("{END}[mps]\nhealth_s = 3600\n{RULE}");
    let Some((host, agent)) = start_on("servers that are new", HOST, &config) else { return };
    let taken = lease_of(NOBODY, &agent);
    let mut client = Client::begin(&host, &taken.environment, Some(NOBODY));
    assert!(client.says().starts_with("active"));
    witness(&host, &agent, "--gpu 0 --kind compute");
    assert!(client.lives() && client.printed().is_empty(), "{}", agent.log());
    let server = parts(&base(&host)).into_iter().find(|part| part.role == Role::Server).expect("a server");
    let server = listed(&agent, server.pid.cast_unsigned()).expect("the server is listed");
    assert_eq!((server.serves.as_deref(), server.unleased), (Some("MPS server of GPU 0"), None));
}

#[test]
fn server_of_a_silent_daemon_is_not_unleased_after_a_restart() {
    let config = format!("{END}[mps]\nhealth_s = 1\n{RULE}");
    let Some((host, agent)) = start_on("servers of a silent daemon", HOST, &config) else { return };
    let taken = lease_of(NOBODY, &agent);
    let mut client = Client::begin(&host, &taken.environment, Some(NOBODY));
    assert!(client.says().starts_with("active"));
    agent.stop();
    fault(&host, "hung-daemon");
    let agent = Setup::on(&host).config(config).start();
    reaches(&agent, "0", MpsState::Hung);
    witness(&host, &agent, "--gpu 0 --kind compute");
    assert!(client.lives() && client.printed().is_empty(), "{}", agent.log());
    let servers: Vec<_> = all(&agent).processes.into_iter().filter(|one| one.serves.is_some()).collect();
    assert_eq!(servers.iter().map(|one| one.serves.as_deref()).collect::<Vec<_>>(), [Some("MPS server of GPU 0")]);
    clear_faults(&host);
}
