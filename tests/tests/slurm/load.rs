//! Many jobs at the same time, and many requests of users.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpush_api::{Lease, LeaseBinding};
use gpush_tests::{
    agent::PATIENCE,
    random::number,
    slurm::{ALICE, BOB, Setup, Site},
};

use super::{HOST, TIMESLICE, completed, refused};

/// Sets two shards for each GPU, so that eight jobs run at the same time.
fn shards(setup: Setup) -> Setup {
    let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=8\n", setup.devices().display());
    setup.gres("gpu,shard", "gpu:4,shard:8", &conf)
}

/// Prolog cannot distinguish a shard from a whole GPU. So the job needs a request.
fn shard_needs_a_request(site: &Site) {
    refused(&site.cluster.run_job(ALICE, &["--gres=shard:1"], "env"), "gres/shard");
    let comment = "--comment=gpush:timeslice";
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=shard:1", comment], "env | sort"));
    let gpu = site.agent.gpu(0).uuid;
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(gpu.as_str()), "{}", ended.output);
    site.assert_clean();
}

/// The default is 24 jobs of each user. `GPUSH_TEST_SLURM_JOBS` sets another number.
#[test]
fn many_jobs_of_two_users_leave_nothing() {
    let Some(site) = Site::start(HOST, TIMESLICE, |setup, _, _| shards(setup)) else { return };
    shard_needs_a_request(&site);
    let cluster = &site.cluster;
    let earlier = fs::read_dir(cluster.dir().join("out")).expect("output").count();
    let each = number("GPUSH_TEST_SLURM_JOBS", 24);
    let array = format!("--array=1-{each}%4");
    let go = cluster.dir().join("go");
    let script =
        format!("echo \"$GPUSH_LEASE $CUDA_VISIBLE_DEVICES\"; while [ ! -e '{}' ]; do sleep 0.1; done", go.display());
    for user in [ALICE, BOB] {
        let _array = cluster.sbatch(user, &[array.as_str(), "--gres=shard:1", "--comment=gpush:timeslice"], &script);
    }
    // Each of the two users has four jobs at a time. The first eight jobs run until the test has
    // seen eight leases at the same time.
    let mut most = 0;
    cluster.until("eight leases at a time", || {
        most = most.max(site.leases().len());
        (most == 8).then_some(())
    });
    fs::write(&go, "").expect("a file");
    let mut ended = (Instant::now(), usize::MAX);
    // The machine may be busy, so all jobs together have no time limit. But at least one job must
    // end each minute.
    loop {
        let left = cluster.run("squeue", &["-h", "-r", "-o", "%i"]).lines().count();
        most = most.max(site.leases().len());
        if left == 0 {
            break;
        }
        if left < ended.1 {
            ended = (Instant::now(), left);
        }
        assert!(ended.0.elapsed() < PATIENCE, "{left} jobs do not end\n{}", cluster.logs());
        cluster.assert_never_drained();
        thread::sleep(Duration::from_millis(100));
    }
    let outputs: Vec<String> = fs::read_dir(cluster.dir().join("out"))
        .expect("output")
        .flatten()
        .map(|entry| fs::read_to_string(entry.path()).expect("output"))
        .collect();
    let leased = outputs.iter().filter(|text| text.starts_with('L') && text.contains("GPU-")).count();
    let count = usize::try_from(2 * each).expect("a number of jobs");
    assert_eq!((leased, outputs.len() - earlier), (count, count), "{outputs:?}");
    assert_eq!(most, 8, "leases at a time");
    site.assert_clean();
}

/// A Python script that opens connections to a socket as fast as it can. It sends an incomplete request on most of
/// these connections, reads no answers, and keeps the latest 200 connections open. On one more connection, it requests
/// leases that last one second.
const FLOOD: &str = r#"
import http.client, json, socket, sys, threading
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(sys.argv[1])
granted = threading.Event()
def lease():
    body, to = json.dumps({"share": {"kind": "timeslice"}, "duration_s": 1}), Unix("x")
    while True:
        try:
            to.request("POST", "/v1/leases", body, {"content-type": "application/json"})
            answer = to.getresponse()
            answer.read()
            if answer.status == 200:
                granted.set()
        except (OSError, http.client.HTTPException):
            to.close()
threading.Thread(target=lease, daemon=True).start()
granted.wait()
opened, begun = [], False
while True:
    try:
        to = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        to.settimeout(1)
        to.connect(sys.argv[1])
        to.sendall(b"GET /v1/leases HTTP/1.1\r\nhost: x\r\n" + (b"\r\n" if len(opened) % 2 else b""))
        opened.append(to)
    except OSError:
        pass
    if len(opened) > 200:
        opened.pop(0).close()
        if not begun:
            begun = print("begun", flush=True) is None
"#;

/// The hooks use a separate socket. So users who flood the socket for all users cannot make Prolog
/// fail. With `agent_down = "fail"`, a late hook would drain the node. The leases of the users contend with Prolog for the
/// placement and for the database.
#[test]
fn flood_of_the_socket_by_users_drains_no_node() {
    let config = TIMESLICE.replace("replicas = 2", "replicas = 5")
        + "[[gpu]]\nmatch = [\"4\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 16 }\n";
    let host = HOST.replace("count = 4", "count = 5");
    let shards = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=20\n", setup.devices().display());
        setup.gres("gpu,shard", "gpu:4,shard:20", &conf)
    };
    let Some(site) = Site::start_public(&host, &config, |setup, _, _| shards(setup)) else { return };
    let mut floods = Vec::new();
    for user in [ALICE, BOB] {
        let mut flood = Command::new("python3");
        flood.args(["-c", FLOOD]).arg(site.agent.socket()).uid(user.uid).gid(user.gid).current_dir("/");
        let Ok(mut flood) = flood.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() else {
            return println!("SKIPPED flood of the socket: python3 is not installed");
        };
        let mut begun = String::new();
        let mut output = std::io::BufReader::new(flood.stdout.take().expect("a pipe"));
        std::io::BufRead::read_line(&mut output, &mut begun).expect("a line");
        assert_eq!(begun, "begun\n");
        floods.push(flood);
    }
    let cluster = &site.cluster;
    let go = cluster.dir().join("go");
    let script = format!("echo \"$GPUSH_LEASE\"; while [ ! -e '{}' ]; do sleep 0.2; done", go.display());
    let arguments = ["--gres=shard:1", "--comment=gpush:timeslice"];
    let jobs: Vec<_> = (0..20).map(|_| cluster.sbatch(ALICE, &arguments, &script)).collect();
    // Wait until all 20 jobs have a lease.
    let has_lease = |job: &_| cluster.output_of(*job).starts_with('L');
    cluster.until("lease of each job", || jobs.iter().all(has_lease).then_some(()));
    let is_of_job = |lease: &&Lease| matches!(lease.binding, LeaseBinding::Job { .. });
    assert_eq!(site.leases().iter().filter(is_of_job).count(), 20);
    fs::write(&go, "").expect("a file");
    for job in jobs {
        completed(cluster.ended(job));
    }
    for mut flood in floods {
        assert_eq!(flood.try_wait().expect("a child"), None, "the flood lasts until the end");
        flood.kill().expect("a child");
        flood.wait().expect("a child");
    }
    cluster.until("end of the users' leases", || site.leases().is_empty().then_some(()));
    site.assert_clean();
}
