//! `gpushctl run` and `gpushctl lease` with the real gpushd.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
};

use gpush_api::{DeviceUse, Lease, LeaseState, MigDevice};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
};

use crate::transcript::{self, gpushctl};

const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 2\n";

/// GPU 0 has MIG devices. GPU 1 is leased as a whole.
const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"1g.10gb*2\"]\n\
                      [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";

fn started() -> (Host, Agent) {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    done(&agent, &["apply", "0,1", "--wait"]);
    (host, agent)
}

/// Runs a command that must succeed. Returns its output.
fn done(agent: &Agent, args: &[&str]) -> String {
    let output = gpushctl(agent, args, 100).output().expect("gpushctl");
    assert!(output.status.success(), "{}", transcript::transcript(args, &output));
    String::from_utf8(output.stdout).expect("text")
}

/// Runs a command. Returns its exit code and output.
fn run(agent: &Agent, args: &[&str]) -> (i32, String) {
    let output = gpushctl(agent, args, 100).output().expect("gpushctl");
    (output.status.code().expect("a status"), transcript::transcript(args, &output))
}

fn leases(agent: &Agent) -> Vec<Lease> {
    serde_json::from_str(&done(agent, &["lease", "list", "--json"])).expect("leases")
}

fn lease(agent: &Agent, id: &str) -> Lease {
    serde_json::from_str(&done(agent, &["lease", "show", id, "--json"])).expect("a lease")
}

fn request(agent: &Agent, words: &[&str]) -> String {
    let id = done(agent, &[&["lease", "request", "-o", "name"], words].concat());
    id.trim().to_owned()
}

/// A command that has replaced the process of `gpushctl run`. The command ends when its stdin
/// closes.
struct Held {
    child: Child,
    /// The first line that the command printed.
    line: String,
}

impl Held {
    fn start(agent: &Agent, words: &[&str]) -> Self {
        let script = "echo $GPUSH_LEASE $CUDA_VISIBLE_DEVICES; read _";
        let mut command = gpushctl(agent, &[&["run"], words, &["--", "/bin/sh", "-c", script]].concat(), 100);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpushctl");
        let mut line = String::new();
        let _ = BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line);
        Self { child, line: line.trim().to_owned() }
    }

    fn end(mut self) {
        let mut stdin = self.child.stdin.take().expect("stdin");
        let _ = stdin.write_all(b"\n");
        assert!(self.child.wait().expect("an end").success());
    }
}

#[test]
fn run_holds_a_mig_device_until_its_command_ends() {
    let (_host, agent) = started();
    let held = Held::start(&agent, &["--mig", "1g.10gb"]);
    let line = held.line.clone();
    let (id, uuid) = line.split_once(' ').expect("a lease and a device");
    let devices: Vec<MigDevice> = serde_json::from_str(&done(&agent, &["mig", "list", "--json"])).expect("devices");
    let granted = devices.iter().find(|one| one.uuid.as_ref().is_some_and(|one| *one == *uuid)).expect("the device");
    assert_eq!((granted.usage, granted.available), (DeviceUse::Granted, false));
    assert_eq!(granted.grants[0].id, id);
    let status = done(&agent, &["status", "0"]);
    let row = status.lines().find(|line| line.contains(&format!(" {id} "))).unwrap_or_default();
    assert!(row.contains("1g.10gb@"), "the row of the device shows its lease: {status}");
    held.end();
    agent.await_that("the lease has ended", || lease(&agent, id).state == LeaseState::Ended);
    assert!(leases(&agent).is_empty());
    assert!(done(&agent, &["lease", "list", "--ended"]).contains(id));
}

#[test]
fn run_without_free_capacity_fails_or_waits_in_the_queue() {
    let (_host, agent) = started();
    let held = Held::start(&agent, &["--whole"]);
    let (code, text) = run(&agent, &["run", "--whole", "--", "true"]);
    assert_eq!(code, 125, "{text}");
    let (code, text) = run(&agent, &["lease", "request", "--whole", "--for", "1h"]);
    assert!(code == 4 && text.contains(held.line.split(' ').next().expect("an id")), "{text}");
    let (code, text) = run(&agent, &["lease", "request", "--whole", "--for", "1h", "--wait=1s"]);
    assert_eq!(code, 8, "{text}");

    // A killed client leaves the queue.
    for words in
        [&["run", "--whole", "--wait", "--", "true"][..], &["lease", "env", "--whole", "--wait", "--for", "1h"]]
    {
        let mut waiting = gpushctl(&agent, words, 100).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it");
        agent.await_that("a lease is queued", || leases(&agent).iter().any(|one| one.state == LeaseState::Queued));
        waiting.kill().and_then(|()| waiting.wait()).expect("it ends");
        agent.await_that("the queue is empty", || leases(&agent).iter().all(|one| one.state != LeaseState::Queued));
    }

    let waiting = gpushctl(&agent, &["run", "--whole", "--wait", "--", "/bin/echo", "granted"], 100)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("gpushctl");
    agent.await_that("a lease is queued", || leases(&agent).iter().any(|one| one.state == LeaseState::Queued));
    let queue = done(&agent, &["lease", "list"]);
    assert!(queue.contains("queued") && queue.contains("position 1"), "{queue}");
    held.end();
    let output = waiting.wait_with_output().expect("an end");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "granted\n");
}

#[test]
fn lease_is_entered_shown_renewed_and_ended() {
    let (_host, agent) = started();
    let id = request(&agent, &["--memory", "30G", "--for", "1h"]);
    let first = lease(&agent, &id);
    assert_eq!(first.state, LeaseState::Active);
    let entered = done(&agent, &["run", "--lease", &id, "--", "/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
    assert_eq!(first.members[0].target, entered.trim());
    let script = format!(
        "eval \"$({0} lease env {id})\"; {0} run -- /bin/sh -c 'echo $GPUSH_LEASE'; {0} run --whole -- true",
        program("gpushctl").display()
    );
    let output = Command::new("sh").args(["-c", &script]).env("GPUSH_SOCKET", agent.socket()).output().expect("sh");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{id}\n"));
    assert_eq!(output.status.code(), Some(125), "a request within a lease: {output:?}");

    done(&agent, &["lease", "renew", &id, "--for", "3h"]);
    assert!(lease(&agent, &id).expires_at > first.expires_at);
    let shown = done(&agent, &["lease", "show", &id]);
    for part in ["active, granted", "enforced by", "hardware", "3g.40gb", "ends"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    done(&agent, &["lease", "end", &id]);
    agent.await_that("the lease has ended", || lease(&agent, &id).state == LeaseState::Ended);
    let (code, text) = run(&agent, &["run", "--lease", &id, "--", "true"]);
    assert_eq!(code, 125, "{text}");

    let id = request(&agent, &["--whole", "--for", "1h"]);
    done(&agent, &["lease", "end", &id, "--reason", "new fan"]);
    agent.await_that("the lease has ended", || lease(&agent, &id).state == LeaseState::Ended);
    let shown = done(&agent, &["lease", "show", &id]);
    assert!(shown.contains("ended: revoked") && shown.contains("new fan"), "{shown}");
}

#[test]
fn lease_is_kept_by_its_program_and_not_by_its_shell() {
    let (_host, agent) = started();
    // Bind the lease to this test process, which plays the part of a login shell. The test process
    // does not belong to the lease.
    let id = request(&agent, &["--whole", "--with", &std::process::id().to_string()]);
    let words = ["run", "--lease", &id, "--", "/bin/sh", "-c", "echo started; read _"];
    let mut command = gpushctl(&agent, &words, 100);
    let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpushctl");
    let mut line = String::new();
    BufReader::new(program.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "started\n");
    done(&agent, &["lease", "end", &id]);
    let says = format!("process {} ", program.id());
    agent.await_that("what it waits for", || lease(&agent, &id).waits_for.iter().any(|one| one.starts_with(&says)));
    let (code, text) = run(&agent, &["lease", "request", "--whole", "--for", "1h"]);
    assert!(code == 4 && text.contains(&id), "the program has not begun to compute: {text}");
    drop(program.stdin.take());
    assert!(program.wait().expect("an end").code().is_some());
    agent.await_that("the lease has ended", || lease(&agent, &id).state == LeaseState::Ended);
    request(&agent, &["--whole", "--for", "1h"]);
}

#[test]
fn lease_belongs_to_its_holder() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED leases of other users: only root can be several users");
        return;
    }
    let host = Host::up(HOST);
    let agent = Agent::start_public(&host, CONFIG);
    done(&agent, &["apply", "0,1", "--wait"]);
    let id = request(&agent, &["--mig", "1g.10gb", "--for", "1h", "--user", "65534"]);
    assert_eq!(lease(&agent, &id).holder.uid, 65534);
    let as_user = |uid: u32, args: &[&str]| {
        let output = gpushctl(&agent, args, 100).uid(uid).gid(uid).current_dir("/").output().expect("gpushctl");
        (output.status.code().expect("a status"), transcript::transcript(args, &output))
    };
    let (code, text) = as_user(65534, &["run", "--lease", &id, "--", "/bin/sh", "-c", "echo in $GPUSH_LEASE"]);
    assert!(code == 0 && text.contains(&format!("in {id}\n")), "{text}");
    for (args, expected) in [
        (&["run", "--lease", id.as_str(), "--", "true"][..], 125),
        (&["lease", "env", &id], 5),
        (&["lease", "end", &id], 5),
        (&["lease", "renew", &id, "--for", "9h"], 5),
        (&["lease", "end", &id, "--reason", "mine"], 5),
        (&["lease", "request", "--mig", "1g.10gb", "--for", "1h", "--user", "0"], 5),
    ] {
        let (code, text) = as_user(65532, args);
        assert_eq!(code, expected, "{text}");
    }
    // Root is an administrator. Nevertheless, no process of root may run in the lease of another
    // user.
    let (code, text) = run(&agent, &["run", "--lease", &id, "--", "true"]);
    assert_eq!(code, 125, "{text}");
    let (_, text) = as_user(65532, &["lease", "list"]);
    assert!(text.contains(&id) && text.contains("nobody"), "other users see the holder: {text}");
    assert_eq!(lease(&agent, &id).state, LeaseState::Active);
}

#[test]
fn group_owner_and_quota_limit_leases() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED owner and quotas: only root can be several users");
        return;
    }
    let group = nix::unistd::Group::from_gid(nix::unistd::Gid::from_raw(65534)).ok().flatten().expect("a group").name;
    let host = Host::up(HOST);
    let quota = format!("[[quota]]\ngroups = [\"{group}\"]\nleases = 1\n");
    let config =
        format!("{quota}{}", CONFIG.replace("mode = \"exclusive\"", "mode = \"exclusive\"\nowner = \"slurm\""));
    let agent = Agent::start_public(&host, &config);
    done(&agent, &["apply", "0,1", "--wait"]);
    let as_nobody = |args: &[&str]| {
        let output = gpushctl(&agent, args, 100).uid(65534).gid(65534).current_dir("/").output().expect("gpushctl");
        (output.status.code().expect("a status"), transcript::transcript(args, &output))
    };
    let (code, text) = as_nobody(&["lease", "request", "--whole", "--for", "1h"]);
    assert!(code == 5 && text.contains("Slurm"), "{text}");
    // Only Slurm's hooks can lease this GPU. Even an administrator cannot lease it directly.
    let (code, text) = run(&agent, &["lease", "request", "--whole", "--for", "1h"]);
    assert!(code == 5 && text.contains("Slurm"), "{text}");
    let (code, text) = run(&agent, &["lease", "request", "--whole", "-g", "1", "--for", "1h", "--user", "65534"]);
    assert!(code == 5 && text.contains("Slurm"), "{text}");
    let first = request(&agent, &["--mig", "1g.10gb", "--for", "1h", "--user", "65534"]);
    // If root requests a lease for another user, the quotas of this user's groups apply.
    let (code, text) = run(&agent, &["lease", "request", "--mig", "1g.10gb", "--for", "1h", "--user", "65534"]);
    assert!(code == 5 && text.contains(&format!("the quota for group {group} applies")), "{text}");
    assert!(text.contains(&first), "{text}");
    done(&agent, &["lease", "end", &first]);
    agent.await_that("the lease has ended", || lease(&agent, &first).state == LeaseState::Ended);
    let (code, text) = as_nobody(&["lease", "request", "--mig", "1g.10gb", "--for", "1h"]);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn refused_request_names_alternatives_and_quiet_no_warnings() {
    let (_host, agent) = started();
    for (words, code, part) in [
        (&["--mig", "2g.30gb"][..], 2, "1g.10gb or 3g.40gb"),
        (&["--memory", "500G"], 2, ""),
        (&["--whole", "--count", "9"], 2, ""),
        (&["--mps", "25"], 7, ""),
        (&["--mig", "1g.10gb", "-g", "9"], 2, "9"),
        (&["--mps", "101"], 2, "101"),
        (&["--mps", "0"], 2, "`0`"),
        (&["--for", "99999w"], 2, "52w"),
        (&[], 2, "--whole"),
    ] {
        let words = if words.contains(&"--for") { words.to_vec() } else { [words, &["--for", "1h"]].concat() };
        let (status, text) = run(&agent, &[&["lease", "request"], words.as_slice()].concat());
        assert_eq!(status, code, "{text}");
        assert!(text.contains(part) && text.contains("hint"), "{text}");
    }
    assert!(leases(&agent).is_empty());
    request(&agent, &["--mig", "3g.40gb", "--for", "1h"]);
    let (code, text) = run(&agent, &["lease", "request", "--mig", "3g.40gb", "--for", "1h"]);
    assert!(code == 4 && text.contains("the largest free MIG device is 1g.10gb, on GPU 0"), "{text}");
    assert!(text.contains("request `--mig 1g.10gb`; to wait until the lease can be granted"), "{text}");
    let two = ["lease", "request", "--mig", "1g.10gb", "--count", "2", "--for", "1h"];
    let (code, text) = run(&agent, &[&two[..], &["-q"]].concat());
    assert!(code == 0 && !text.contains("warning"), "{text}");
    let id = leases(&agent).pop().expect("a lease").id.to_string();
    done(&agent, &["lease", "end", &id]);
    let (code, text) = run(&agent, &two);
    assert!(
        code == 0 && text.contains("warning: with a driver older than R570, a process can use only one MIG device"),
        "{text}"
    );
}

/// Starts a gpushctl command in the environment of the simulated host. In this environment,
/// nvidia-smi is the simulated program, which knows the GPUs of this host.
fn on_host(host: &Host, agent: &Agent, args: &[&str]) -> Child {
    let mut command: Command = host.command(program("gpushctl"));
    command.args(args).env("GPUSH_SOCKET", agent.socket()).env("LANG", "C.UTF-8");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpushctl")
}

fn ended(args: &[&str], child: Child) -> (i32, String) {
    let output = child.wait_with_output().expect("an end");
    (output.status.code().expect("a status"), transcript::transcript(args, &output))
}

fn is_cordoned(agent: &Agent, index: u32) -> bool {
    !agent.gpu(index).cordons.is_empty()
}

fn end_lease(agent: &Agent, id: &str) {
    done(agent, &["lease", "end", id]);
    agent.await_that("the lease has ended", || lease(agent, id).state == LeaseState::Ended);
}

/// Fault: a reset needs maintenance of the host, so a lease of any GPU prevented it.
#[test]
fn reset_and_maintenance_wait_for_leases_of_their_gpus() {
    let (host, agent) = started();
    let id = request(&agent, &["--mig", "1g.10gb", "--for", "1h", "-g", "0"]);
    let args = ["gpu", "reset", "1"];
    let (code, text) = ended(&args, on_host(&host, &agent, &args));
    assert!(code == 0 && text.contains("GPU 1: reset"), "{text}");
    assert_eq!(lease(&agent, &id).state, LeaseState::Active);
    // The audit trail of the GPU that was reset contains the reset.
    for (gpu, has_reset) in [("1", true), ("0", false)] {
        let trail = done(&agent, &["audit", "-g", gpu]);
        assert_eq!(trail.contains("maintenance.enter") && trail.contains("reset of GPU 1"), has_reset, "{trail}");
    }
    // The lease blocks each change of its own GPU. Without GPUs as arguments, `maintenance enter` is for the whole host.
    for (args, expected) in [
        (&["gpu", "reset", "0"][..], 4),
        (&["maintenance", "enter"], 4),
        (&["mig", "apply", "7g.80gb", "-g", "0", "--once"], 4),
        (&["gpu", "drain", "0", "--timeout", "1s"], 8),
    ] {
        let (code, text) = run(&agent, args);
        assert!(code == expected && text.contains(&id), "{text}");
        assert!(args[1] != "reset" || text.contains(&format!("lease end {id} --kill")), "{text}");
    }
    done(&agent, &["gpu", "uncordon", "0"]);
    end_lease(&agent, &id);

    // A command that waits too long changes nothing.
    let id = request(&agent, &["--whole", "-g", "1", "--for", "1h"]);
    for args in [&["gpu", "reset", "1", "--wait=1s"][..], &["maintenance", "enter", "--wait=1s"]] {
        let (code, text) = ended(args, on_host(&host, &agent, args));
        assert!(code == 8 && text.contains(&id), "{text}");
        assert!(!agent.get("/v1/health").json()["maintenance"].is_object(), "{text}");
        assert!(!is_cordoned(&agent, 0) && !is_cordoned(&agent, 1), "{text}");
    }
    assert_eq!(lease(&agent, &id).state, LeaseState::Active);
    end_lease(&agent, &id);

    for args in [&["gpu", "reset", "1", "--wait"][..], &["maintenance", "enter", "--wait"]] {
        let id = request(&agent, &["--whole", "-g", "1", "--for", "1h"]);
        let mut waiting = on_host(&host, &agent, args);
        agent.await_that("the GPU is cordoned", || is_cordoned(&agent, 1));
        assert!(waiting.try_wait().expect("a state").is_none(), "it waits for {id}");
        // While the command waits, gpushd grants no new lease.
        let (code, text) = run(&agent, &["lease", "request", "--mig", "1g.10gb", "--for", "1h", "-g", "1"]);
        assert_ne!(code, 0, "{text}");
        done(&agent, &["lease", "end", &id]);
        let (code, text) = ended(args, waiting);
        assert_eq!(code, 0, "{text}");
        let is_in = agent.get("/v1/health").json()["maintenance"].is_object();
        assert_eq!(is_in, args[0] == "maintenance", "{text}");
        if is_in {
            done(&agent, &["maintenance", "leave"]);
        }
        agent.await_that("no cordon is left", || !is_cordoned(&agent, 0) && !is_cordoned(&agent, 1));
    }
}

#[test]
fn leased_devices_are_shown_as_granted_in_every_list() {
    let (_host, agent) = started();
    let id = request(&agent, &["--mig", "3g.40gb", "--for", "1h"]);
    let whole = request(&agent, &["--whole", "-g", "1", "--for", "1h"]);
    let status = done(&agent, &["status"]);
    assert!(status.contains("2 GPUs, 3 MIG devices, 0 in use, 2 granted"), "{status}");
    assert!(status.contains("◐ 3g.40gb") && status.contains("◐ whole GPU") && status.contains("○ 1g.10gb"), "{status}");
    let shown = done(&agent, &["gpu", "show", "0"]);
    assert!(shown.contains("◐ 3g.40gb") && shown.contains(" granted ") && shown.contains(" free "), "{shown}");
    let devices: Vec<MigDevice> = serde_json::from_str(&done(&agent, &["mig", "list", "--json"])).expect("devices");
    let usage = |profile: &str| devices.iter().find(|one| one.profile == profile).expect("a device").usage;
    assert_eq!((usage("3g.40gb"), usage("1g.10gb")), (DeviceUse::Granted, DeviceUse::Free));
    done(&agent, &["lease", "end", &id, &whole]);
    // Wait: before gpushd ends the leases, it asks the driver whether a process of a lease still
    // runs.
    agent.until("no device is granted", || (!done(&agent, &["status"]).contains('◐')).then_some(()));
}

/// Fault: all parts of a GPU instance were listed with one name, and `--target` without a kind of lease was refused.
#[test]
fn every_listed_name_of_a_device_is_a_target() {
    let host = Host::up(HOST);
    let agent =
        Agent::start(&host, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1c.3g.40gb*3\", \"1g.10gb\"]\n");
    done(&agent, &["apply", "0", "--wait"]);
    let names = done(&agent, &["mig", "list", "-o", "name"]);
    assert_eq!(names.lines().count(), 4, "{names}");
    names.lines().for_each(|name| drop(request(&agent, &["--target", name, "--for", "1h"])));
    let shown = done(&agent, &["lease", "list"]);
    assert!(names.lines().all(|name| shown.contains(name)), "{shown}");
}

#[test]
fn reload_shows_changed_terms_of_leases() {
    let (_host, agent) = started();
    let changed = CONFIG.replace("mode = \"exclusive\"", "mode = \"exclusive\"\nowner = \"slurm\"\nat_end = \"end\"");
    agent.write_config(&changed);
    for args in [["config", "diff"], ["config", "reload"]] {
        let (_, text) = run(&agent, &args);
        assert!(text.contains("GPU 1") && text.contains("; at_end end; owner slurm"), "{text}");
    }
}
