//! Builds the hint for a temporary error: the command as the user typed it, with `--wait` added.

use std::ffi::OsString;

use super::{Command, Gpu, Lease, Maintenance, Mig, Mps, mig::Execution, request::RequestFlags, typed};

/// Returns the hint that repeats the typed command with `--wait`; `None` if the command cannot wait, or already has
/// `--wait`.
pub(crate) fn hint(command: &Command, words: &[OsString]) -> Option<String> {
    let until = match command {
        Command::Apply(args) => of_change(&args.execution),
        Command::Mig(
            Mig::Apply { change, .. } | Mig::Add { change, .. } | Mig::Remove { change, .. } | Mig::On { change, .. },
        ) => of_change(&change.execution),
        Command::Mig(Mig::Off { execution, .. }) => of_change(execution),
        Command::Mps(Mps::Stop { queueing, .. }) => queueing.seconds.is_none().then_some("the clients have ended"),
        Command::Gpu(Gpu::Reset { queueing, .. }) => queueing.seconds.is_none().then_some("the GPU is idle"),
        Command::Maintenance(Maintenance::Enter { queueing, .. }) => {
            queueing.seconds.is_none().then_some("maintenance can begin")
        }
        Command::Run(args) if args.lease.is_none() => of_request(&args.request),
        Command::Lease(Lease::Request { request, .. } | Lease::Env { lease: None, request, .. }) => of_request(request),
        _ => None,
    }?;
    Some(format!("to wait until {until}: `{}`", with_wait(words)?))
}

fn of_change(execution: &Execution) -> Option<&'static str> {
    (execution.queueing.seconds.is_none() && !execution.dry_run).then_some("the change can start")
}

fn of_request(request: &RequestFlags) -> Option<&'static str> {
    (!request.waits()).then_some("the lease can be granted")
}

/// Returns the command line with `--wait`. The words after `--` belong to another program.
fn with_wait(words: &[OsString]) -> Option<String> {
    let mut typed: Vec<&str> = words.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let end = typed.iter().position(|word| *word == "--").unwrap_or(typed.len());
    typed.insert(end, "--wait");
    typed::command_line(["gpushctl"].into_iter().chain(typed))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    fn hinted(line: &[&str]) -> Option<String> {
        let words: Vec<OsString> = ["gpushctl"].iter().chain(line).map(OsString::from).collect();
        hint(&Cli::try_parse_from(&words).unwrap().command, &words)
    }

    #[test]
    fn hint_is_the_typed_command_with_wait() {
        for (typed, expected) in [
            (&["mig", "add", "1g.10gb", "-g", "0"][..], "mig add 1g.10gb -g 0 --wait"),
            (&["mig", "remove", "1g.10gb*2", "-g", "0"], "mig remove '1g.10gb*2' -g 0 --wait"),
            (&["mig", "apply", "none", "--reason", "it's mine"], r"mig apply none --reason 'it'\''s mine' --wait"),
            (&["mig", "on", "0"], "mig on 0 --wait"),
            (&["mig", "off", "0", "-y"], "mig off 0 -y --wait"),
            (&["apply"], "apply --wait"),
            (&["mps", "stop", "1:2g.20gb@2"], "mps stop 1:2g.20gb@2 --wait"),
            (&["gpu", "reset", "3"], "gpu reset 3 --wait"),
            (&["maintenance", "enter"], "maintenance enter --wait"),
            (&["run", "--mps", "25", "--", "x", "--", "a b"], "run --mps 25 --wait -- x -- 'a b'"),
            (&["lease", "request", "--whole"], "lease request --whole --wait"),
            (&["lease", "env", "--mps"], "lease env --mps --wait"),
        ] {
            let hint = hinted(typed).unwrap_or_else(|| panic!("{typed:?}"));
            let command = hint.split('`').nth(1).unwrap();
            assert_eq!(command, format!("gpushctl {expected}"), "{hint}");
        }
    }

    #[test]
    fn command_without_wait_or_with_it_has_no_hint() {
        for typed in [
            &["mig", "add", "1g.10gb", "--wait"][..],
            &["mig", "add", "1g.10gb", "--dry-run"],
            &["mig", "apply", "--dry-run", "1g.10gb"],
            &["mps", "start", "0"],
            &["config", "overrides", "clear", "0"],
            &["run", "--mps", "--wait=5m", "--", "true"],
            &["run", "--lease", "L17", "--", "true"],
            &["lease", "env", "L17"],
            &["mig", "add", "1g.10gb", "--reason", "a`b"],
        ] {
            assert_eq!(hinted(typed), None, "{typed:?}");
        }
    }
}
