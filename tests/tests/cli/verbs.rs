//! Everyday commands with the real gpushd: apply, add, remove, reset, a list of free devices, and
//! the environment of a lease that gpushd refuses.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    io::Write,
    process::{Command, Stdio},
};

use gpush_api::{Code, DeviceUse, MigDevice, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::{Host, program},
};

use crate::transcript;

pub(crate) const TWO: &str = "[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"h100-80-sxm\"\n";
pub(crate) const MIXED: &str =
    "[[gpu]]\nname = \"training\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"1g.10gb*2\"]\n";

/// Runs gpushctl. Returns the exit code and the whole output.
pub(crate) fn run(agent: &Agent, args: &[&str]) -> (i32, String) {
    let output = transcript::gpushctl(agent, args, 80).env("PATH", path()).output().unwrap();
    (output.status.code().unwrap(), transcript::transcript(args, &output))
}

pub(crate) fn path() -> String {
    let ours = program("gpushctl").parent().unwrap().display().to_string();
    format!("{ours}:{}", std::env::var("PATH").unwrap_or_default())
}

/// Runs gpushctl, which must succeed. Returns the standard output.
pub(crate) fn done(agent: &Agent, args: &[&str]) -> String {
    let output = transcript::gpushctl(agent, args, 80).env("PATH", path()).output().unwrap();
    assert!(output.status.success(), "{}", transcript::transcript(args, &output));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn devices(agent: &Agent, args: &[&str]) -> Vec<MigDevice> {
    serde_json::from_str(&done(agent, &[&["mig", "list", "-o", "json"], args].concat())).unwrap()
}

pub(crate) fn started(host: &Host, config: &str) -> Agent {
    let agent = Agent::start(host, config);
    agent.wait_for_layouts_at_start();
    agent
}

/// Faults: a hint suggested a command that destroyed an override. `mig apply` without a layout also ended an override.
/// `mig on` for a GPU with MIG made an override of its present layout, which froze a dynamic layout.
#[test]
fn layout_commands_change_only_what_they_name() {
    let host = Host::up(TWO);
    let agent = started(&host, MIXED);
    // `mig on` changes nothing on a GPU that has MIG.
    let before = real_layout(&host, 0);
    let (code, text) = run(&agent, &["mig", "on", "0"]);
    assert!(code == 0 && text.contains("GPU 0: MIG mode is already on"), "{text}");
    assert_eq!((agent.gpu(0).overridden, real_layout(&host, 0)), (None, before));

    // `mig add` and `mig remove` keep the other instances.
    done(&agent, &["mig", "add", "1g.10gb", "-g", "0", "--once"]);
    assert_eq!(real_layout(&host, 0).len(), 4);
    let starts = devices(&agent, &["0", "--profile", "1g.10gb"]);
    done(&agent, &["mig", "remove", "1g.10gb*2", "-g", "0", "--once"]);
    let left = devices(&agent, &["0", "--profile", "1g.10gb"]);
    assert_eq!((starts.len(), left.len()), (3, 1));
    assert!(starts.iter().any(|one| one.uuid == left[0].uuid), "the instance that stays is the same");
    let (code, text) = run(&agent, &["mig", "remove", "2g.20gb", "-g", "0"]);
    assert!(code == 2 && text.contains("GPU 0 has no instance `2g.20gb` to remove"), "{text}");

    done(&agent, &["apply"]);
    // `apply` keeps an override until the override is cleared.
    done(&agent, &["mig", "apply", "7g.80gb", "-g", "0", "--reason", "big run"]);
    for args in [&["apply"][..], &["apply", "0"], &["mig", "apply", "-g", "0"]] {
        done(&agent, args);
        assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"], "{args:?}");
    }
    // The undo of this change restores the layout of the rule, so it also ends the override.
    done(&agent, &["apply", "--undo", "--yes"]);
    assert_eq!((agent.gpu(0).overridden, real_layout(&host, 0).len()), (None, 3));
    // It is a change too, so a second undo restores the layout before it.
    done(&agent, &["apply", "--undo", "--yes"]);
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    assert!(agent.gpu(0).overridden.is_some());
    done(&agent, &["config", "overrides", "clear", "0"]);
    done(&agent, &["apply"]);
    assert_eq!(real_layout(&host, 0).len(), 3);
}

/// Fault: during maintenance, `apply` and `ready` reported success, and `ready --json` printed nothing.
#[test]
fn cordon_and_maintenance_reserve_devices_and_are_reported() {
    let host = Host::up(TWO);
    let agent = started(&host, MIXED);
    let free = done(&agent, &["mig", "list", "--free", "--profile", "1g.10gb", "-o", "uuid"]);
    assert!(free.lines().count() == 2 && free.lines().all(|line| line.starts_with("MIG-")), "{free}");
    done(&agent, &["gpu", "cordon", "0"]);
    let all = devices(&agent, &[]);
    assert!(all.iter().all(|one| one.usage == DeviceUse::Reserved && !one.available), "{all:?}");
    let (code, text) = run(&agent, &["mig", "list", "--free", "-o", "uuid"]);
    assert_eq!((code, text.lines().count()), (Code::Blocked.exit_status().into(), 2), "{text}");
    done(&agent, &["gpu", "uncordon", "0"]);

    let ready = || serde_json::from_str::<serde_json::Value>(&done(&agent, &["ready", "--json"])).unwrap();
    assert_eq!(ready(), serde_json::json!({ "ready": true }));
    done(&agent, &["maintenance", "enter", "--reason", "new driver"]);
    assert_eq!(ready()["maintenance"]["reason"], "new driver");
    let (code, text) = run(&agent, &["ready"]);
    assert!(code == 0 && text.contains("gpushctl maintenance leave"), "{text}");
    let (code, text) = run(&agent, &["apply"]);
    assert!(code == 4 && text.contains("in maintenance: new driver") && text.contains("maintenance leave"), "{text}");
}

/// Does the same as `run`, in the environment of the simulated host. In this environment, nvidia-smi is the simulated
/// program, which knows the GPUs of this host.
fn run_in(host: &Host, agent: &Agent, args: &[&str]) -> (i32, String) {
    let mut command: Command = host.command(program("gpushctl"));
    command.args(args).env("GPUSH_SOCKET", agent.socket()).env("LANG", "C.UTF-8");
    let output = command.output().unwrap();
    (output.status.code().unwrap(), transcript::transcript(args, &output))
}

/// Faults: if a rule had mode `unmanaged`, `mig apply --check` refused an exported layout. An `exclusive` rule on a GPU with MIG
/// enabled made `mig apply --check || mig apply` fail every time.
#[test]
fn assert_accepts_exported_layouts_and_exclusive_rules() {
    let host = Host::up(TWO);
    let agent = started(&host, "[[gpu]]\nmatch = [\"1\"]\nmode = \"unmanaged\"\n");
    done(&agent, &["mig", "apply", "3g.40gb", "-g", "0", "--once"]);
    let file = host.dir().join("now.yaml");
    std::fs::write(&file, done(&agent, &["mig", "export"])).unwrap();
    done(&agent, &["mig", "apply", "--check", "--file", file.to_str().unwrap()]);
    done(&agent, &["mig", "apply", "none", "-g", "0", "--once"]);
    assert_eq!(run(&agent, &["mig", "apply", "--check", "--file", file.to_str().unwrap()]).0, 3);

    agent.reload(format!("{MIXED}[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n"));
    if run(&agent, &["mig", "apply", "--check"]).0 != 0 {
        done(&agent, &["mig", "apply", "--wait"]);
    }
    done(&agent, &["mig", "apply", "--check"]);
    done(&agent, &["apply", "1"]);
    assert!(!agent.gpu(1).mig.unwrap().enabled, "`apply` gives the GPU to its mode");
}

/// Faults: while gpushd ran, `gpu reset` failed even for an idle GPU. A cancelled operation ended with an error. An
/// operation that had never started was shown as `rolled back`.
#[test]
fn used_gpu_is_not_reset_and_delays_an_operation() {
    let host = Host::up(TWO);
    let agent = started(&host, "");
    let (code, text) = run_in(&host, &agent, &["gpu", "reset", "1"]);
    assert!(code == 0 && text.contains("GPU 1: reset"), "{text}");
    let (_, status) = run(&agent, &["status"]);
    assert!(!status.contains("aintenance"), "{status}");
    done(&agent, &["mig", "apply", "7g.80gb", "-g", "0", "--once"]);
    let device = devices(&agent, &["0"]).remove(0);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 100", device.gi));
    agent.await_that("the process is seen", || devices(&agent, &["0"])[0].usage == DeviceUse::InUse);
    let (code, text) = run_in(&host, &agent, &["gpu", "reset", "0"]);
    assert!(code == 4 && text.contains(&pid.to_string()) && text.contains("gpu reset 0 --wait"), "{text}");

    let (code, text) = run(&agent, &["mig", "apply", "3g.40gb", "-g", "0", "--once", "--wait=1s"]);
    assert!(code == 8 && text.contains("not started") && !text.contains("rolled back"), "{text}");
    assert!(text.contains(&format!("pid {pid}")), "an administrator sees what blocks the operation: {text}");
    let timed_out: Operation = serde_json::from_str(&done(&agent, &["op", "show", "--json"])).unwrap();
    let causes = timed_out.error.unwrap().causes.join("; ");
    assert!(timed_out.state == OperationState::NotStarted && causes.contains(&format!("pid {pid}")), "{causes}");
    let events = done(&agent, &["events", "--kind", "operation"]);
    assert!(!events.contains("rolled back") && !events.contains(&format!("pid {pid}")), "{events}");
    assert!(!done(&agent, &["audit"]).contains("rolled back"));
    let id = done(&agent, &["mig", "apply", "3g.40gb", "-g", "0", "--once", "--wait", "--detach"]);
    let (code, text) = run(&agent, &["op", "cancel", id.trim()]);
    assert!(code == 0 && text.contains("cancelled") && !text.contains("error:"), "{text}");
}

/// Fault: `mig list --free` listed devices that a queued operation was about to destroy, and `available` was true on a
/// GPU without a rule. But a lease request could get neither kind of device.
#[test]
fn available_device_is_one_that_a_lease_request_gets() {
    let host = Host::up(TWO);
    let agent = started(&host, MIXED);
    let large = || devices(&agent, &["0", "--profile", "3g.40gb"]).remove(0);
    host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 100", large().gi));
    let small = ["0", "--profile", "1g.10gb"];
    let lease = ["lease", "request", "--mig", "1g.10gb", "-g", "0", "--for", "1h"];
    agent.await_that("the process is seen", || large().usage == DeviceUse::InUse);
    assert!(devices(&agent, &small).iter().all(|one| one.available));
    let id = done(&agent, &["mig", "apply", "7g.80gb", "-g", "0", "--once", "--wait", "--detach"]);
    for one in devices(&agent, &small) {
        assert_eq!((one.usage, one.available), (DeviceUse::Reserved, false), "{one:?}");
        assert!(one.reason.unwrap().contains(&format!("operation {}", id.trim())));
    }
    assert_eq!(run(&agent, &["mig", "list", "--free", "-g", "0"]).0, 4);
    let (code, text) = run(&agent, &lease);
    assert!(code == 4 && text.contains(&format!("operation {} is ahead", id.trim())), "{text}");
    done(&agent, &["op", "cancel", id.trim()]);
    agent.await_that("nothing is reserved", || devices(&agent, &small).iter().all(|one| one.available));
    done(&agent, &lease);

    // A program may use a device of a GPU without a rule, but gpushd grants no lease on this device.
    done(&agent, &["mig", "apply", "7g.80gb", "-g", "1", "--once"]);
    let device = devices(&agent, &["1"]).remove(0);
    assert_eq!((device.usage, device.available), (DeviceUse::Free, false));
    assert_eq!(done(&agent, &["mig", "list", "1", "--free", "-o", "uuid"]).trim(), device.uuid.unwrap().as_str());
    let (code, text) = run(&agent, &["lease", "request", "--mig", "7g.80gb", "-g", "1", "--for", "1h"]);
    assert!(code == 7 && text.contains("GPU 1 cannot be leased"), "{text}");
}

/// Faults: `operation list -g` filtered only one page of the list, so older operations of the GPU were missing. A finished
/// operation was listed as if it had not begun.
#[test]
fn operations_of_a_gpu_are_found_on_later_pages() {
    let host = Host::up(TWO);
    let agent = started(&host, "");
    let apply = |gpu: &str, layout: &str| {
        done(&agent, &["mig", "apply", layout, "-g", gpu, "--once", "--quiet"]);
    };
    apply("1", "7g.80gb");
    apply("0", "7g.80gb");
    apply("0", "none");
    let list = ["operation", "list", "-n", "1", "-o", "name"];
    let last = done(&agent, &list);
    let of_gpu_1 = done(&agent, &[&list[..], &["-g", "1"]].concat());
    assert!(of_gpu_1.starts_with("op-") && of_gpu_1.lines().count() == 1 && of_gpu_1 != last, "{of_gpu_1}");
    assert_eq!(done(&agent, &[&list[..], &["-g", "0"]].concat()), last);
    let all: Vec<gpush_api::OperationSummary> =
        serde_json::from_str(&done(&agent, &["op", "list", "-o", "json"])).unwrap();
    assert!(all.len() == 3 && all.iter().all(|one| one.begun && one.gpu_uuids.len() == 1), "{all:?}");

    // MIG mode is set without a layout.
    apply("1", "none");
    done(&agent, &["mig", "off", "1"]);
    assert!(!agent.gpu(1).mig.unwrap().enabled);
    done(&agent, &["mig", "on", "1"]);
    assert!(agent.gpu(1).mig.unwrap().enabled);
}

/// Fault: if gpushd refused the lease, the shell command `eval "$(gpushctl … )"`, which sets the environment of the
/// lease, still succeeded.
#[test]
fn evaluated_environment_of_a_refused_lease_fails() {
    let host = Host::up(TWO);
    let agent = started(&host, "");
    for command in ["lease env --mps -g 9 --for 1h", "lease env L9", "lease env --mps --for soon"] {
        let script =
            format!("eval \"$({} {command} 2>/dev/null)\" && echo past || echo stopped", program("gpushctl").display());
        let output = Command::new("sh").args(["-c", &script]).env("GPUSH_SOCKET", agent.socket()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "stopped\n", "{command}");
    }
}

/// Runs a command on a separate terminal (`script` of util-linux), and types an answer. Returns the
/// exit code and the output.
pub(crate) fn on_a_terminal(agent: &Agent, command: &str, answer: &str) -> (i32, String) {
    let line = format!("{} {command}", program("gpushctl").display());
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).env("GPUSH_SOCKET", agent.socket()).env("LANG", "C.UTF-8");
    let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn apply_that_destroys_asks_on_a_terminal() {
    let host = Host::up(TWO);
    let agent = started(&host, "");
    // The command destroys nothing, so gpushctl does not ask.
    let (code, text) = on_a_terminal(&agent, "mig apply 7g.80gb -g 0", "");
    assert!(code == 0 && !text.contains("Continue?"), "{text}");
    let (code, text) = on_a_terminal(&agent, "mig apply 3g.40gb -g 0", "n\n");
    assert!(code == 1 && text.contains("This destroys 1 instance. Continue? [y/N]"), "{text}");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    let (code, text) = on_a_terminal(&agent, "mig apply 3g.40gb -g 0", "y\n");
    assert!(code == 0 && real_layout(&host, 0).len() == 1 && real_layout(&host, 0)[0].starts_with("3g.40gb"), "{text}");
    // A reset also destroys instances, so gpushctl asks.
    let (code, text) = on_a_terminal(&agent, "gpu reset 0", "n\n");
    assert!(code == 1 && text.contains("GPU 0: - 3g.40gb@") && text.contains("This destroys 1 instance."), "{text}");
    assert_eq!(real_layout(&host, 0).len(), 1);
    let (code, text) = on_a_terminal(&agent, "mig apply none -g 0 --yes", "");
    assert!(code == 0 && !text.contains("Continue?"), "{text}");
    assert!(real_layout(&host, 0).is_empty());
}
