//! Tests of corrections: each wrong command line has the command that it means.

mod requests;

use super::*;
use crate::args::typed;

fn corrected(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split(' ').collect();
    assert!(Cli::try_parse_from(&words).is_err(), "`{line}` is a command");
    text(correction(&words[1..], false)?)
}

fn text(meant: Meant) -> Option<String> {
    match meant {
        Meant::Gpushctl(words) => typed::command_line(["gpushctl"].into_iter().chain(words.iter().map(String::as_str))),
        Meant::Other(command) => Some(command),
    }
}

/// Checks the correction of each command line: what was typed, and what was meant.
fn assert_corrected(lines: &[(&str, &str)]) {
    for (typed, meant) in lines {
        assert_eq!(corrected(&format!("gpushctl {typed}")), Some(format!("gpushctl {meant}")), "{typed}");
    }
}

#[test]
fn command_without_its_group_is_completed() {
    assert_corrected(&[
        ("reset 3", "gpu reset 3"),
        ("drain 0-1 --reason fan", "gpu drain 0-1 --reason fan"),
        ("undrain 3", "gpu undrain 3"),
        ("show 3", "gpu show 3"),
        ("show L17", "lease show L17"),
        ("show op-3", "operation show op-3"),
        ("release L17", "lease end L17"),
        ("cancel op-3", "operation cancel op-3"),
        ("reload", "config reload"),
        ("overrides clear 0", "config overrides clear 0"),
        ("revoke L17 --reason x", "lease end L17 --reason x"),
        ("list", "gpu list"),
        ("list gpus", "gpu list"),
        ("list leases", "lease list"),
        ("reset gpu 3", "gpu reset 3"),
        ("watch", "top"),
        ("nvtop", "top"),
    ]);
}

#[test]
fn verbs_of_other_tools_are_translated() {
    assert_corrected(&[
        ("mig enable 0", "mig on 0"),
        ("mig disable 0", "mig off 0"),
        ("mig create 1g.10gb -g 0", "mig add 1g.10gb -g 0"),
        ("mig destroy 1g.10gb -g 0", "mig remove 1g.10gb -g 0"),
        ("mig status", "mig list"),
        ("mps status", "mps list"),
        ("mps enable 4", "mps start 4"),
        ("lease create --whole", "lease request --whole"),
        ("lease release L17", "lease end L17"),
        ("lease extend L17 --for 2h", "lease renew L17 --for 2h"),
        ("maintenance start", "maintenance enter"),
        ("maintenance end", "maintenance leave"),
        ("config validate x.toml", "config check x.toml"),
        ("check x.toml", "config check x.toml"),
        ("validate /etc/x", "config check /etc/x"),
        ("config check dgx-a100 x.toml", "config check --offline dgx-a100 x.toml"),
        ("status -f x.toml", "status"),
        ("explain Xid 79", "explain xid-79"),
        ("gpu status", "status"),
        ("gpu enable 3", "gpu uncordon 3"),
        ("gpu resume 3", "gpu uncordon 3"),
        ("gpu resume", "gpu uncordon --help"),
        ("mig destroy", "mig remove --help"),
    ]);
}

#[test]
fn id_of_a_lease_leads_to_a_command_for_leases() {
    assert_corrected(&[
        ("cancel L19", "lease end L19"),
        ("rm L19", "lease end L19"),
        ("delete L19", "lease end L19"),
        ("delete lease L19", "lease end L19"),
        ("kill L19", "lease end L19"),
        ("stop L19 L20", "lease end L19 L20"),
        ("scancel L19", "lease end L19"),
        ("lease end all", "lease end --all"),
        ("lease end -a", "lease end --all"),
        ("lease end --mine", "lease end --all"),
        ("cancel all leases", "lease end --all"),
        ("kill all", "lease end --help"),
        ("delete leases", "lease end --help"),
        ("L19 end", "lease end L19"),
        ("lease L19 cancel", "lease end L19"),
        ("wait op-3", "operation wait op-3"),
        ("lease end -u anna", "lease end --user anna --reason TEXT"),
        ("lease renew L19 +2h", "lease renew L19 --for 2h"),
        ("lease cancel all", "lease end --all"),
        ("logs L19", "lease show L19"),
        ("get L19", "lease show L19"),
        ("describe L19", "lease show L19"),
        ("L19", "lease show L19"),
        ("lease L19", "lease show L19"),
        ("renew L19", "lease renew L19 --for 2h"),
        ("renew L19 3h", "lease renew L19 --for 3h"),
        ("extend L19 2h", "lease renew L19 --for 2h"),
        ("lease extend L19 2h", "lease renew L19 --for 2h"),
        ("lease renew L19 3h", "lease renew L19 --for 3h"),
        ("lease renew L19", "lease renew L19 --for 2h"),
        ("lease renew L19 --for 1 day", "lease renew L19 --for 1d"),
        ("exec L1 python x.py", "run --lease L1 -- python x.py"),
        ("exec L1 -- python x.py", "run --lease L1 -- python x.py"),
        ("create lease", "lease request --for 2h"),
        ("create lease --mig 1g.10gb", "lease request --mig 1g.10gb"),
        ("create lease 1g.10gb", "lease request --mig 1g.10gb"),
        ("cancel", "lease end --help"),
        ("renew", "lease renew --help"),
        ("--json cancel L19", "--json lease end L19"),
        ("lease mine", "lease list --mine"),
        ("lease history", "lease list --ended"),
        ("lease list --users anna", "lease list --user anna"),
        ("lease end -g 3 L19", "lease end L19"),
    ]);
}

/// A hint must not end or destroy what the user did not name.
#[test]
fn verb_without_its_object_does_not_lead_to_an_end() {
    assert_corrected(&[("free 3", "mig list --free 3"), ("free", "mig list --free"), ("stop 3", "mps stop 3")]);
    assert_corrected(&[("disable 0", "gpu cordon 0"), ("enable 0", "gpu uncordon 0")]);
    assert_corrected(&[("gpu free 3", "status 3"), ("gpu free", "status --summary")]);
    for typed in
        ["stop all", "release 3", "revoke 3", "return 3", "end 3", "off 0", "on 0", "destroy all", "rm x", "restart x"]
    {
        assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
    }
}

#[test]
fn option_of_another_tool_does_not_hide_the_command() {
    assert_corrected(&[
        ("top -n 1", "top --once"),
        ("watch 3", "top 3"),
        ("top -d 5", "top --interval 5s"),
        ("history 3", "lease list --ended"),
        ("history -n 5", "lease list --ended=5"),
        ("bill --since 1d", "usage --since 1d"),
        ("who -u", "lease list"),
        ("queue -u anna", "lease list --user anna"),
        ("users -a", "lease list"),
        ("run 1/4 ./train.sh", "run --mps 25 -- ./train.sh"),
        ("run 0.5 ./train.sh", "run --mps 50 -- ./train.sh"),
        ("run quarter ./train.sh", "run --mps 25 -- ./train.sh"),
        ("run 25 ./train.sh", "run --mps 25 -- ./train.sh"),
        ("run --nowait --mps 25 ./train.sh", "run --mps 25 -- ./train.sh"),
        ("run 3 ./train.sh", "run -g 3 -- ./train.sh"),
        ("reload gpushd", "config reload"),
        ("squeue --me", "lease list --mine"),
        ("ps --mine", "ps"),
        ("ps -ef", "ps"),
        ("events --last 5", "events -n 5"),
        ("events --limit 5", "events -n 5"),
        ("events --limit=5", "events -n 5"),
        ("status -l", "top"),
        ("status --watch", "top"),
        ("status -w", "top"),
        ("top --once --no-color", "top --once --color=never"),
        ("status --watch 5s", "top --interval 5s"),
        ("reload --force", "config reload"),
        ("events --tail 5", "events -n 5"),
        ("audit --tail 5", "audit -n 5"),
        ("apply --rollback", "apply --undo"),
        ("status -n 2", "top --interval 2s"),
    ]);
}

#[test]
fn words_of_schedulers_and_services_lead_to_a_command() {
    assert_corrected(&[
        ("squeue", "lease list"),
        ("sinfo", "status"),
        ("sinfo -N", "status"),
        ("scontrol show node", "status"),
        ("whoami", "quota"),
        ("user list", "quota --all"),
        ("avail", "mig list --free"),
        ("job", "lease list"),
        ("jobs", "lease list"),
        ("limit", "quota"),
        ("quota nobody", "quota --user nobody"),
        ("health", "doctor"),
        ("doctor mps", "doctor --only mps"),
        ("plan", "apply --dry-run"),
        ("plan 3g.40gb -g 0", "mig apply 3g.40gb --dry-run -g 0"),
        ("config view", "config show"),
        ("config lint", "config check"),
        ("config path", "config check"),
        ("config undo", "config diff"),
        ("mig undo", "apply --undo"),
        ("mig split", "mig profiles"),
        ("mig split 0", "mig profiles 0"),
        ("mig set 4", "mig profiles 4"),
        ("mps set 0 25", "mps set 0 --percentage 25"),
        ("gpu 2", "gpu show 2"),
        ("gpu offline 2", "gpu cordon 2"),
        ("gpu lock 2", "gpu cordon 2"),
        ("operation op-1", "operation show op-1"),
        ("get pods", "ps"),
        ("get nodes", "status"),
        ("describe node gpu01", "status"),
        ("uncordon node", "gpu uncordon all"),
        ("mig remove -g 4 --all", "mig apply none -g 4"),
        ("destroy 3", "mig apply none -g 3"),
        ("remove 3", "mig apply none -g 3"),
        ("restart mps 0", "mps restart 0"),
        ("restart 0", "mps restart 0"),
        ("restart mps", "mps restart --help"),
        ("enter maintenance", "maintenance enter"),
        ("end maintenance", "maintenance leave"),
        ("mig delete 3g.40gb 0", "mig remove 3g.40gb -g 0"),
        ("mig destroy all", "mig apply none -g all"),
        ("mps set 0 percentage 25", "mps set 0 --percentage 25"),
        ("reset", "gpu reset --help"),
        ("explain exit 4", "explain 4"),
        ("explain mig layouts", "explain mig"),
        ("explain L17", "lease show L17"),
        ("gpu list --free", "status --summary"),
        ("gpu drain 2 --wait", "gpu drain 2"),
        ("events --type xid", "events --kind xid"),
        ("config overrides remove 0", "config overrides clear 0"),
        ("restart gpu 0", "gpu reset 0"),
        ("plan mixed -g 0", "mig apply mixed --dry-run -g 0"),
        ("mig set 4 3g.40gb", "mig apply 3g.40gb -g 4"),
        ("mig remove --all", "mig apply none -g all"),
        ("avail 1g.10gb", "mig list --free --profile 1g.10gb"),
        ("user anna", "quota --user anna"),
        ("doctor --fix", "doctor"),
        ("scancel -u anna", "lease list -u anna"),
        ("ls", "gpu list"),
        ("free 1g.10gb", "mig list --free --profile 1g.10gb"),
    ]);
    for (typed, meant) in [
        ("restart", "systemctl restart gpushd"),
        ("restart gpushd", "systemctl restart gpushd"),
        ("start", "systemctl start gpushd"),
        ("stop", "systemctl stop gpushd"),
        ("daemon-reload", "systemctl daemon-reload"),
        ("journal", "journalctl -u gpushd"),
        ("journal -f", "journalctl -u gpushd"),
    ] {
        assert_eq!(corrected(&format!("gpushctl {typed}")).as_deref(), Some(meant), "{typed}");
    }
}

/// Faults: `lease revoke --all` of root led to a command that ended no lease, and `revoke L1` to one that was refused.
#[test]
fn leases_that_root_revokes_end_with_a_reason() {
    let ended = |typed: &str, meant: &str, is_root| {
        let words = meant.split(' ').map(str::to_owned).collect();
        with_reason(words, &typed.split(' ').collect::<Vec<_>>(), is_root).join(" ")
    };
    for (typed, meant, expected) in [
        ("lease revoke --all", "lease end --all", "lease end --all --reason TEXT"),
        ("revoke L1", "lease end L1", "lease end L1 --reason TEXT"),
        ("revoke L1 --reason x", "lease end L1 --reason x", "lease end L1 --reason x"),
        ("lease cancel --all", "lease end --all", "lease end --all"),
        ("revoke --all", "lease end --help", "lease end --help"),
    ] {
        assert_eq!(ended(typed, meant, true), expected, "{typed}");
        assert_eq!(ended(typed, meant, false), meant, "{typed}");
    }
}

#[test]
fn misspelled_words_are_corrected() {
    assert_corrected(&[
        ("stauts", "status"),
        ("status --sumary", "status --summary"),
        ("leese list --mien", "lease list --mine"),
        ("gpu shwo 2", "gpu show 2"),
        ("lease renw L3 --for 2h", "lease renew L3 --for 2h"),
    ]);
    for typed in ["mig of 0", "maintenance lease", "rcover", "bogus"] {
        assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
    }
}

#[test]
fn wrong_commands_of_a_trial_lead_to_a_command() {
    assert_corrected(&[
        ("lease end cloudsdk", "lease end --user cloudsdk --reason TEXT"),
        ("lease end L3 --in 10m", "lease renew L3 --for 10m"),
        ("lease renew L3 --until evening", "lease renew L3 --for 2h"),
        ("lease list --state waiting", "lease list"),
        ("gpu list --sort memory", "gpu list"),
        ("gpu cordon 6 --message fan", "gpu cordon 6 --reason fan"),
        ("gpu cordon 6 -r fan", "gpu cordon 6 --reason fan"),
        ("gpu drain 6 --force", "gpu drain 6 --end-after=1h"),
        ("gpu drain 6 --grace 10m", "gpu drain 6 --end-after 10m"),
        ("mig apply 3g.40gb -g 0 -n", "mig apply 3g.40gb -g 0 --dry-run"),
        ("events --since -1h", "events --since 1h"),
        ("status -v", "status"),
        ("status --verbose", "status"),
        ("gpu list --debug", "gpu list"),
        ("-v", "version"),
        ("mig-parted apply -f x.yaml -c all", "mig apply --file x.yaml -c all"),
        ("mps set_default_active_thread_percentage 50", "mps set TARGET --percentage 50"),
        ("mps get_server_list", "mps list"),
        ("nvidia-cuda-mps-control -d", "mps list"),
        ("why L1", "lease show L1"),
        ("explain error 5", "explain 5"),
        ("config reload new.toml", "config check new.toml"),
        ("config export", "config show --effective"),
    ]);
}

/// The guesses of a trial with new users, for which earlier versions had no hint or a wrong one.
#[test]
fn guesses_of_new_users_lead_to_the_command_that_they_meant() {
    assert_corrected(&[
        ("mig apply -g 0 3g.40gb 1g.10gb", "mig apply -g 0 3g.40gb,1g.10gb"),
        ("run --whole --for 1 day -- ./x", "run --whole --for 1d -- ./x"),
        ("mig destroy 0", "mig apply none -g 0"),
        ("lease get", "lease show"),
        ("lease get L17", "lease show L17"),
        ("run --gpus 1 -- ./x", "run --whole -- ./x"),
        ("run --gpus 2 python x.py", "run --whole --count 2 -- python x.py"),
        ("run --exclusive -- ./x", "run --whole -- ./x"),
        ("who", "lease list"),
        ("users", "lease list"),
        ("queue", "lease list"),
        ("history", "lease list --ended"),
        ("accounting", "usage"),
        ("free", "mig list --free"),
        ("events --tail", "events --follow"),
        ("process list", "ps"),
        ("process list --unleased", "ps --unleased"),
        ("mig plan 3g.40gb -g 0", "mig apply --dry-run 3g.40gb -g 0"),
        ("mig assert", "mig apply --check"),
        ("mps drain 0", "mps stop 0 --wait"),
        ("lease revoke L17 --reason x --end", "lease end L17 --reason x --kill"),
        ("maintenance status", "status"),
        ("explain xid 79", "explain xid-79"),
        ("timeslice show 0", "gpu show 0"),
        ("gpu-reset 4", "gpu reset 4"),
        ("config load f.toml", "config check f.toml"),
        ("config load", "config reload"),
        ("config init lab", "config init --site lab"),
        ("config override 0", "config overrides list 0"),
        ("lease get --mig 1g.10gb", "lease request --mig 1g.10gb"),
        ("lease kick L1", "lease end L1"),
        ("lease grant student1 --mig 1g.10gb", "lease request --user student1 --mig 1g.10gb"),
        ("lease end L1 --now", "lease end L1"),
        ("lease end L1 --end", "lease end L1"),
        ("book", "lease request --for 2h"),
        ("book 1g.10gb", "lease request --mig 1g.10gb"),
        ("mine", "lease list --mine"),
        ("usage student1", "usage --user student1"),
        ("usage --month", "usage --since 30d"),
        ("get leases -o yaml", "lease list -o json"),
        ("help lease requst", "lease request --help"),
        ("maintenance enter 4", "gpu drain 4"),
        ("metrics serve 9100", "metrics serve --listen 127.0.0.1:9100"),
        ("ps -p 1234", "ps"),
        ("version --short", "version"),
    ]);
    assert_eq!(corrected("gpushctl shutdown").as_deref(), Some("systemctl stop gpushd"));
    let docker = "docker run --rm $(gpushctl lease env L17 -o docker) IMAGE";
    assert_eq!(corrected("gpushctl docker run").as_deref(), Some(docker));
}

#[test]
fn misplaced_arguments_are_moved() {
    assert_corrected(&[
        ("mig apply 3g.40gb 0", "mig apply 3g.40gb -g 0"),
        ("mig apply --dry-run 0 3g.40gb", "mig apply --dry-run 3g.40gb -g 0"),
        ("mig apply 3g.40gb 0 1", "mig apply 3g.40gb -g 0,1"),
        ("run python train.py", "run -- python train.py"),
        ("run --mps 25 python -u x", "run --mps 25 -- python -u x"),
        ("lease request 1g.10gb --for 2h", "lease request --mig 1g.10gb --for 2h"),
        ("lease request mps=25", "lease request --request mps=25"),
        ("lease request --whole --device 0", "lease request --whole --gpu 0"),
        ("lease request --profile 1g.10gb", "lease request --mig 1g.10gb"),
        ("mps set 4 --percent 30", "mps set 4 --percentage 30"),
        ("gpu list --all", "gpu list"),
        ("mig off --all", "mig off all"),
        ("completions --shell bash", "completions bash"),
    ]);
}

#[test]
fn nothing_is_suggested_without_a_command_that_parses() {
    for typed in [
        "bogus",
        "run --mps 25",
        "run --memory lots ./x",
        "mps start",
        "mig apply 1g.10gb x y",
        "mig apply --wait=soon",
        "gpu drain",
    ] {
        assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
    }
}

#[test]
fn words_of_slurm_and_guesses_lead_to_what_they_name() {
    assert_corrected(&[
        ("scontrol show job 123", "slurm usage 123"),
        ("scancel 123", "lease list"),
        ("srun --mem=64G --gres=gpu:1 ./x", "run --whole -- ./x"),
        ("srun --mem 64G --gres=gpu:1g.10gb:2 ./x", "run --mig 1g.10gb --count 2 -- ./x"),
        ("request 10G", "lease request --memory 10G"),
        ("run 10G ./x", "run --memory 10G -- ./x"),
        ("run --fraction 0.25 ./x", "run --mps 25 -- ./x"),
        ("lease list --state ended", "lease list --ended"),
        ("lease list --state active", "lease list"),
        ("advise host", "advise from-use host"),
        ("advise from-use L2", "advise from-use lease L2"),
        ("advise from-use anna", "advise from-use user anna"),
        ("advise from-use 1 --since 2d", "advise from-use gpu 1 --since 2d"),
        ("advise lease L17", "advise from-use lease L17"),
        ("advise user anna --since 2d", "advise from-use user anna --since 2d"),
    ]);
}

/// Faults: these lines had no hint, or one whose command was refused or did something else.
#[test]
fn lines_of_a_second_trial_lead_to_what_they_name() {
    assert_corrected(&[
        ("run --memory 10 true", "run --memory 10G -- true"),
        ("run --memory 8192 ./x", "run --memory 8192M -- ./x"),
        ("run --priority high ./x", "run --mps --priority normal -- ./x"),
        ("run --mps 25 --priority low ./x", "run --mps 25 --priority below-normal -- ./x"),
        ("run --comment=gpush:mps=25 ./x", "run --request mps=25 -- ./x"),
        ("lease request -p 1g.10gb", "lease request --mig 1g.10gb"),
        ("start -- true", "run -- true"),
        ("run help", "run --help"),
        ("lease end help", "lease end --help"),
        ("status --free", "status --summary"),
        ("lease list -u", "lease list --mine"),
        ("lease env --shell fish", "lease env -o fish"),
        ("lease env L17 --shell bash", "lease env L17 -o sh"),
        ("quota -u", "quota"),
        ("usage L1", "lease show L1"),
        ("explain advise", "advise --help"),
        ("python x.py --lr 3", "run -- python x.py --lr 3"),
        ("./x -L", "run -- ./x -L"),
        ("train.py", "run -- python3 train.py"),
    ]);
    let script = r#"sh -c 'docker run --rm --gpus "\"device=$CUDA_VISIBLE_DEVICES\"" image cmd'"#;
    assert_corrected(&[("docker run --gpus 1 image cmd", &format!("run --whole -- {script}"))]);
    let script = script.replace("image", "-v /a:/b image");
    assert_corrected(&[("docker run --gpus 1 -v /a:/b image cmd", &format!("run --whole -- {script}"))]);
}
