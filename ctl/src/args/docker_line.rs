//! Rewrites `run --gpus all ubuntu nvidia-smi`: the user typed the options of `docker run` after `gpushctl run`.

use super::{typed, words::is_number};

/// Options of `docker run` that `gpushctl run` does not have, and that users type most.
const OF_DOCKER: [&str; 5] = ["--rm", "-it", "-ti", "--interactive", "--tty"];

/// Options of `docker run` with a value.
const OF_DOCKER_WITH_VALUE: [&str; 14] = [
    "-v",
    "--volume",
    "--mount",
    "-e",
    "--env",
    "--env-file",
    "-w",
    "--workdir",
    "-u",
    "--user",
    "--name",
    "--shm-size",
    "--network",
    "--entrypoint",
];

/// Options of `gpushctl run` that describe the share, with a value.
const WITH_VALUE: [&str; 8] = ["--mig", "--mps", "--memory", "--slices", "--for", "--count", "--gpu", "-g"];

/// Options of `gpushctl run` that describe the share, without a value.
const WITHOUT_VALUE: [&str; 3] = ["--whole", "--timeslice", "--wait"];

/// Names of images without a registry or a tag that users type most.
const IMAGES: [&str; 10] =
    ["ubuntu", "debian", "alpine", "fedora", "centos", "rockylinux", "busybox", "pytorch", "tensorflow", "nvidia"];

/// Returns the words after `run`, if the words have the form of `docker run`. The words are those after `run`.
pub(super) fn rewritten(words: &[&str]) -> Option<Vec<String>> {
    if words.contains(&"--") {
        return None;
    }
    let (mut share, mut docker) = (Vec::new(), Vec::new());
    let (mut program, mut is_of_docker, mut names_gpus) = ("docker", false, false);
    let (mut image, mut at) = (None, 0);
    while let Some(word) = words.get(at) {
        let next = words.get(at + 1).copied();
        at += 1;
        match word.split_once('=').filter(|(name, _)| *name == "--gpus") {
            Some((_, value)) => {
                names_gpus = true;
                share.extend(of_gpus(value)?);
            }
            None if *word == "--gpus" => {
                names_gpus = true;
                share.extend(of_gpus(next?)?);
                at += 1;
            }
            None if WITH_VALUE.contains(word) => {
                share.extend([(*word).to_owned(), next?.to_owned()]);
                at += 1;
            }
            None if WITHOUT_VALUE.contains(word) => share.push((*word).to_owned()),
            None if OF_DOCKER.contains(word) => {
                is_of_docker = true;
                docker.push(*word);
            }
            None if OF_DOCKER_WITH_VALUE.contains(word) => {
                docker.extend([*word, next?]);
                at += 1;
            }
            None if word.starts_with('-') => docker.push(word),
            // `run docker run …`: the same options, with the command that they belong to.
            None if matches!(*word, "docker" | "podman") && next == Some("run") && docker.is_empty() => {
                program = *word;
                is_of_docker = true;
                at += 1;
            }
            None => {
                image = Some(*word);
                docker.extend(&words[at - 1..]);
                break;
            }
        }
    }
    let image = image?;
    if !(is_of_docker || (names_gpus && is_image(image))) || is_program(image) {
        return None;
    }
    if has_other_share(&share) {
        share.retain(|word| word != "--whole");
    }
    let options = if docker.contains(&"--rm") { "" } else { "--rm " };
    let arguments = typed::command_line(docker.iter().copied())?;
    let script = format!(r#"{program} run {options}--gpus "\"device=$CUDA_VISIBLE_DEVICES\"" {arguments}"#);
    let command = ["--", "sh", "-c", &script].map(str::to_owned);
    Some(share.into_iter().chain(command).collect())
}

/// Returns the share for a value of `--gpus`: `all`, a number, or `device=0,1`.
fn of_gpus(value: &str) -> Option<Vec<String>> {
    let value = value.trim_matches(['"', '\'']);
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    if let Some(devices) = value.strip_prefix("device=") {
        let count = devices.split(',').count().to_string();
        let mut found = owned(&["--whole"]);
        found.extend(if count == "1" { Vec::new() } else { owned(&["--count", &count]) });
        found.extend(owned(&["-g", devices]));
        return Some(found);
    }
    match value {
        "all" | "1" => Some(owned(&["--whole"])),
        number if is_number(number) && number != "0" => Some(owned(&["--whole", "--count", number])),
        _ => None,
    }
}

/// Returns whether the words name a share other than a whole GPU.
fn has_other_share(share: &[String]) -> bool {
    share.iter().any(|word| matches!(word.as_str(), "--mig" | "--mps" | "--memory" | "--slices" | "--timeslice"))
}

fn is_image(word: &str) -> bool {
    IMAGES.contains(&word) || word.contains(':') || (word.contains('/') && !word.starts_with(['.', '/', '~']))
}

/// Returns whether a word is a program rather than an image: a path, or an interpreter.
fn is_program(word: &str) -> bool {
    word.starts_with(['.', '/', '~']) || word.starts_with("python") || matches!(word, "bash" | "sh" | "nvidia-smi")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &str) -> Option<String> {
        let words: Vec<&str> = words.split(' ').collect();
        rewritten(&words).map(|words| words.join(" "))
    }

    #[test]
    fn options_of_docker_run_lead_to_docker_in_a_lease() {
        for (typed, share, arguments) in [
            ("--gpus all ubuntu nvidia-smi", "--whole", "ubuntu nvidia-smi"),
            (
                "--gpus=2 nvcr.io/nvidia/pytorch:24.05 python x.py",
                "--whole --count 2",
                "nvcr.io/nvidia/pytorch:24.05 python x.py",
            ),
            ("--gpus device=0 alpine", "--whole -g 0", "alpine"),
            ("--gpus 1 --mig 1g.10gb ubuntu", "--mig 1g.10gb", "ubuntu"),
        ] {
            let script = format!(r#"docker run --rm --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" {arguments}"#);
            assert_eq!(line(typed), Some(format!("{share} -- sh -c {script}")), "{typed}");
        }
        for typed in ["docker run -it --gpus all ubuntu nvidia-smi", "--whole docker run -it ubuntu nvidia-smi"] {
            let script = r#"docker run --rm --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" -it ubuntu nvidia-smi"#;
            assert_eq!(line(typed), Some(format!("--whole -- sh -c {script}")), "{typed}");
        }
        let script = r#"docker run --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" --rm -it ubuntu nvidia-smi"#;
        let typed = r#"--rm -it --gpus "device=0" ubuntu nvidia-smi"#;
        assert_eq!(line(typed), Some(format!("--whole -g 0 -- sh -c {script}")));
    }

    #[test]
    fn command_without_an_image_does_not_lead_to_docker() {
        for typed in
            ["--gpus 2 python x.py", "--gpus all ./x", "--gpus 1 true", "--rm -it --whole -- true", "--gpus", "1/4 ./x"]
        {
            assert_eq!(line(typed), None, "{typed}");
        }
    }
}
