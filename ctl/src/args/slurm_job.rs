//! The command of Slurm for a request that gpushctl would refuse, because only Slurm jobs can lease the GPUs.

use gpush_core::duration;

use super::{typed, words::is_number};

/// Why the command is one of Slurm.
const WHY: &str = "Only Slurm jobs can lease the GPUs of this host";

/// Options of Slurm that allocate GPUs to a job.
const GPUS: [&str; 6] = ["--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"];

/// Returns the hint for `gpushctl sbatch job.sh`: the same line without `gpushctl`. Returns `None` if the words are not a
/// command of Slurm that submits a job.
pub(crate) fn as_typed(words: &[&str]) -> Option<String> {
    let at = words.iter().position(|word| !word.starts_with('-'))?;
    let submits = matches!(words[at], "sbatch" | "srun" | "salloc");
    let line = typed::command_line(words[at..].iter().copied()).filter(|_| submits)?;
    let names_gpus = words[at..].iter().any(|word| GPUS.contains(&word.split('=').next().unwrap_or_default()));
    let remark = match words[at] {
        _ if names_gpus => "",
        "sbatch" => " Add --gres=gpu:1, unless the script requests GPUs",
        _ => " Add --gres=gpu:1 for a GPU",
    };
    Some(format!("did you mean `{line}`? {WHY}.{remark}"))
}

/// Returns the hint for a command line of gpushctl that requests a share: the command of Slurm that means the same. The
/// job requests at most `gpus` GPUs, all that Slurm has on this host.
pub(super) fn hint(words: &[String], remark: &str, gpus: usize) -> String {
    let job = job(words, gpus);
    match typed::command_line(job.iter().map(String::as_str)) {
        Some(line) => format!("did you mean `{line}`? {WHY}.{remark}"),
        None => format!("submit a job with `sbatch` or `srun`. {WHY}"),
    }
}

/// Returns the words of the command of Slurm.
fn job(words: &[String], gpus: usize) -> Vec<String> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let (flags, command) = (&words[..end], words.get(end + 1..).unwrap_or_default());
    let value = |name: &str| {
        let at = flags.iter().position(|word| word.split('=').next() == Some(name))?;
        Some(flags[at].split_once('=').map_or(flags.get(at + 1).map_or("", String::as_str), |(_, value)| value))
    };
    let count = value("--count").and_then(|count| count.parse::<usize>().ok()).unwrap_or(1).clamp(1, gpus.max(1));
    let mut job = vec!["srun".to_owned(), format!("--gres=gpu:{count}")];
    let mut terms: Vec<String> = Vec::new();
    if let Some(request) = value("--request") {
        terms.push(request.to_owned());
    }
    if let Some(percentage) = value("--mps") {
        let percentage = percentage.trim_end_matches('%');
        terms.push(if is_number(percentage) { format!("mps={percentage}") } else { "mps".to_owned() });
    }
    terms.extend(value("--timeslice").map(|_| "timeslice".to_owned()));
    for (flag, key) in [("--mig", "mig"), ("--memory", "memory"), ("--slices", "slices"), ("--priority", "priority")] {
        terms.extend(value(flag).map(|value| format!("{key}={value}")));
    }
    if !terms.is_empty() {
        job.push(format!("--comment=gpush:{}", terms.join(",")));
    }
    // Slurm counts the time limit in minutes.
    if let Some(limit) = value("--for").and_then(|limit| duration::parse_positive(limit).ok()) {
        job.push(format!("--time={}", limit.as_secs().div_ceil(60)));
    }
    if command.is_empty() {
        job.push("COMMAND".to_owned());
    } else {
        job.extend_from_slice(command);
    }
    job
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_becomes_a_job_with_the_same_share() {
        for (line, expected) in [
            ("run --mps 25 -- python x.py", "srun --gres=gpu:1 --comment=gpush:mps=25 python x.py"),
            ("run --mps 50% --memory 8G -- ./x", "srun --gres=gpu:1 --comment=gpush:mps=50,memory=8G ./x"),
            ("run --mps -- ./x", "srun --gres=gpu:1 --comment=gpush:mps ./x"),
            ("run --timeslice -- ./x --mps", "srun --gres=gpu:1 --comment=gpush:timeslice ./x --mps"),
            ("run --whole --count 2 --for 90m -- ./x", "srun --gres=gpu:2 --time=90 ./x"),
            ("run --whole --count 5 -- ./x", "srun --gres=gpu:4 ./x"),
            ("run --mig 1g.10gb -- ./x", "srun --gres=gpu:1 --comment=gpush:mig=1g.10gb ./x"),
            ("lease request --memory=10G", "srun --gres=gpu:1 --comment=gpush:memory=10G COMMAND"),
            ("run -- ./x", "srun --gres=gpu:1 ./x"),
            ("run --memory 8G --slices 2 -- ./x", "srun --gres=gpu:1 --comment=gpush:memory=8G,slices=2 ./x"),
            (
                "run --mps 25 --priority below-normal -- ./x",
                "srun --gres=gpu:1 --comment=gpush:mps=25,priority=below-normal ./x",
            ),
            ("run --request mps=30 -- ./x", "srun --gres=gpu:1 --comment=gpush:mps=30 ./x"),
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let hint = hint(&words, "", 4);
            let expected = format!("did you mean `{expected}`? Only Slurm jobs can lease the GPUs of this host.");
            assert_eq!(hint, expected, "{line}");
        }
    }

    /// Fault: the hint for `gpushctl sbatch --gres=gpu:2 job.sh` was a command of gpushctl, or `srun bash job.sh`.
    #[test]
    fn command_of_slurm_is_the_same_without_gpushctl() {
        for (line, expected) in [
            ("sbatch --gres=gpu:2 job.sh", Some("did you mean `sbatch --gres=gpu:2 job.sh`?")),
            ("srun --mem=64G --gpus 1 ./x", Some("did you mean `srun --mem=64G --gpus 1 ./x`?")),
            ("sbatch job.sh", Some("Add --gres=gpu:1, unless the script requests GPUs")),
            ("salloc", Some("Add --gres=gpu:1 for a GPU")),
            ("squeue", None),
            ("run srun", None),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            let hint = as_typed(&words);
            assert_eq!(hint.is_some(), expected.is_some(), "{line}: {hint:?}");
            assert!(hint.unwrap_or_default().contains(expected.unwrap_or_default()), "{line}");
        }
    }
}
