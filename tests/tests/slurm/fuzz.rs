//! Invalid requests of users. A request must never drain a node.

use std::{
    os::unix::process::CommandExt,
    process::{Command, Output, Stdio},
};

use gpush_tests::{
    random::number,
    slurm::{ALICE, BOB, Site},
};

use super::{HOST, TIMESLICE};

/// Default number of requests that the test gives directly to the hooks. `GPUSH_TEST_SLURM_REQUESTS` sets another number.
const DIRECT: u64 = 150;

/// Number of requests that the test submits as jobs to Slurm.
const THROUGH_SLURM: usize = 16;

/// Texts that the test always tries, as comments. The first one is granted.
const TEXTS: [&str; 10] = [
    "gpush:timeslice",
    "",
    "gpush:mps=25,mps=25",
    "gpush:mig=../../etc",
    "gpush:mps=25;reboot",
    "a\nb gpush:memory=8G\nexport X=1",
    "gpush:whole gpush:mps=25",
    "\u{202e}gpush:mps=\u{661}",
    "gpush:mps=99999999999999999999",
    "mps-per-gpu",
];

const PIECES: [&str; 34] = [
    "gpush:",
    "gpush",
    "mps",
    "mps=",
    "=",
    ",",
    ":",
    "25",
    "-1",
    "250",
    "0",
    "1e9",
    "memory=",
    "8G",
    "mig=",
    "1g.10gb",
    "whole",
    "timeslice",
    "count=",
    "gpu=",
    "for=1h",
    "priority=",
    " ",
    "\n",
    "\r",
    "\t",
    "$(touch /gpush-fuzz)",
    "`id`",
    "'; exit 1; '",
    "\"",
    "\\",
    "é",
    "\u{202e}",
    "\u{1f4a5}",
];

fn text(rng: &mut fastrand::Rng) -> String {
    let mut text = String::new();
    if rng.usize(..3) > 0 {
        text.push_str("gpush:");
    }
    for _ in 0..rng.usize(..8) {
        text.push_str(PIECES[rng.usize(..PIECES.len())]);
    }
    if rng.usize(..60) == 0 {
        text = text.repeat(20_000 / text.len().max(1) + 1);
    }
    text
}

fn hook(site: &Site, verb: &str, job: usize, comment: Option<&str>, option: Option<&str>) -> Output {
    let mut command = Command::new(site.cluster.dir().join(verb));
    if verb == "taskprolog" {
        command.uid(ALICE.uid).gid(ALICE.gid).current_dir("/");
    }
    command.env_clear().stdin(Stdio::null()).env("SLURM_JOB_ID", (1_000_000 + job).to_string());
    command.env("SLURM_JOB_UID", ALICE.uid.to_string()).env("SLURM_CLUSTER_NAME", "ci").env("SLURMD_NODENAME", "n1");
    command.env("SLURM_JOB_GPUS", (job % 4).to_string()).env("CUDA_VISIBLE_DEVICES", (job % 4).to_string());
    command.env("SLURM_CONF", site.cluster.slurm_conf());
    if let Some(comment) = comment {
        command.env("SLURM_JOB_COMMENT", comment);
    }
    if let Some(option) = option {
        command.env("SPANK__SLURM_SPANK_OPTION_gpush_gpush", option);
    }
    command.output().expect("a hook can be started")
}

#[test]
fn random_requests_drain_no_node() {
    let Some(site) = Site::start(HOST, TIMESLICE, |setup, _, _| setup) else { return };
    let mut rng = fastrand::Rng::with_seed(16);
    let (mut refused, direct) = (0, usize::try_from(number("GPUSH_TEST_SLURM_REQUESTS", DIRECT)).expect("a number"));
    for job in 0..direct {
        let request = TEXTS.get(job).map_or_else(|| text(&mut rng), |text| (*text).to_owned());
        let (comment, option) =
            if job < TEXTS.len() || rng.usize(..2) == 0 { (Some(&request), None) } else { (None, Some(&request)) };
        let (comment, option) = (comment.map(String::as_str), option.map(String::as_str));
        let prolog = hook(&site, "prolog", job, comment, option);
        assert!(prolog.status.success() && prolog.stdout.is_empty(), "{request:?}: {prolog:?}");
        let line = String::from_utf8_lossy(&prolog.stderr);
        assert!(line.lines().count() <= 1 && line.chars().count() < 1100, "{request:?}: {line:?}");
        let task = hook(&site, "taskprolog", job, None, None);
        let lines = String::from_utf8(task.stdout.clone()).expect("UTF-8");
        let protocol = |line: &str| ["export ", "unset ", "print "].iter().any(|word| line.starts_with(word));
        assert!(task.stderr.is_empty() && lines.lines().all(protocol), "{request:?}: {task:?}");
        assert!(!lines.is_empty() && lines.ends_with('\n'), "{request:?}: a lease or a reason is printed: {task:?}");
        if !task.status.success() {
            refused += 1;
            assert!(lines.contains("print gpush: "), "{request:?}: {lines}");
        }
        let epilog = hook(&site, "epilog", job, comment, option);
        assert!(epilog.status.success() && epilog.stdout.is_empty(), "{request:?}: {epilog:?}");
    }
    assert!(refused > direct / 4 && refused < direct, "{refused} of {direct} are refused");
    assert!(!std::path::Path::new("/gpush-fuzz").exists());
    site.assert_clean();

    let mut jobs = Vec::new();
    for number in 0..THROUGH_SLURM {
        let comment = format!("--comment={}", text(&mut rng).replace('\0', ""));
        let user = if number % 2 == 0 { ALICE } else { BOB };
        // Slurm itself refuses some comments, for example if they are very long.
        jobs.extend(site.cluster.try_sbatch(user, &["--gres=gpu:1", &comment], "true"));
    }
    assert!(jobs.len() > THROUGH_SLURM / 2, "{} jobs were accepted", jobs.len());
    for job in jobs {
        let ended = site.cluster.ended(job);
        assert!(["COMPLETED", "FAILED"].contains(&ended.state.as_str()), "{ended:?}");
    }
    site.assert_clean();
}
