//! Tests of the Slurm cluster that the other tests use, with trivial hooks.

use gpush_tests::slurm::{ALICE, BOB, Cluster, Setup};

/// Sets up hooks that record what Slurm passes to them. Prolog fails if the file `fail` exists.
fn recording() -> Option<Setup> {
    let setup = Setup::new()?;
    let seen = setup.dir().join("seen").display().to_string();
    let record = |hook: &str| format!("echo \"{hook} $SLURM_JOB_ID $SLURM_JOB_UID $SLURM_JOB_GPUS\" >> '{seen}'\n");
    let fail = format!("[ ! -e '{}' ] || exit 1\n", setup.dir().join("fail").display());
    let (prolog, epilog) = (fail + &record("prolog"), record("epilog"));
    Some(setup.hook("Prolog", &prolog).hook("Epilog", &epilog).hook("TaskProlog", "echo 'export TASK_PROLOG=yes'\n"))
}

#[test]
fn job_runs_between_hooks_and_failing_prolog_drains_the_node() {
    let Some(setup) = recording() else { return };
    let cluster = setup.start();
    let first = cluster.sbatch(ALICE, &["--gres=gpu:2"], "id -u; echo TASK_PROLOG=$TASK_PROLOG");
    let ended = cluster.ended(first);
    assert_eq!((ended.state.as_str(), ended.output.as_str()), ("COMPLETED", "65534\nTASK_PROLOG=yes\n"));
    let second = cluster.sbatch(BOB, &["--gres=gpu:1"], "exit 3");
    assert_eq!(cluster.ended(second).state, "FAILED");
    let seen = std::fs::read_to_string(cluster.dir().join("seen")).expect("the hooks ran");
    let expected: Vec<String> = [(first, 65534, "0,1"), (second, 5, "0")]
        .iter()
        .flat_map(|(job, uid, gpus)| ["prolog", "epilog"].map(|hook| format!("{hook} {job} {uid} {gpus}")))
        .collect();
    assert_eq!(seen.lines().collect::<Vec<_>>(), expected);
    cluster.assert_never_drained();
    failing_prolog_drains_the_node(&cluster);
}

/// The other tests check that no node was drained. This step shows that this check can fail.
fn failing_prolog_drains_the_node(cluster: &Cluster) {
    std::fs::write(cluster.dir().join("fail"), "").expect("a file");
    let job = cluster.sbatch(ALICE, &["--gres=gpu:1"], "true");
    cluster.until("drained node", || (!cluster.drain_reasons().is_empty()).then_some(()));
    assert_eq!(cluster.drain_reasons(), ["Prolog error"]);
    cluster.run("scancel", &[&job.to_string()]);
    let drained = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cluster.assert_never_drained()));
    assert!(drained.is_err());
}
