//! The command of Slurm for a request that gpushctl would refuse, because only Slurm jobs can lease the GPUs.

use gpush_core::duration;

use super::{typed, words::is_number};

/// Returns the hint for a command line of gpushctl that requests a share: the command of Slurm that means the same.
pub(super) fn hint(words: &[String], remark: &str) -> String {
    let why = "Only Slurm jobs can lease the GPUs of this host";
    let job = job(words);
    match typed::command_line(job.iter().map(String::as_str)) {
        Some(line) => format!("did you mean `{line}`? {why}.{remark}"),
        None => format!("submit a job with `sbatch` or `srun`. {why}"),
    }
}

/// Returns the words of the command of Slurm.
fn job(words: &[String]) -> Vec<String> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let (flags, command) = (&words[..end], words.get(end + 1..).unwrap_or_default());
    let value = |name: &str| {
        let at = flags.iter().position(|word| word.split('=').next() == Some(name))?;
        Some(flags[at].split_once('=').map_or(flags.get(at + 1).map_or("", String::as_str), |(_, value)| value))
    };
    let count = value("--count").filter(|count| is_number(count)).unwrap_or("1");
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
            let hint = hint(&words, "");
            let expected = format!("did you mean `{expected}`? Only Slurm jobs can lease the GPUs of this host.");
            assert_eq!(hint, expected, "{line}");
        }
    }
}
