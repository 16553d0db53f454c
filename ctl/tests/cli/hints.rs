//! Hints for command lines that gpushctl refuses. They name only what the caller may lease on the host.

use gpush_api::{Gpu, LeaseKind, Mode, QuotaView};

use crate::support::{Agent, Answer, Host};

/// Starts an agent for a host with these modes. GPUs in mode `mig` have a dynamic layout.
fn agent(host: &Host, modes: &[Mode], allowed_kinds: Option<&[LeaseKind]>) -> Agent {
    let mut gpus: Vec<Gpu> = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(modes.len());
    for (gpu, mode) in gpus.iter_mut().zip(modes) {
        gpu.mode = *mode;
        gpu.layout = (*mode == Mode::Mig).then(|| vec!["dynamic".to_owned()]);
    }
    let quota = QuotaView {
        uid: 1000,
        user: None,
        quota: None,
        ignored_quotas: Vec::new(),
        allowed_kinds: allowed_kinds.map(<[LeaseKind]>::to_vec),
        allowed_gpus: None,
        closed_gpus: Vec::new(),
        slurm_gpus: Vec::new(),
        longest_s: None,
        default_request: None,
        limits: Vec::new(),
    };
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/quotas" => Answer::ok(&[&quota]),
        _ => Answer::ok(&gpus),
    })
}

fn hint(host: &Host, typed: &str) -> String {
    let words: Vec<&str> = typed.split(' ').collect();
    let output = host.command(&words).env("COLUMNS", "300").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let hint = text.split_once("hint: ").map_or("", |(_, hint)| hint).trim_end();
    hint.replace("did you mean `gpushctl ", "`")
}

#[test]
fn hints_name_only_what_the_caller_may_lease() {
    let two = [Mode::Mig, Mode::Mps, Mode::Exclusive];
    let only_mig = [LeaseKind::Mig, LeaseKind::Timeslice];
    for (modes, kinds, typed, expected) in [
        (&two[..], None, "run true", "`run --mig 1g.10gb -- true`? This host also has `--mps 25` or `--whole`"),
        (&two, Some(&only_mig[..]), "run true", "`run -- true`?"),
        (
            &two,
            Some(&only_mig),
            "run --gpus 1 true",
            "`run --mig 1g.10gb -- true`? You cannot lease a whole GPU on this host",
        ),
        (&two, None, "run --gpus 1 true", "`run --whole -- true`?"),
        (
            &two[..2],
            None,
            "srun --gres=gpu:2 ./x",
            "`run --mig 1g.10gb --count 2 -- ./x`? You cannot lease a whole GPU on this host",
        ),
        (&two[1..2], None, "run --exclusive ./x", "`run --mps 25 -- ./x`? You cannot lease a whole GPU on this host"),
        (&two[1..], None, "salloc", "`run --mps 25 -- COMMAND`? This host also has `--whole`"),
        (&two[..2], None, "run", "`run --mig 1g.10gb -- COMMAND`? This host also has `--mps 25`"),
        (&two, None, "run --mig -- ./x", "`run --mig 1g.10gb -- ./x`?"),
        (&two, None, "mig destroy all", "`mig apply none -g 0`?"),
    ] {
        let host = Host::new();
        agent(&host, modes, kinds);
        assert_eq!(hint(&host, typed), expected, "{typed}");
    }
}

/// Fault: `gpushctl` without a command printed another page than `gpushctl --help`.
#[test]
fn group_without_a_command_prints_its_help() {
    let host = Host::new();
    for group in [&[][..], &["maintenance"], &["slurm"]] {
        let bare = host.command(group).output().unwrap();
        let help = host.command(&[group, &["--help"]].concat()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&bare.stderr), String::from_utf8_lossy(&help.stdout), "{group:?}");
        assert_eq!((bare.status.code(), help.status.code()), (Some(2), Some(0)), "{group:?}");
    }
}
