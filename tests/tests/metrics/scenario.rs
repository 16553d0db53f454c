//! A simulated host with leases, load and faults.
//!
//! | GPU | mode | what happens on it |
//! |---|---|---|
//! | 0 | `exclusive` | a lease without a process; another request waits for the GPU |
//! | 1 | `exclusive` | Xid errors, memory rows, a cordon, heat |
//! | 2 | `mig` | a lease of a MIG device, with a process whose memory grows |
//! | 3 | `mps` | a lease with a client; then its MPS daemon hangs |
//! | 4 | `mps` | its MPS daemon fails |
//! | 5 | `exclusive` | a lease of another user, and a process without a lease |
//! | 6 | `exclusive` | cannot be read |

use std::{
    cell::Cell,
    fs,
    io::Write,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use gpush_api::{LeaseGrant, MpsState};
use gpush_tests::{
    agent::{Agent, Setup, gi_at},
    host::{Host, program},
    mps::{Client, act, daemon, fault, reaches, signal},
};
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\ncount = 2\n[[gpu]]\nmodel = \"h100-80-sxm\"\n\
                    [[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\ncount = 4\n";

/// gpushd polls often, and gives up an MPS daemon after its first failure.
const CONFIG: &str = "[health]\npoll = \"1s\"\n[mps]\nhealth = \"1s\"\n\
                      # --constants mps.start=2s,mps.stop=2s,mps.failures=1,usage.record=500ms\n\
                      [[gpu]]\nmatch = [\"0-1\", \"5-6\"]\nmode = \"exclusive\"\n\
                      [[gpu]]\nmatch = [\"2\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n\
                      [[gpu]]\nmatch = [\"3-4\"]\nmode = \"mps\"\n";

/// Memory of the growing process at first, and the growth of each step, in MiB.
const MEMORY: (u64, u64) = (1000, 20);

/// Uid of `nobody`.
const NOBODY: u32 = 65534;

/// The host, with gpushd on it.
#[derive(Debug)]
pub(crate) struct Scenario {
    // These must be the first fields, so that they are dropped before the host.
    pub(crate) agent: Agent,
    client: Option<Client>,
    /// The connection of the request that waits. If it is closed, gpushd cancels the request.
    waiting: Option<UnixStream>,
    pub(crate) host: Host,
    /// The leases.
    pub(crate) leases: Vec<LeaseGrant>,
    growing: u32,
    memory: Cell<u64>,
    unleased: u32,
}

impl Scenario {
    /// Starts the host with leases and load, but without faults.
    pub(crate) fn up() -> Self {
        let host = Host::up(HOST);
        mkfifo(&task_faults(&host), Mode::S_IRWXU).expect("a FIFO");
        let agent = start(&host);
        agent.wait_for_layouts_at_start();
        let whole = json!({ "kind": "whole" });
        let idle = granted(&agent, &json!({ "share": whole, "selectors": ["0"] }));
        let device = json!({ "share": { "kind": "mig_profile", "profile": "3g.40gb" }, "duration_s": 3600 });
        let device = granted(&agent, &device);
        let shared = granted(&agent, &json!({ "share": { "kind": "mps", "percentage": 50 }, "target": "3" }));
        let foreign = granted(&agent, &json!({ "share": whole, "selectors": ["5"], "holder_uid": NOBODY }));
        let waits = json!({ "share": whole, "selectors": ["0"], "wait": "unlimited" });
        let waiting = Some(begin(&agent, &waits));
        let place = format!("--gpu 2 --gi {} --ci 0 --sm 60 --dram 20 --memory {}", gi_at(&host, 2, 4), MEMORY.0);
        let growing = host.process_of_lease(&place, &device.lease.id.to_string());
        let client = Client::start(&host, &shared.environment);
        let unleased = host.process("--gpu 5 --sm 80 --memory 2000");
        let memory = Cell::new(MEMORY.0);
        Self {
            agent,
            client: Some(client),
            waiting,
            host,
            leases: vec![idle, device, shared, foreign],
            growing,
            memory,
            unleased,
        }
    }

    /// Keeps gpushd taking a sample every second, and lets the memory of a process grow.
    pub(crate) fn work(&self) {
        self.memory.set(self.memory.get() + MEMORY.1);
        let memory = self.memory.get().to_string();
        self.host.sim("process", &["set", &self.growing.to_string(), "--memory", &memory]);
        self.watch();
    }

    /// Keeps gpushd taking a sample every second.
    pub(crate) fn watch(&self) {
        assert_eq!(self.agent.get("/v1/usage?watch=true").status, 200);
    }

    /// Causes all faults.
    pub(crate) fn break_it(&self) {
        let uuids: Vec<String> = self.agent.gpus().iter().map(|gpu| gpu.uuid.to_string()).collect();
        let host = &self.host;
        for xid in ["79", "94"] {
            host.sim("xid", &[xid, "--gpu", "1"]);
        }
        host.sim("remap", &["--gpu", "1"]);
        host.sim("remap", &["--gpu", "1", "--fail"]);
        self.heat("80");
        host.fault("nvmlDeviceGetMemoryInfo --gpu 6 --rc UNKNOWN");
        let pid = daemon(&self.agent, "4").pid.expect("a daemon").cast_signed();
        assert!(signal(pid, Signal::SIGKILL), "the daemon runs");
        fault(host, &format!("hung-daemon --on {}", uuids[3]));
    }

    /// Ends all faults, and the leases and the request that cause alerts.
    pub(crate) fn mend(&mut self) {
        let host = &self.host;
        host.clear_faults();
        host.sim("mps", &["fault", "clear"]);
        self.heat("0");
        host.end_process(self.unleased);
        host.end_process(self.growing);
        reaches(&self.agent, "3", MpsState::Ready);
        drop((self.client.take(), self.waiting.take()));
        self.gpushctl(&["gpu", "reset", "1", "--yes"]);
        self.gpushctl(&["gpu", "uncordon", "1"]);
        assert!(act(&self.agent, "4", "start", &json!({})).status < 300);
        reaches(&self.agent, "4", MpsState::Ready);
        self.gpushctl(&["lease", "end", "--all", "--reason", "a new driver", "--yes"]);
        self.agent.await_that("no lease", || self.agent.get("/v1/leases").json() == json!([]));
    }

    /// Makes two boards warmer by this many °C.
    fn heat(&self, degrees: &str) {
        for gpu in ["1", "5"] {
            self.host.sim("board", &["--gpu", gpu, "--heat", degrees]);
        }
    }

    /// Enters or leaves maintenance.
    pub(crate) fn maintenance(&self, verb: &str) {
        let answer = self.agent.post(&format!("/v1/maintenance/{verb}"), &json!({ "reason": "driver" }));
        assert!(answer.status < 300, "{verb}: {}", String::from_utf8_lossy(&answer.body));
    }

    /// Lets the driver refuse every program that opens it, or ends this.
    pub(crate) fn refuse_driver(&self, refuses: bool) {
        if refuses {
            self.host.fault("nvmlInit --rc DRIVER_NOT_LOADED");
        } else {
            self.host.clear_faults();
        }
    }

    /// Lets a background task of gpushd panic.
    pub(crate) fn break_task(&self) {
        fs::write(task_faults(&self.host), "monitor\n").expect("the FIFO is read");
    }

    /// Ends gpushd.
    pub(crate) fn stop(&mut self) {
        self.agent.signal(Signal::SIGTERM);
        assert!(self.agent.wait().success());
    }

    /// Starts gpushd again, after its database was lost.
    pub(crate) fn start_without_database(&mut self) {
        let database = Setup::on(&self.host).state_dir().join("gpush.db");
        fs::remove_file(database).expect("a database");
        self.agent = start(&self.host);
    }

    /// Accepts the loss of the database.
    pub(crate) fn recover(&self) {
        assert!(self.agent.post("/v1/recover", &json!({ "reason": "no jobs" })).status < 300);
        // The cordon because of the memory row was lost too, so gpushd has set it again.
        self.gpushctl(&["gpu", "uncordon", "1"]);
    }

    /// Runs gpushctl, which must succeed.
    fn gpushctl(&self, arguments: &[&str]) {
        let output = self.gpushctl_output(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs gpushctl.
    pub(crate) fn gpushctl_output(&self, arguments: &[&str]) -> Output {
        let mut command: Command = self.host.command(program("gpushctl"));
        command.args(arguments).env("GPUSH_SOCKET", self.agent.socket()).stdin(Stdio::null());
        command.output().expect("gpushctl can be started")
    }
}

/// Returns the path of the FIFO from which a debug build of gpushd reads the names of tasks that it lets panic.
fn task_faults(host: &Host) -> PathBuf {
    host.scratch("task-faults")
}

fn start(host: &Host) -> Agent {
    let faults = task_faults(host).display().to_string();
    Setup::on(host).config(CONFIG).env("GPUSH_TEST_TASK_FAULTS", faults).start()
}

fn granted(agent: &Agent, request: &Value) -> LeaseGrant {
    let answer = agent.post("/v1/leases", request);
    assert!(answer.status < 300, "{request}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

/// Sends a request for a lease, and does not wait for the answer.
fn begin(agent: &Agent, request: &Value) -> UnixStream {
    let (mut stream, body) = (agent.connect(), request.to_string());
    let head = "POST /v1/leases HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\ncontent-length: ";
    write!(stream, "{head}{}\r\n\r\n{body}", body.len()).expect("gpushd reads");
    stream
}
