//! Leases that are bound to scopes and cgroups, on a real systemd.
//!
//! | file | subject |
//! |---|---|
//! | `bindings` | the binding of a lease, which depends on where the caller runs; the end of the lease |
//! | `attacks` | forged cgroups, processes that change their identity, processes that fork continuously |
//! | `many_scopes` | D-Bus calls of a grant; many scopes |
//! | `notices` | what the sandboxed gpushd writes to terminals and files |
//! | `pids` | a pid that is reused before systemd moves the process |
//! | `namespaces` | callers in a user namespace or a container |
//! | `user_limits` | limits of a user's slice |
//! | `user_manager` | units of `systemd --user`, and processes that leave a lease through it |
//! | `hierarchies` | cgroup v1, and v1 together with v2 |
//! | `faults` | restarts of gpushd, systemd or the bus; a deleted database |
//!
//! A boot takes longer than most of the steps, so the steps of a test use one machine. Each step ends its leases.
//!
//! The machine has no pam_systemd. So the tests create a login session as a scope in the slice of the user, with a name
//! that logind would choose.

mod attacks;
mod bindings;
mod faults;
mod hierarchies;
mod many_scopes;
mod namespaces;
mod notices;
mod pids;
mod user_limits;
mod user_manager;

use gpush_tests::machine::Machine;
use serde_json::Value;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";

/// A config with one whole GPU, and one GPU with many replicas.
const RULES: &str = r#"
[[gpu]]
match = ["0"]
mode = "exclusive"
lease = "required"

[[gpu]]
match = ["1"]
mode = "timeslice"
timeslice = { replicas = 32 }
"#;

/// The directory of systemd's cgroups, as an expression for a shell.
const CGROUPS: &str = "$(for dir in unified systemd .; do [ -e /sys/fs/cgroup/$dir/cgroup.procs ] && break; done; echo /sys/fs/cgroup/$dir)";

/// The uid of `nobody`.
const ALICE: u32 = 65534;
/// The uid of `daemon`.
const BOB: u32 = 1;

/// Starts a machine with gpush and simulated GPUs. Returns `None` if this host cannot run machines.
fn machine(what: &str) -> Option<Machine> {
    Machine::boot(what).map(with_gpush)
}

fn with_gpush(machine: Machine) -> Machine {
    machine.install();
    machine.simulated_host(HOST);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write("/etc/gpush/config.toml", RULES);
    machine.sh("systemctl start gpushd.service");
    machine.await_that("GPU 0 can be leased", gpus_are_read);
    machine
}

fn gpus_are_read(machine: &Machine) -> bool {
    let output = machine.run("gpushctl gpu list --json");
    let gpus: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
    gpus.len() == 2 && gpus.iter().all(|gpu| gpu["state"] == "ready")
}

/// Returns a shell command that runs `line` in a new login session of a user.
fn in_session(uid: u32, session: &str, line: &str) -> String {
    format!(
        "systemd-run --quiet --scope --slice=user-{uid}.slice --unit=session-{session}.scope \
         --uid={uid} --gid={uid} setsid --wait sh -c '{line}'"
    )
}

/// Starts a command in the background, in a new login session. Its output goes to `/srv/SESSION`.
fn start_in_session(machine: &Machine, uid: u32, session: &str, line: &str) {
    let line = in_session(uid, session, line);
    machine.write(&format!("/srv/{session}.sh"), format!("exec {line} > /srv/{session} 2>&1\n"));
    machine.sh(&format!("systemd-run --quiet --unit=of-{session} --collect sh /srv/{session}.sh"));
}

fn leases(machine: &Machine) -> Vec<Value> {
    let output = machine.run("gpushctl lease list --json");
    let mut leases: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
    // The use changes with each sample.
    leases.iter_mut().filter_map(Value::as_object_mut).for_each(|lease| drop(lease.remove("usage")));
    leases
}

/// Waits until there are exactly this many leases, and all are active. Returns the leases.
fn active(machine: &Machine, count: usize) -> Vec<Value> {
    machine.await_that("the leases are active", |machine| {
        let all = leases(machine);
        all.len() == count && all.iter().all(|lease| lease["state"] == "active")
    });
    leases(machine)
}

/// Returns the id of a lease.
fn id(lease: &Value) -> String {
    text(lease, "id").to_owned()
}

/// Waits until a process has this command line, and returns its pid. A lease is active before `gpushctl run` executes the
/// command.
fn pid_of(machine: &Machine, command: &str) -> String {
    let find = format!("pgrep -xf '{command}'");
    machine.await_that("the command runs", |machine| machine.run(&find).status.success());
    machine.sh(&find)
}

fn none_left(machine: &Machine) {
    machine.await_that("no lease is left", |machine| leases(machine).is_empty());
    machine.await_that("no scope is left", |machine| scopes(machine).is_empty());
}

/// Returns the cgroups of the leases' scopes.
fn scopes(machine: &Machine) -> Vec<String> {
    let listed = machine.sh("find /sys/fs/cgroup/gpulease.slice /sys/fs/cgroup/*/gpulease.slice -name '*.scope' 2>/dev/null | sed 's|.*/||' | sort -u");
    listed.lines().map(str::to_owned).collect()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("{field}: {value}"))
}

/// Returns the cgroup of a process, in the unified hierarchy.
fn cgroup(machine: &Machine, pid: &str) -> String {
    machine.sh(&format!("sed -n 's/^0:://p' /proc/{pid}/cgroup"))
}

/// Makes the driver list a process on GPU 0.
fn on_gpu_0(machine: &Machine, pid: &str) {
    on_gpu(machine, 0, pid);
}

/// Makes the driver list a process on a GPU.
fn on_gpu(machine: &Machine, gpu: u32, pid: &str) {
    machine.sh(&format!("/opt/built/gpush-sim process /var/lib/gpush-sim add --gpu {gpu} --kind compute --pid {pid}"));
}

/// Starts a monitor of the system bus, which writes each message to `/srv/monitor`.
fn monitor(machine: &Machine) {
    machine.sh(
        "systemd-run --quiet --unit=monitor --property=StandardOutput=file:/srv/monitor busctl monitor --json=short",
    );
    let _ = machine.journal_until("-u dbus.service", "became a monitor");
}
