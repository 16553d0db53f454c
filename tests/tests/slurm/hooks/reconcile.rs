//! `gpushctl slurm reconcile`, and ends of jobs that hooks report later.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use gpush_api::LeaseState;
use gpush_tests::host::program;

use super::{
    Job, Node, WHOLE, failure, first,
    leftovers::{Cgroup, Left, is_root, node_name},
    silent,
};

/// Writes a script with this body, which replaces squeue. Returns the path of the script.
fn squeue(node: &Node, body: &str) -> PathBuf {
    let squeue = node.host.scratch("squeue");
    fs::write(&squeue, format!("#!/bin/sh\n{body}\n")).expect("a script");
    fs::set_permissions(&squeue, fs::Permissions::from_mode(0o755)).expect("its mode can be changed");
    squeue
}

/// Returns a command that runs `gpushctl slurm reconcile` on a node whose Slurm knows no job.
fn reconcile(node: &Node) -> Command {
    let mut command = node.command("reconcile");
    command.arg("--squeue").arg(squeue(node, "true"));
    command
}

#[test]
fn reconcile_ends_the_leases_of_jobs_that_slurm_does_not_know() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(3).on("0"));
    node.prolog(&Job::new(4).on("1"));
    let squeue = node.host.scratch("squeue");
    let script = |body: &str| {
        fs::write(&squeue, format!("#!/bin/sh\n{body}\n")).expect("a script");
        fs::set_permissions(&squeue, fs::Permissions::from_mode(0o755)).expect("its mode can be changed");
    };
    let reconcile = || {
        let mut command = node.command("reconcile");
        command.arg("--squeue").arg(&squeue).env("SQUEUE_PARTITION", "x").env("SLURM_CLUSTERS", "y");
        command.output().expect("gpushctl can be started")
    };
    script("echo slurmctld is down >&2; exit 1");
    assert_eq!(reconcile().status.code(), Some(6));
    assert!(node.lease(3).is_some() && node.lease(4).is_some(), "without squeue, no lease ends");
    // Earlier fault: because of environment variables of the administrator, squeue left out jobs, and gpushd ended
    // their leases.
    script(
        "echo \"$*\" > \"$0.arguments\"; [ -n \"$SQUEUE_PARTITION$SLURM_CLUSTERS\" ] || echo 4 SIGNALING; echo 3 COMPLETED",
    );
    let output = reconcile();
    assert!(output.status.success(), "{output:?}");
    assert!(node.lease(3).is_none() && node.lease(4).is_some());
    // Earlier fault: the file of the job stayed. The tasks of a later job with this id could read the environment of
    // the earlier job.
    assert!(!node.directory().join("ci-3@n1").exists() && !node.directory().join("ci-3@n1+run").exists());
    assert!(node.directory().join("ci-4@n1").exists());
    let arguments = fs::read_to_string(node.host.scratch("squeue.arguments")).expect("squeue was called");
    assert!(arguments.contains("--nodelist=n1") && arguments.contains("--states=all"), "{arguments}");
}

/// Fault: squeue does not list the jobs of another cluster, so gpushd ended the leases of these jobs.
#[test]
fn reconcile_ends_only_leases_of_the_cluster_of_slurm_conf() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(3).on("0").with("SLURM_CLUSTER_NAME", "other"));
    let slurm_conf = node.host.scratch("slurm.conf");
    fs::write(&slurm_conf, "ClusterName=CI\n").expect("slurm.conf can be written");
    let run = || reconcile(&node).env("SLURM_CONF", &slurm_conf).output().expect("gpushctl can be started");
    assert!(run().status.success());
    assert!(node.lease(3).is_some());
    fs::write(&slurm_conf, "ClusterName=Other\n").expect("slurm.conf can be written");
    assert!(run().status.success());
    assert!(node.lease(3).is_none());
}

/// Fault: all leases together had one time limit. If one lease did not end, no time was left for the other leases.
#[test]
fn lease_that_does_not_end_leaves_the_time_of_the_others() {
    if !is_root("leftovers of a job") {
        return;
    }
    let name = node_name("-r");
    let Some(cgroup) = Cgroup::of(&name, 4) else { return };
    let node = Node::two_gpus(WHOLE);
    let job = |id, gpu| Job::new(id).on(gpu).with("SLURMD_NODENAME", &name);
    node.prolog(&job(3, "0"));
    node.prolog(&job(4, "1"));
    let (stuck, slow) = (node.granted(3).id, node.granted(4).id);
    // gpushd cannot read which processes are left on the GPU of the first job. So the lease of the first job does not
    // end. gpushd needs 2 s to end the lease of the second job.
    node.host.fault(&format!("nvmlDeviceGetComputeRunningProcesses* --gpu {} --rc UNKNOWN", first(&node)));
    let other = node.agent().gpus().into_iter().find(|gpu| gpu.index != first(&node)).expect("a GPU").index;
    let mut left = Left::on(&node.host, other, Some(&cgroup));
    let output = thread::scope(|scope| {
        let reconcile = scope.spawn(|| reconcile(&node).args(["--deadline", "4s"]).output());
        // This test is the parent of the process, so it must reap the process.
        node.agent().until("the process is ended", || (!left.lives()).then_some(()));
        reconcile.join().expect("it ends").expect("gpushctl can be started")
    });
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(&format!("{stuck}: releasing")) && text.contains(&format!("{slow}: ended")), "{text}");
    assert_eq!(node.lease(3).map(|lease| lease.state), Some(LeaseState::Releasing));
    node.host.clear_faults();
    node.agent().await_that("no lease", || node.lease(3).is_none());
}

/// Fault: reconcile listed the leases through `gpushd.sock`, the socket that all users can use. Users can block this
/// socket.
#[test]
fn reconcile_needs_the_admin_socket_alone() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(3).on("0"));
    let named = format!("[api]\nadmin_socket = {:?}\n{WHOLE}", node.host.scratch("gpushd.admin.sock"));
    fs::write(node.host.scratch("gpushd.toml"), named).expect("the config can be written");
    let mut command = Command::new(program("gpushctl"));
    command.env_clear().env("GPUSH_SOCKET", "/nonexistent/gpushd.sock").args(["slurm", "reconcile"]);
    command.arg("--config").arg(node.host.scratch("gpushd.toml")).arg("--dir").arg(node.directory());
    let output = command.arg("--squeue").arg(squeue(&node, "true")).output().expect("gpushctl can be started");
    assert!(output.status.success(), "{output:?}");
    assert!(node.lease(3).is_none());
}

/// Fault: if gpushd refused the report that a job had ended, every later hook sent only this report again. So the ends
/// of other jobs were never reported.
#[test]
fn end_that_cannot_be_delivered_holds_up_no_other() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(1).on("0"));
    let note = |job: u32, cluster: &str| {
        let end =
            serde_json::json!({ "cluster": cluster, "job": job, "node": "n1", "restart_count": 0, "until_ms": 0 });
        let path = node.directory().join(format!("{cluster}-{job}@n1+ended"));
        fs::write(&path, end.to_string()).expect("a file");
        path
    };
    let never: Vec<PathBuf> = (0..8).map(|job| note(job, "")).collect();
    let one = note(1, "ci");
    node.prolog(&Job::new(2).on("1"));
    assert!(!one.exists() && node.lease(1).is_none());
    assert!(never.iter().all(|path| !path.exists()), "gpushd never accepts them");
}

/// Answers every request on a socket as a stopping gpushd does, until the test ends.
fn serve_stopping(path: &Path) {
    let body = r#"{"code":"stopping","message":"gpushd is stopping and accepts no changes","retryable":true}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let listener = UnixListener::bind(path).expect("the socket can be created");
    thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let mut request = [0; 65_536];
            let _read = connection.read(&mut request);
            let _written = connection.write_all(answer.as_bytes());
        }
    });
}

/// Fault: if gpushd was still stopping when the deadline of Prolog passed, the node was drained, even with
/// `agent_down = "pass"`.
#[test]
fn gpushd_that_does_not_stop_in_time_is_judged_by_the_policy() {
    let mut node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(1).on("0"));
    node.epilog(&Job::new(1).on("0"));
    node.kill();
    let socket = node.host.scratch("gpushd.admin.sock");
    fs::remove_file(&socket).expect("the socket exists");
    serve_stopping(&socket);
    let prolog = |job: &Job| {
        let mut command = node.command("prolog");
        command.args(["--deadline", "1s"]).envs(job.0.clone()).output().expect("gpushctl can be started")
    };
    let text = failure(&prolog(&Job::new(2).on("0")));
    assert!(text.contains("gpushd is stopping") && text.contains("agent_down"), "{text}");
    fs::write(node.host.scratch("gpushd.toml"), format!("[slurm]\nagent_down = \"pass\"\n{WHOLE}")).expect("a config");
    let job = Job::new(3).on("0");
    silent(&prolog(&job));
    assert!(node.task(&job).expect("the task runs").contains("without a lease"));
}
