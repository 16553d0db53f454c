//! Jobs of users with a lease. The jobs start in different ways, and change their environments.

use std::process::{Command, Stdio};

use gpush_tests::mps::{Client, becomes, lease_for};

use super::{END, Job, NOBODY, done, lease_of, listed, start, witness};

const PLACE: &str = "--gpu 0 --kind mps";

#[test]
fn job_with_an_empty_environment_is_shown_and_not_ended() {
    let Some((host, agent)) = start("a job without environment", END) else { return };
    let _share = lease_of(NOBODY, &agent);
    // The environment is empty, as if the process had overwritten it, or were in execve.
    let mut job = Job::start(Command::new("/bin/sleep").arg("1000").env_clear(), NOBODY).on(&host, PLACE);
    assert_eq!(done(&agent, job.pid()), "not ended: its user holds a lease");
    // The program overwrites its environment, as setproctitle does.
    let clobber = "f=open('/proc/self/stat').read().rsplit(')',1)[1].split()\n\
                   import ctypes,time\n\
                   ctypes.memset(int(f[47]),0,int(f[48])-int(f[47]))\n\
                   print('done',flush=True);time.sleep(1000)";
    if std::path::Path::new("/usr/bin/python3").exists() {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", clobber]).stdout(Stdio::piped()).env("GPUSH_LEASE", "s1");
        let mut titled = Job::start(&mut command, NOBODY);
        let mut line = String::new();
        let out = titled.0.stdout.take().expect("piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("the job prints a line");
        titled = titled.on(&host, PLACE);
        assert_eq!(done(&agent, titled.pid()), "not ended: its user holds a lease");
        assert!(titled.lives());
    }
    witness(&host, &agent, "--gpu 0 --kind compute");
    assert!(job.lives());
}

/// Fault: `mps show` said that a client runs without a lease, and `process list` named a lease of this client.
#[test]
fn mps_daemon_and_process_list_name_the_same_leases() {
    let Some((host, agent)) = start("the leases of MPS clients", "") else { return };
    let lease = || {
        let body = serde_json::json!({ "percentage": 20, "duration_s": 3600 });
        lease_for(&agent, NOBODY, "0", &body).expect("a lease")
    };
    let leases = [lease(), lease(), lease()];
    let [first, second, third] = leases.each_ref().map(|granted| granted.lease.id.to_string());
    let mut bare = leases[1].environment.clone();
    bare.retain(|(name, _)| name != "GPUSH_LEASE");
    let unnamed = Client::begin(&host, &bare, Some(NOBODY));
    let named = Client::begin(&host, &leases[1].environment, Some(NOBODY));
    let inherits = Client::begin_with_named_parent(&host, &leases[2].environment, Some(NOBODY));
    assert!([&unnamed, &named, &inherits].iter().all(|client| client.says().starts_with("active")));
    let daemon = becomes(&agent, "0", "with three clients", |daemon| daemon.clients.len() == 3);
    for client in &daemon.clients {
        let pid = client.pid.expect("an administrator sees it");
        let process = agent.until("the client is listed", || listed(&agent, pid));
        assert_eq!((&client.lease, client.unattributed), (&process.lease, process.unattributed), "{client:?}");
    }
    let lease_of_client = |pid: i32| {
        let client = daemon.clients.iter().find(|client| client.pid == Some(pid.cast_unsigned())).expect("a client");
        (client.lease.clone().expect("a lease"), client.unattributed)
    };
    assert_eq!(lease_of_client(unnamed.pid()), (first, true), "it counts for the oldest lease");
    assert_eq!(lease_of_client(named.pid()), (second, false));
    assert!(daemon.clients.iter().any(|client| client.lease.as_ref() == Some(&third) && !client.unattributed));
    assert!(!daemon.findings.iter().any(|finding| finding.contains("without a lease")), "{:?}", daemon.findings);
    assert!(daemon.findings.iter().any(|finding| finding.contains("it is not certain")), "{:?}", daemon.findings);
}
