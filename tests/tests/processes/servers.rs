//! MPS servers. gpushd finds them in `/proc`, even if their daemon has not reported them.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use gpush_api::{LeaseState, MpsState, UnleasedStep};
use gpush_tests::{
    agent::Setup,
    host::Host,
    mps::{Client, Role, base, clear_faults, fault, lease_becomes, lease_now, parts, reaches, release},
};

use super::{END, HOST, NOBODY, OTHER, RULE, all, lease_of, listed, start_on, step_event, witness};

#[test]
fn mps_server_is_not_unleased_before_a_probe_and_without_answer() {
    // The next probe of the daemon is an hour away. So the list of servers from gpushd's last probe
    // does not contain the new server.
    let config = format!("{END}[mps]\nhealth = \"3600s\"\n{RULE}");
    let Some((host, agent)) = start_on("servers that their daemon has not reported", HOST, &config) else { return };
    let taken = lease_of(NOBODY, &agent);
    let mut client = Client::begin(&host, &taken.environment, Some(NOBODY));
    assert!(client.says().starts_with("active"));
    witness(&host, &agent, "--gpu 0 --kind compute");
    assert!(client.lives() && client.printed().is_empty(), "{}", agent.log());
    let server = parts(&base(&host)).into_iter().find(|part| part.role == Role::Server).expect("a server");
    let server = listed(&agent, server.pid.cast_unsigned()).expect("the server is listed");
    assert_eq!((server.serves.as_deref(), server.unleased), (Some("MPS server of GPU 0"), None));

    // After a restart of gpushd, the daemon does not answer.
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

/// Imitates a setuid program of root that a user has started with a copy of the daemon's lock as standard input: the
/// effective uid is 0, and the real uid is the user's. The program starts a process of the user.
const SETUID: &str = r#"use POSIX; $| = 1;
my $pid = fork;
if (!$pid) {
    POSIX::setgid($ARGV[0]); POSIX::setuid($ARGV[0]);
    open STDIN, "<", "/dev/null"; open STDOUT, ">", "/dev/null"; exec "sleep", "1000";
}
$< = $ARGV[0];
print "$pid\n";
waitpid $pid, 0;"#;

/// A program like [`SETUID`], and its child, which the driver lists on GPU 0.
struct Imitation {
    parent: Child,
    pid: u32,
}

impl Imitation {
    fn start(host: &Host, uid: u32) -> Self {
        let target = gpush_tests::mps::names(&base(host)).into_iter().find(|name| name.starts_with('g'));
        let lock = File::open(base(host).join(target.expect("a target")).join("lock")).expect("a lock");
        let mut perl = Command::new("perl");
        perl.args(["-e", SETUID, &uid.to_string()]).stdin(lock).stdout(Stdio::piped());
        let mut parent = perl.spawn().expect("perl");
        let mut line = String::new();
        let output = parent.stdout.take().expect("its output");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let pid = line.trim().parse().expect("a pid");
        host.sim("process", &["add", "--gpu", "0", "--kind", "compute", "--pid", line.trim()]);
        Self { parent, pid }
    }

    /// Ends the child, and so the program.
    fn end(mut self) {
        let _has_ended = gpush_tests::mps::signal(self.pid.cast_signed(), nix::sys::signal::Signal::SIGKILL);
        self.parent.wait().expect("its status");
    }
}

/// Fault: gpushd recognized an MPS server by the lock of its parent and by the effective uid of its parent. A user can
/// copy the lock, and can start a setuid program. So this user's process was not unleased, and the user's lease ended
/// while the process still ran.
#[test]
fn child_of_a_setuid_program_with_the_lock_is_not_an_mps_server() {
    let config = format!("{END}[mps]\nhealth = \"1s\"\n{RULE}");
    let Some((host, agent)) = start_on("processes that imitate servers", HOST, &config) else { return };
    let taken = lease_of(NOBODY, &agent);
    let mut listener = agent.listen("?kinds=unleased", None);
    let without_lease = Imitation::start(&host, OTHER);
    step_event(&mut listener, without_lease.pid, UnleasedStep::Asked);
    without_lease.end();

    let of_holder = Imitation::start(&host, NOBODY);
    let shown = agent.until("the process is listed", || listed(&agent, of_holder.pid));
    assert_eq!((shown.serves, shown.unleased.as_deref()), (None, Some("it computes without MPS")));
    let id = taken.lease.id;
    release(&agent, id);
    let waits = format!("process {}", of_holder.pid);
    agent.until("the lease waits for the process", || {
        let lease = lease_now(&agent, id);
        let is_named = lease.waits_for.iter().any(|sentence| sentence.starts_with(&waits));
        (lease.state == LeaseState::Releasing && is_named).then_some(())
    });
    of_holder.end();
    lease_becomes(&agent, id, LeaseState::Ended);
}
