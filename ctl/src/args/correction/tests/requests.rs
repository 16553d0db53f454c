//! Tests of corrections of lines that request a share.

use super::*;

#[test]
fn request_in_the_form_of_another_tool_is_rewritten() {
    assert_corrected(&[
        ("run --gpus=1 -- true", "run --whole -- true"),
        ("run --whole=2 ./x", "run --whole --count 2 -- ./x"),
        ("run --mps 25% ./x", "run --mps 25 -- ./x"),
        ("run 25% ./x", "run --mps 25 -- ./x"),
        ("run ./x --for 2h --whole", "run --for 2h --whole -- ./x"),
        ("run ./x --memory 8G", "run -- ./x --memory 8G"),
        ("srun -n 4 ./x", "run -- ./x"),
        ("sbatch --time=1-12:00:00 ./x", "run --for 1d12h -- ./x"),
        ("run --whole -t 30 ./x", "run --whole --for 30m -- ./x"),
        ("run --gpus=1", "run --whole -- COMMAND"),
        ("run --gpus", "run --whole -- COMMAND"),
        ("run 1g.10gb", "run --mig 1g.10gb -- COMMAND"),
        ("run --hours 2 --whole ./x", "run --for 2h --whole -- ./x"),
        ("run --gpus 2 -- true", "run --whole --count 2 -- true"),
        ("run --gpus all -- true", "run --whole -- true"),
        ("run --gpus 0 -- true", "run --whole -- true"),
        ("run --gpus-per-task 1 -- true", "run --whole -- true"),
        ("run --gres gpu:1 -- true", "run --whole -- true"),
        ("run --gres=gpu:a100:2 -- true", "run --whole --count 2 -- true"),
        ("run -t 2h --whole -- true", "run --for 2h --whole -- true"),
        ("run --whole --time 2h -- true", "run --whole --for 2h -- true"),
        ("run --whole --time 2 h -- true", "run --whole --for 2h -- true"),
        ("run --whole --time=02:30:00 -- true", "run --whole --for 2h30m -- true"),
        ("run --whole --until evening -- true", "run --whole --for 2h -- true"),
        ("run --gpus device=2,3 -- true", "run --whole --gpu 2,3 --count 2 -- true"),
        ("srun --mig 1g.10gb*2 ./x", "run --mig 1g.10gb --count 2 -- ./x"),
        ("run --whole --for 2 h -- true", "run --whole --for 2h -- true"),
        ("run --mem 8G -- true", "run --memory 8G -- true"),
        ("run --mem-per-gpu 8G -- true", "run --memory 8G -- true"),
        ("run --shared -- true", "run --mps -- true"),
        ("run --share 25 -- true", "run --mps 25 -- true"),
        ("run -it --rm --whole -- true", "run --whole -- true"),
        ("run --detach --whole -- true", "lease request --whole"),
        ("run --mig 1g.10gb -d ./x", "lease request --mig 1g.10gb"),
        ("srun --gres=gpu:1g.10gb:1 python x.py", "run --mig 1g.10gb -- python x.py"),
        ("srun --gres=gpu:1g.10gb:2 ./x", "run --mig 1g.10gb --count 2 -- ./x"),
        ("srun --gres=mps:25 ./x", "run --mps 25 -- ./x"),
        ("sbatch job.sh", "run -- bash job.sh"),
        ("run --mps 25 x.py", "run --mps 25 -- python3 x.py"),
        ("run --memory 8 GB ./x", "run --memory 8G -- ./x"),
        ("run --memory 8 GB -- ./x", "run --memory 8G -- ./x"),
        ("run -m 10G ./x", "run --memory 10G -- ./x"),
        ("run -mig 1g.10gb ./x", "run --mig 1g.10gb -- ./x"),
        ("run --timeslice=2 -- ./x", "run --timeslice -- ./x"),
        // The hint of the error replaces the placeholder by a profile of the host.
        ("run --mig python x.py", "run --mig PROFILE -- python x.py"),
        ("run --mig -- ./x", "run --mig PROFILE -- ./x"),
        ("run nvidia-smi -L", "run -- nvidia-smi -L"),
        ("run true", "run -- true"),
        ("run 1g.10gb python x.py", "run --mig 1g.10gb -- python x.py"),
        ("run python x.py --mig 1g.10gb", "run --mig 1g.10gb -- python x.py"),
        ("run --mps 50 25 -- true", "run --mps 50 -- true"),
        ("run --mps 25 --time 2h python x.py --time 3", "run --mps 25 --for 2h -- python x.py --time 3"),
        ("sbatch --gres=gpu:1 ./job.sh", "run --whole -- ./job.sh"),
        ("srun -p gpu --gpus 2 ./x", "run --whole --count 2 -- ./x"),
        ("salloc", "run -- COMMAND"),
        ("alloc 1g.10gb", "run --mig 1g.10gb -- COMMAND"),
        ("lease request --gpus 2 --time 2h", "lease request --whole --count 2 --for 2h"),
    ]);
}

/// Faults: these hints led to a command that was refused, or that did something else.
#[test]
fn request_of_another_tool_keeps_its_share() {
    let docker = r#"sh -c 'docker run --rm --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" ubuntu nvidia-smi'"#;
    assert_corrected(&[
        ("run --gpus 2 --mig 1g.10gb -- ./x", "run --count 2 --mig 1g.10gb -- ./x"),
        ("run --gpus 1 --mig 1g.10gb -- ./x", "run --mig 1g.10gb -- ./x"),
        ("run --gpus 2 --mps 25 -- ./x", "run --mps 25 -- ./x"),
        ("run --slice 1 -- ./x", "run --slices 1 -- ./x"),
        ("run FOO=1 python3 x.py", "run -- env FOO=1 python3 x.py"),
        ("run --slice 1g.10gb -- ./x", "run --mig 1g.10gb -- ./x"),
        ("run --gpus all ubuntu nvidia-smi", &format!("run --whole -- {docker}")),
    ]);
    let quoted = |command: &str| text(correction(&["run", "--mig", "1g.10gb", command], false)?);
    assert_eq!(quoted("python3 train.py").as_deref(), Some("gpushctl run --mig 1g.10gb -- python3 train.py"));
    let piped = "gpushctl run --mig 1g.10gb -- sh -c './x | tee log'";
    assert_eq!(quoted("./x | tee log").as_deref(), Some(piped));
}

/// Fault: the hint for an end at a time was always `--for 2h`.
#[test]
fn end_at_a_time_becomes_the_duration_until_then() {
    let end = (jiff::Zoned::now() + jiff::SignedDuration::from_hours(5)).strftime("%F %T%:z").to_string();
    for line in [&["run", "--whole", "--until", &end, "--", "true"][..], &["lease", "renew", "L3", "--until", &end]] {
        let Some(Meant::Gpushctl(words)) = correction(line, false) else { panic!("{line:?}") };
        let at = words.iter().position(|word| word == "--for").unwrap();
        assert_eq!(words[at + 1], "5h", "{words:?}");
    }
}
