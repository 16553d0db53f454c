//! Random kills and faults of MPS daemons, servers, clients and gpushd. After each round, the
//! target must have one daemon, and no process may be left over. If the daemon has survived, gpushd
//! must have adopted it.
//!
//! The default is sixty rounds. `GPUSH_TEST_KILLS` sets another number, and `GPUSH_TEST_SEED`
//! repeats a run. `cargo xtask soak` runs a thousand rounds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_api::{MpsDaemon, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{
        Client, Role, act, base, becomes, clear_faults, daemon, fault, fired, is_open, lease, names, parts, pid_of,
        release, signal,
    },
    random::{number, seeded},
};
use nix::sys::signal::Signal;
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth = \"1s\"\n# --constants mps.start=3s,mps.stop=2s,mps.pause=1s,mps.longest_pause=1s,mps.failures=100,mps.within=60s\n\
                      [[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// The actions. Each round chooses one of them.
const DEEDS: [&str; 14] = [
    "kill the daemon",
    "kill the server",
    "kill the agent",
    "end the agent",
    "kill the client",
    "kill daemon and agent",
    "kill agent and server",
    "stop the daemon's process for a while",
    "silent-hello --times 2",
    "empty-reply --times 3",
    "fault --times 1",
    "orphan-server --times 1",
    "server-dies --times 1",
    "restart by force",
];

struct World {
    // This must be the first field, so that it is dropped before the host. Otherwise gpushd would
    // restart the daemons that the host ends.
    agent: Option<Agent>,
    host: Host,
    environment: Vec<(String, String)>,
    client: Option<Client>,
}

impl World {
    fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("an agent")
    }

    fn start_agent(&mut self) {
        self.agent = Some(Setup::on(&self.host).config(CONFIG).env("GPUSH_LOG", "info").start());
    }

    fn of(&self, role: Role) -> Option<i32> {
        parts(&base(&self.host)).into_iter().find(|part| part.role == role).map(|part| part.pid)
    }

    /// Executes an action. Returns whether the daemon must survive it.
    fn does(&mut self, deed: &str) -> bool {
        let kill = |pid: Option<i32>| pid.is_some_and(|pid| signal(pid, Signal::SIGKILL));
        match deed {
            "kill the daemon" => {
                kill(self.of(Role::Control));
                false
            }
            "kill the server" => {
                kill(self.of(Role::Server));
                true
            }
            "kill the agent" => {
                self.agent.take().expect("an agent").kill();
                self.start_agent();
                true
            }
            "end the agent" => {
                self.agent.take().expect("an agent").stop();
                self.start_agent();
                true
            }
            "kill the client" => {
                self.client = None;
                true
            }
            "kill daemon and agent" => {
                kill(self.of(Role::Control));
                self.agent.take().expect("an agent").kill();
                self.start_agent();
                false
            }
            "kill agent and server" => {
                self.agent.take().expect("an agent").kill();
                kill(self.of(Role::Server));
                self.start_agent();
                true
            }
            "stop the daemon's process for a while" => {
                let pid = self.of(Role::Control).expect("a daemon");
                assert!(signal(pid, Signal::SIGSTOP));
                let _asked = act(self.agent(), "0", "stop", &json!({}));
                assert!(signal(pid, Signal::SIGCONT) || self.of(Role::Control) != Some(pid));
                let _asked = act(self.agent(), "0", "start", &json!({}));
                false
            }
            "restart by force" => {
                assert_eq!(act(self.agent(), "0", "restart", &json!({ "force": true })).status, 200);
                false
            }
            "server-dies --times 1" => {
                // The fault affects only a new server. So end the present server. The client that
                // starts below then needs a new server.
                self.client = None;
                kill(self.of(Role::Server));
                self.goes_wrong(deed, |world| drop(Client::start(&world.host, &world.environment)));
                false
            }
            rule => {
                if rule.starts_with("fault") && self.client.is_none() {
                    self.compute();
                }
                self.goes_wrong(rule, |world| drop(daemon(world.agent(), "0")));
                false
            }
        }
    }

    /// Adds a fault to the simulated programs, and calls `then` until the fault has occurred.
    fn goes_wrong(&self, rule: &str, then: impl Fn(&Self)) {
        fault(&self.host, rule);
        self.agent().await_that("the fault has occurred", || {
            then(self);
            fired(&self.host) > 0
        });
    }

    fn compute(&mut self) {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}\n{}", client.first, self.agent().log());
        self.client = Some(client);
    }

    /// Waits until the daemon is ready, and checks the processes, directories and leases.
    fn is_well(&mut self, deed: &str) -> MpsDaemon {
        // A client must survive these actions. After any other action, the client has lost its
        // server or blocks the next server, so end the client.
        let spared = ["kill the agent", "end the agent", "silent-hello --times 2"];
        if let Some(client) = self.client.as_mut().filter(|_| spared.contains(&deed)) {
            let printed = client.printed();
            assert!(
                client.lives() && printed.is_empty(),
                "{deed}: a client was lost: {printed:?}\n{}",
                self.agent().log()
            );
        } else {
            self.client = None;
        }
        clear_faults(&self.host);
        let ready = becomes(self.agent(), "0", "ready and seen by the driver", |daemon| {
            daemon.state == MpsState::Ready && daemon.gpu.is_some()
        });
        let all = parts(&base(&self.host));
        let of = |role| all.iter().filter(|part| part.role == role).count();
        assert_eq!(of(Role::Control), 1, "{all:?}\n{}", self.agent().log());
        assert!(of(Role::Server) <= 1, "{all:?}");
        let pid = ready.pid.expect("a pid").cast_signed();
        assert!(all.iter().any(|part| part.role == Role::Control && part.pid == pid), "{all:?} {pid}");
        // An adopted daemon can be ready before gpushd knows which user has access.
        let door = ready.pipe_directory.as_deref().expect("a directory");
        self.agent().await_that("access is open", || is_open(door.as_ref()));
        assert_eq!(names(&base(&self.host)).len(), 3, "one target, the lock, and the logs");
        assert_eq!(ready.leases.len(), 1);
        ready
    }
}

#[test]
fn random_kills_leave_one_daemon_and_no_leftovers() {
    let times = number("GPUSH_TEST_KILLS", 60);
    let (mut rng, seed) = seeded(20_261_122);
    let host = Host::up(HOST);
    let mut world = World { host, agent: None, environment: Vec::new(), client: None };
    world.start_agent();
    becomes(world.agent(), "0", "ready", |daemon| daemon.state == MpsState::Ready);
    world.environment = lease(world.agent(), "0", &json!({})).expect("a lease").environment;
    let mut ready = world.is_well("nothing");
    let mut tried: BTreeMap<&str, (u32, Duration)> = BTreeMap::new();
    for time in 0..times {
        if world.client.is_none() && rng.usize(..3) > 0 {
            world.compute();
        }
        let deed = DEEDS[rng.usize(..DEEDS.len())];
        let began = Instant::now();
        let stays = world.does(deed);
        let now = world.is_well(deed);
        let (count, longest) = tried.entry(deed).or_default();
        (*count, *longest) = (*count + 1, (*longest).max(began.elapsed()));
        if stays {
            assert_eq!(now.pid, ready.pid, "{time}: {deed}: it was not adopted\n{}", world.agent().log());
        }
        ready = now;
    }
    // When the last daemon has ended, no process is left.
    world.client = None;
    assert_eq!(act(world.agent(), "0", "stop", &json!({ "force": true })).status, 200);
    becomes(world.agent(), "0", "stopped", |daemon| daemon.state == MpsState::Stopped);
    assert_eq!(parts(&base(&world.host)), []);
    println!("seed {seed}: {times} times, 0 double daemons, 0 lost adoptions, 0 left behind");
    for (deed, (count, longest)) in tried {
        println!("{count:>5}  {deed}, ready again after {longest:?} at most");
    }
}

/// The daemon is killed while gpushd cannot run, and a lease is requested. Then gpushd gets both events at once. Fault:
/// gpushd granted the lease before it handled the end of the daemon, so a program of the lease ran without MPS.
#[test]
fn lease_is_not_granted_on_daemon_that_was_just_killed() {
    let host = Host::up(HOST);
    let agent = Setup::on(&host).config(CONFIG).start();
    let own = i32::try_from(agent.pid()).expect("a pid");
    let mut refused = 0;
    for round in 0..6 {
        let killed = pid_of(&becomes(&agent, "0", "ready", |daemon| daemon.state == MpsState::Ready));
        assert!(signal(own, Signal::SIGSTOP));
        let answer = std::thread::scope(|scope| {
            let request = scope.spawn(|| lease(&agent, "0", &json!({ "percentage": 10 })));
            assert!(signal(killed, Signal::SIGKILL) && signal(own, Signal::SIGCONT));
            request.join().expect("an answer")
        });
        match answer {
            Ok(grant) => {
                // A grant is right only after the next daemon has become ready.
                let next = becomes(&agent, "0", "ready again", |daemon| {
                    daemon.state == MpsState::Ready && daemon.pid.is_some() && pid_of(daemon) != killed
                });
                assert!(grant.lease.granted_at >= Some(next.since), "round {round}: {}", agent.log());
                drop(release(&agent, grant.lease.id));
            }
            Err(error) => {
                assert!(error.retryable, "{error:?}");
                refused += 1;
            }
        }
    }
    println!("{refused} of 6 requests were refused");
}
