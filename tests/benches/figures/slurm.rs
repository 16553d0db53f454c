//! Additional cost of Slurm's hooks for a job, compared with hooks that do nothing. The bench also
//! measures a shell Prolog that starts an MPS daemon without gpush.
//!
//! The bench calls the hooks as slurmd does: as a script, with the environment of the job and
//! without `PATH`. If Slurm is installed, the bench also measures the hooks in jobs of a real
//! Slurm.

use std::{
    cell::Cell,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Barrier,
    thread,
    time::Instant,
};

use gpush_api::MpsState;
use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
    mps::{act, daemon, reaches, real_programs},
    slurm::{ALICE, Site, script},
};
use serde_json::json;

use crate::{
    leases::Plain,
    report::{Report, median},
};

/// Number of jobs of each kind that run one after the other.
const JOBS: usize = 100;
/// Number of concurrent jobs.
const AT_ONCE: usize = 8;
/// Number of rounds of concurrent jobs.
const ROUNDS: usize = 25;
/// Number of jobs of each kind whose Prolog runs while the MPS daemon starts.
const COLD: usize = 20;
/// Number of jobs of each kind in a real Slurm. Also the number of rounds of [`AT_ONCE`] jobs.
const REAL: usize = 20;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 8\n";
const WHOLE: &str = "[[gpu]]\nmatch = [\"0-7\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
const MPS: &str = "[[gpu]]\nmatch = [\"0-7\"]\nmode = \"mps\"\nowner = \"slurm\"\n";
const SHARE: &str = "gpush:mps=25";

/// The hooks that a node uses.
#[derive(Clone)]
struct Hooks {
    prolog: PathBuf,
    epilog: PathBuf,
    slurm_conf: PathBuf,
    comment: Option<&'static str>,
}

impl Hooks {
    /// Returns hooks that do nothing.
    fn none() -> Self {
        let nothing = PathBuf::from("/bin/true");
        Self { prolog: nothing.clone(), epilog: nothing, slurm_conf: PathBuf::new(), comment: None }
    }

    /// Returns the hooks of gpush.
    fn of(host: &Host, comment: Option<&'static str>) -> Self {
        let dir = host.scratch("node");
        fs::create_dir_all(&dir).expect("a directory");
        fs::write(dir.join("gres.conf"), "Name=gpu File=/dev/nvidia[0-7]\n").expect("a file");
        let hook = |verb: &str| packaged(host, &dir, verb);
        Self { prolog: hook("prolog"), epilog: hook("epilog"), slurm_conf: dir.join("slurm.conf"), comment }
    }

    /// Returns hooks that a site without gpush uses: Prolog starts a control daemon for the GPU of
    /// the job, and Epilog ends it.
    fn by_hand(host: &Host, programs: &Path) -> Self {
        let dir = host.scratch("by-hand");
        fs::create_dir_all(&dir).expect("a directory");
        let control = programs.join("nvidia-cuda-mps-control").display().to_string();
        let variables = format!(
            "export PATH=/usr/bin:/bin\nmps={}/$SLURM_JOB_ID\n\
             export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log\n",
            dir.display()
        );
        let start = format!("#!/bin/sh\n{variables}mkdir -p $mps/pipe $mps/log\n{control} -d\n");
        let stop = format!("#!/bin/sh\n{variables}echo quit | {control}\nrm -rf $mps\n");
        let hook = |name: &str, body: &str| put(&dir.join(name), body);
        let (prolog, epilog) = (hook("prolog", &start), hook("epilog", &stop));
        Self { prolog, epilog, slurm_conf: PathBuf::new(), comment: None }
    }

    /// Runs a hook for a job on a GPU, as slurmd does.
    fn run(&self, hook: &Path, host: &Host, job: u32, gpu: usize) {
        let uid = if nix::unistd::geteuid().is_root() { ALICE.uid } else { nix::unistd::geteuid().as_raw() };
        let mut command = Command::new(hook);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // The simulated programs find their host through these variables. gpush's hooks do not read
        // these variables.
        command.envs(host.env());
        command.env_remove("PATH").env("SLURM_CONF", &self.slurm_conf).env("SLURM_CLUSTER_NAME", "bench");
        command.env("SLURMD_NODENAME", "n1").env("SLURM_JOB_ID", job.to_string()).env("SLURM_JOB_UID", uid.to_string());
        for name in ["SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"] {
            command.env(name, gpu.to_string());
        }
        if let Some(comment) = self.comment {
            command.env("SLURM_JOB_COMMENT", comment);
        }
        let status = command.status().expect("a hook can be started");
        assert!(status.success(), "{} of job {job}: {status}", hook.display());
    }

    /// Runs Prolog and Epilog of a job, and calls `check` between them. Returns the total duration
    /// of the two hooks in seconds.
    fn job(&self, host: &Host, job: u32, gpu: usize, check: impl FnOnce()) -> f64 {
        let begun = Instant::now();
        self.run(&self.prolog, host, job, gpu);
        let prolog = begun.elapsed();
        check();
        let begun = Instant::now();
        self.run(&self.epilog, host, job, gpu);
        (prolog + begun.elapsed()).as_secs_f64()
    }
}

/// Writes a script.
fn put(path: &Path, text: &str) -> PathBuf {
    fs::write(path, text).expect("a script can be written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("an executable script");
    path.to_owned()
}

/// Writes a hook of gpush as the package contains it: the interpreter of the script is the program of the hooks.
fn packaged(host: &Host, dir: &Path, verb: &str) -> PathBuf {
    let (program, link) = (program("gpush-slurm-hook"), dir.join("hook"));
    if !link.exists() {
        symlink(&program, &link).expect("a link");
    }
    let line = script(host, dir, verb).replace("exec ", "#!").replace('\'', "");
    let line = line.replace(&program.display().to_string(), &link.display().to_string());
    // The kernel reads at most 255 bytes of the first line.
    assert!(line.len() < 255, "{line}");
    put(&dir.join(format!("gpush-{verb}")), &line)
}

/// A node with a running gpushd.
struct Node {
    agent: Agent,
    host: Host,
    next: Cell<u32>,
}

impl Node {
    fn start(config: &str) -> Self {
        let host = Host::up(HOST);
        let agent = Setup::on(&host).env("GPUSH_LOG", "info").config(config).start();
        agent.wait_for_layouts_at_start();
        Self { agent, host, next: Cell::new(1) }
    }

    /// Returns the first id of `count` new jobs.
    fn ids(&self, count: usize) -> u32 {
        let first = self.next.get();
        self.next.set(first + u32::try_from(count).expect("a small number"));
        first
    }

    /// Returns the duration of the hooks of a job on GPU 0, in seconds.
    fn job(&self, hooks: &Hooks) -> f64 {
        hooks.job(&self.host, self.ids(1), 0, || ())
    }

    /// Returns the number of leases that have not ended.
    fn leases(&self) -> usize {
        let leases = self.agent.get("/v1/leases").json();
        leases.as_array().expect("a list").iter().filter(|lease| lease["state"] != "ended").count()
    }

    /// Checks that Prolog grants a lease and Epilog ends it. Returns the number of durable commits
    /// of a job.
    fn commits_of_a_job(&self, hooks: &Hooks) -> usize {
        let wal = Setup::on(&self.host).state_dir().join("gpush.db-wal");
        let before = commits(&wal);
        hooks.job(&self.host, self.ids(1), 0, || assert_eq!(self.leases(), 1, "Prolog grants a lease"));
        assert_eq!(self.leases(), 0, "Epilog ends the lease");
        commits(&wal) - before
    }

    /// Runs [`AT_ONCE`] jobs at the same time, each on a separate GPU. Returns the durations of
    /// their hooks in seconds. Each round runs every kind of hooks.
    fn at_once(&self, kinds: &[&Hooks]) -> Vec<Vec<f64>> {
        let mut all = vec![Vec::new(); kinds.len()];
        for _ in 0..ROUNDS {
            for (kind, times) in kinds.iter().zip(&mut all) {
                let (first, barrier, host) = (self.ids(AT_ONCE), Barrier::new(AT_ONCE), &self.host);
                thread::scope(|scope| {
                    let one = |(gpu, job)| {
                        let barrier = &barrier;
                        scope.spawn(move || {
                            barrier.wait();
                            kind.job(host, job, gpu, || ())
                        })
                    };
                    let jobs: Vec<_> = (0..AT_ONCE).zip(first..).map(one).collect();
                    times.extend(jobs.into_iter().map(|job| job.join().expect("a job")));
                });
            }
        }
        all
    }
}

/// Returns the number of commits in a write-ahead log of SQLite. Only the last frame of a commit
/// has the size of the database.
fn commits(wal: &Path) -> usize {
    let bytes = fs::read(wal).expect("a write-ahead log");
    let word =
        |at: usize| bytes.get(at..at + 4).map_or(0, |word| u32::from_be_bytes(word.try_into().expect("4 bytes")));
    let frame = 24 + word(8) as usize;
    let frames = (32..bytes.len()).step_by(frame).take_while(|at| bytes.get(at + 8..at + 16) == bytes.get(16..24));
    frames.filter(|at| word(at + 4) > 0).count()
}

/// Medians in seconds.
struct Figures {
    commits: usize,
    commit: f64,
    alone: [f64; 2],
    at_once: [f64; 2],
}

/// Measures jobs with whole GPUs.
fn whole() -> Figures {
    let node = Node::start(WHOLE);
    let (none, ours) = (Hooks::none(), Hooks::of(&node.host, None));
    let plain = Plain::open(&node.host);
    // The first Prolog also writes the list of Slurm's GPUs, so run it before the measurement.
    node.job(&ours);
    let commits = node.commits_of_a_job(&ours);
    let (mut bare, mut with, mut commit) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..JOBS {
        commit.push(plain.commit());
        bare.push(node.job(&none));
        with.push(node.job(&ours));
    }
    let mut at_once = node.at_once(&[&none, &ours]).into_iter().map(median);
    let mut next = || at_once.next().expect("both kinds");
    Figures { commits, commit: median(commit), alone: [median(bare), median(with)], at_once: [next(), next()] }
}

/// Results for jobs with a share of an MPS daemon: the additional seconds of the hooks, compared
/// with hooks that do nothing (medians).
struct MpsFigures {
    /// One job, and concurrent jobs, while the daemon runs.
    running: [f64; 2],
    /// One job whose Prolog runs while the daemon starts.
    cold: f64,
    /// One job, and concurrent jobs, with the usual hooks of a site without gpush.
    by_hand: [f64; 2],
    /// Whether the daemons are NVIDIA's.
    is_real: bool,
}

/// Measures jobs with MPS.
fn mps() -> MpsFigures {
    let host = Host::up(HOST);
    let real = real_programs(&host, "hooks with NVIDIA's own control daemon");
    let programs = real.clone().unwrap_or_else(|| host.dir().join("bin"));
    let setup = Setup::on(&host).env("GPUSH_LOG", "info").config(MPS);
    let agent = setup.env("GPUSH_MPS_PROGRAMS", programs.display().to_string()).start();
    for gpu in 0..AT_ONCE {
        reaches(&agent, &gpu.to_string(), MpsState::Ready);
    }
    let node = Node { agent, host, next: Cell::new(1) };
    let (none, ours) = (Hooks::none(), Hooks::of(&node.host, Some(SHARE)));
    let by_hand = Hooks::by_hand(&node.host, &programs);
    node.job(&ours);
    let _commits = node.commits_of_a_job(&ours);
    let (mut bare, mut with, mut hand, mut cold) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..JOBS {
        bare.push(node.job(&none));
        with.push(node.job(&ours));
        hand.push(node.job(&by_hand));
    }
    for _ in 0..COLD {
        assert_eq!(act(&node.agent, "0", "stop", &json!({})).status, 200);
        reaches(&node.agent, "0", MpsState::Stopped);
        let begun = Instant::now();
        assert_eq!(act(&node.agent, "0", "start", &json!({})).status, 200);
        let start = begun.elapsed().as_secs_f64();
        let is_starting = daemon(&node.agent, "0").state != MpsState::Ready;
        let took = node.job(&ours);
        if is_starting {
            cold.push(start + took);
        }
    }
    let bare = median(bare);
    let at_once: Vec<f64> = node.at_once(&[&none, &ours, &by_hand]).into_iter().map(median).collect();
    MpsFigures {
        running: [median(with) - bare, at_once[1] - at_once[0]],
        cold: median(cold) - bare,
        by_hand: [median(hand) - bare, at_once[2] - at_once[0]],
        is_real: real.is_some(),
    }
}

/// Returns the additional seconds of gpush's hooks for jobs of a real Slurm, compared with hooks
/// that do nothing: for one job, and for concurrent jobs. The same script calls both kinds of hooks
/// and records their durations.
fn in_slurm() -> Option<[f64; 2]> {
    let site = Site::start(HOST, WHOLE, |setup, host, _| {
        let conf = format!("AutoDetect=off\nName=gpu File={}/nvidia[0-7]\n", setup.devices().display());
        let dir = setup.dir().to_owned();
        let mut setup = setup.gres("gpu", "gpu:8", &conf);
        for (key, verb) in [("Prolog", "prolog"), ("Epilog", "epilog")] {
            let hook = packaged(host, &dir, verb);
            let timed = dir.join(format!("timed-{verb}"));
            let body = format!(
                "#!/bin/bash\nbegun=$EPOCHREALTIME\ncase $SLURM_JOB_COMMENT in\nnone) /bin/true ;;\n*) '{}' ;;\nesac\n\
                 status=$?\necho \"$SLURM_JOB_ID $SLURM_JOB_COMMENT $begun $EPOCHREALTIME\" >> '{}'\nexit $status\n",
                hook.display(),
                dir.join("took").display()
            );
            put(&timed, &body);
            setup = setup.hook(key, &format!("exec '{}'\n", timed.display()));
        }
        setup
    })?;
    let took = |jobs: usize| {
        let mut jobs_of = [Vec::new(), Vec::new()];
        for _ in 0..REAL {
            for (comment, all) in ["none", "ours"].into_iter().zip(&mut jobs_of) {
                let comment = format!("--comment={comment}");
                let ids: Vec<_> = (0..jobs)
                    .map(|_| site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--hold", &comment], "true"))
                    .collect();
                let names: Vec<String> = ids.iter().map(ToString::to_string).collect();
                site.cluster.run("scontrol", &["release", &names.join(",")]);
                for id in &ids {
                    let ended = site.cluster.ended(*id);
                    assert_eq!(ended.state, "COMPLETED", "{}", ended.output);
                }
                let text = fs::read_to_string(site.cluster.dir().join("took")).expect("times");
                for name in names {
                    let lines = text.lines().filter_map(|line| line.strip_prefix(&name)?.strip_prefix(' '));
                    let hooks: Vec<f64> = lines.map(seconds).collect();
                    assert_eq!(hooks.len(), 2, "job {name} has Prolog and Epilog: {text}");
                    all.push(hooks.iter().sum());
                }
            }
        }
        let [none, ours] = jobs_of.map(median);
        ours - none
    };
    let figures = [took(1), took(AT_ONCE)];
    site.assert_clean();
    Some(figures)
}

/// Returns the difference between the last two words of a line, which are times in seconds.
fn seconds(line: &str) -> f64 {
    let mut words = line.split(' ').rev().map(|word| word.parse::<f64>().expect("seconds"));
    let mut next = || words.next().expect("two times");
    let (end, begin) = (next(), next());
    end - begin
}

/// Measures the cost of the hooks.
pub(crate) fn run() -> Report {
    let mut report = Report::new(
        "Slurm's hooks",
        &format!(
            "Each time is the sum of the Prolog and the Epilog of a job, in ms. The benchmark calls the hooks as slurmd calls \
             them. For comparison, it also runs `/bin/true` as both hooks, in alternation. `beyond` is the time \
             minus the time of `/bin/true`. The table shows medians of {JOBS} jobs alone, and of {ROUNDS} rounds of {AT_ONCE} jobs at \
             once.\n\
             - **Plain commits:** the durable commits of a job, as synced commits to a plain SQLite database on the \
             same file system.\n\
             - **MPS, while the daemon starts:** the time begins with the request to start the daemon.\n\
             - **The usual hooks** start nvidia-cuda-mps-control in a shell Prolog, and end it in Epilog. They set no \
             limit, and do not check for other users.\n\
             - **Jobs of Slurm** are jobs of a real Slurm ({REAL} jobs, and {REAL} rounds). A script around the hooks \
             records the times."
        ),
        &["", "alone", "beyond", &format!("{AT_ONCE} at once"), "beyond"],
    );
    let Figures { commits, commit, alone, at_once } = whole();
    let mps = mps();
    let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let durable = commit * commits as f64;
    let empty = String::new;
    let whose = if mps.is_real { "NVIDIA's" } else { "the simulated" };
    report.rows = vec![
        vec![format!("{commits} plain commits"), format!("{:.2}", durable * 1e3), empty(), empty(), empty()],
        vec!["`/bin/true`".to_owned(), ms(alone[0]), "0".to_owned(), ms(at_once[0]), "0".to_owned()],
        vec![
            "gpush, a whole GPU".to_owned(),
            ms(alone[1]),
            ms(alone[1] - alone[0]),
            ms(at_once[1]),
            ms(at_once[1] - at_once[0]),
        ],
    ];
    let mut beyond = |what: String, alone: f64, at_once: Option<f64>| {
        report.rows.push(vec![what, empty(), ms(alone), empty(), at_once.map(ms).unwrap_or_default()]);
    };
    beyond(format!("gpush, a share of {whose} MPS daemon"), mps.running[0], Some(mps.running[1]));
    beyond("gpush, MPS, while the daemon starts".to_owned(), mps.cold, None);
    beyond(format!("the usual hooks, {whose} MPS daemon"), mps.by_hand[0], Some(mps.by_hand[1]));
    if let Some([alone, at_once]) = in_slurm() {
        beyond("gpush, a whole GPU, in jobs of Slurm".to_owned(), alone, Some(at_once));
    }
    let most = durable + 0.015;
    let wanted = format!("at most {} ms: its commits + 15 ms", ms(most));
    // Jobs at once share the processor, so the goal is their time one after the other, divided by the number of cores.
    let share = AT_ONCE.div_ceil(thread::available_parallelism().map_or(1, usize::from));
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let at_once_most = |alone: f64| alone * share as f64 * 1.25;
    for (what, alone, together) in [
        ("Prolog and Epilog", alone[1] - alone[0], at_once[1] - at_once[0]),
        ("Prolog and Epilog with MPS", mps.running[0], mps.running[1]),
    ] {
        report.target(&format!("{what} of a job"), &wanted, &format!("{} ms", ms(alone)), alone <= most);
        let (what, most) = (format!("{what} of {AT_ONCE} jobs at once"), at_once_most(alone));
        let wanted = format!("at most {} ms: 1.25 times {share} jobs one after the other", ms(most));
        report.target(&what, &wanted, &format!("{} ms", ms(together)), together <= most);
    }
    report
}
