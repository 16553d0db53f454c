//! Many jobs, and many tasks.

use gpush_tests::slurm::{ALICE, BOB, Setup, Site};

use super::{HOST, TIMESLICE, WHOLE, completed};

/// Two shards for each GPU, so that eight jobs run at a time.
fn shards(setup: Setup) -> Setup {
    let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=8\n", setup.devices().display());
    setup.gres("gpu,shard", "gpu:4,shard:8", &conf)
}

#[test]
fn two_hundred_jobs_of_two_users_leave_nothing() {
    let Some(site) = Site::start(HOST, TIMESLICE, |setup, _, _| shards(setup)) else { return };
    let cluster = &site.cluster;
    for user in [ALICE, BOB] {
        let arguments = ["--array=1-100%4", "--gres=shard:1", "--comment=gpush:timeslice"];
        let _array = cluster.sbatch(user, &arguments, "echo \"$GPUSH_LEASE $CUDA_VISIBLE_DEVICES\"");
    }
    let mut most = 0;
    let mut ended = (std::time::Instant::now(), usize::MAX);
    // No limit for all jobs together: the machine may be busy. Each minute one must end.
    loop {
        let left = cluster.run("squeue", &["-h", "-r", "-o", "%i"]).lines().count();
        most = most.max(site.leases().len());
        if left == 0 {
            break;
        }
        if left < ended.1 {
            ended = (std::time::Instant::now(), left);
        }
        assert!(ended.0.elapsed() < gpush_tests::agent::PATIENCE, "{left} jobs do not end\n{}", cluster.logs());
        cluster.assert_never_drained();
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let outputs: Vec<String> = std::fs::read_dir(cluster.dir().join("out"))
        .expect("output")
        .flatten()
        .map(|entry| std::fs::read_to_string(entry.path()).expect("output"))
        .collect();
    let leased = outputs.iter().filter(|text| text.starts_with('L') && text.contains("GPU-")).count();
    assert_eq!((leased, outputs.len()), (200, 200), "{outputs:?}");
    assert!(most > 1, "never more than {most} leases at a time");
    site.assert_clean();
}

/// TaskProlog needs no gpushd.
#[test]
fn each_of_128_tasks_gets_the_environment_without_gpushd() {
    let config = format!("[slurm]\nagent_down = \"pass\"\n{WHOLE}");
    let Some(mut site) = Site::start(HOST, &config, |setup, _, _| setup) else { return };
    let (ready, go) = (site.cluster.dir().join("out/ready"), site.cluster.dir().join("go"));
    let script = format!(
        "touch '{}'; while [ ! -e '{}' ]; do sleep 0.1; done; srun -n 128 sh -c 'echo task $GPUSH_LEASE'",
        ready.display(),
        go.display()
    );
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "-n128"], &script);
    site.cluster.until("running job", || ready.exists().then_some(()));
    let lease = site.leases()[0].id;
    site.restart_agent(|site| {
        std::fs::write(&go, "").expect("a file");
        let all = || site.cluster.output_of(job).lines().filter(|line| *line == format!("task {lease}")).count() == 128;
        site.cluster.until("128 tasks", || all().then_some(()));
    });
    completed(site.cluster.ended(job));
    // If Epilog did not reach gpushd, the next hook delivers the end of the job.
    completed(site.cluster.run_job(BOB, &["--gres=gpu:1"], "true"));
    site.assert_clean();
}
