//! The simulated `nvidia-smi compute-policy`: the time-slice levels of GPUs.
//!
//! ```text
//! +-------------------------------------+
//! | GPU compute policies:               |
//! | GPU     Name           Value        |
//! |=====================================|
//! |   0      Timeslice       Default    |
//! +-------------------------------------+
//! ```
//!
//! What is known about the real program:
//! - The head of the table, the widths of its columns and all messages are those of nvidia-smi
//!   535.309.01.
//! - The table names a GPU only by its index.
//! - For a GPU without levels, nvidia-smi prints two `Failed to set` lines and exits with 3
//!   (kubernetes-sigs/dra-driver-nvidia-gpu issue 41).
//! - Without a command, nvidia-smi prints its help (NVIDIA/k8s-device-plugin issue 354).
//!
//! Three facts are assumed:
//! - the position of a value in its column;
//! - if one GPU has no levels, nvidia-smi still prints the table of the other GPUs;
//! - nvidia-smi prints failures to standard output, like the table.
//!
//! The simulation accepts levels only as numbers, because the help of the real program lists no
//! other form. If the simulation accepted other forms, it could hide a mistake in gpush.

use std::process::ExitCode;

use mps_sim::{out, outln};
use silicon::machine::{Pid, Timeslice};
use silicon::{Call, Host, HostError, Return, fault};

/// The request in the arguments after `compute-policy`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Help,
    List(Option<Vec<String>>),
    Set(Timeslice, Option<Vec<String>>),
}

/// Parses the arguments after `compute-policy`.
pub(super) fn parse(arguments: &[String]) -> Result<Asked, String> {
    let (mut list, mut level, mut ids) = (false, None, None);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (name, joined) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (argument.as_str(), None),
        };
        let mut value = || joined.or_else(|| rest.next().map(String::as_str)).ok_or(format!("{name} needs a value"));
        match name {
            "-h" | "--help" => return Ok(Asked::Help),
            "-l" | "--list" => list = true,
            "-i" | "--id" => ids = Some(value()?.split(',').map(|id| id.trim().to_owned()).collect()),
            "--set-timeslice" => level = Some(self::level(value()?)?),
            _ => {
                return Err(format!("Option {argument} is not recognized. Please run 'nvidia-smi compute-policy -h'."));
            }
        }
    }
    match (list, level) {
        (true, None) => Ok(Asked::List(ids)),
        (false, Some(level)) => Ok(Asked::Set(level, ids)),
        (false, None) => Ok(Asked::Help),
        (true, Some(_)) => Err("One, and only one, compute-policy command allowed at a time".to_owned()),
    }
}

fn level(text: &str) -> Result<Timeslice, String> {
    let known = text.parse().ok().and_then(|number: usize| Timeslice::ALL.get(number));
    known.copied().ok_or_else(|| format!("{text} is no time-slice level: 0=DEFAULT, 1=SHORT, 2=MEDIUM, 3=LONG"))
}

pub(super) fn act(host: &Host, asked: Asked) -> Result<ExitCode, HostError> {
    let failures = match asked {
        Asked::Help => {
            outln!("    Compute Policy -- Control and list compute policies.\n");
            outln!("    nvidia-smi compute-policy -l | --list [-i GPUS]");
            outln!("    nvidia-smi compute-policy --set-timeslice N [-i GPUS]   0=DEFAULT, 1=SHORT, 2=MEDIUM, 3=LONG");
            return Ok(ExitCode::SUCCESS);
        }
        Asked::List(ids) => match super::gpus(host, ids) {
            Ok(gpus) => list(host, &gpus)?,
            Err(code) => return Ok(code),
        },
        Asked::Set(level, ids) => match super::gpus(host, ids) {
            Ok(gpus) => set(host, level, &gpus)?,
            Err(code) => return Ok(code),
        },
    };
    Ok(failures.last().map_or(ExitCode::SUCCESS, |rc| super::exit_code(*rc)))
}

fn list(host: &Host, gpus: &[u32]) -> Result<Vec<Return>, HostError> {
    let (mut rows, mut failed, mut failures) = (String::new(), String::new(), Vec::new());
    for &gpu in gpus {
        let decision = host.before(&Call::on(fault::COMPUTE_POLICY_LIST, gpu))?;
        let reported = match decision.rc {
            Some(rc) => Err(rc),
            None => host.read()?.timeslice(gpu),
        };
        host.after(decision);
        match reported {
            Ok(level) => rows += &format!("| {gpu:^5} {:^15} {:^13} |\n", "Timeslice", level.name()),
            Err(rc) => {
                failed += &format!("Failed to get compute policies for GPU {gpu} : {}\n", words(rc));
                failures.push(rc);
            }
        }
    }
    if !rows.is_empty() {
        outln!("+-------------------------------------+");
        outln!("| GPU compute policies:               |");
        outln!("| GPU     Name           Value        |");
        outln!("|=====================================|");
        outln!("{rows}+-------------------------------------+");
    }
    out!("{failed}");
    if let Some(rc) = failures.last() {
        outln!("Failed to retrieve compute policies for requested devices : {}", words(*rc));
    }
    Ok(failures)
}

fn set(host: &Host, level: Timeslice, gpus: &[u32]) -> Result<Vec<Return>, HostError> {
    let mut failures = Vec::new();
    for &gpu in gpus {
        let decision = host.before(&Call::on(fault::COMPUTE_POLICY_SET, gpu))?;
        let done = match decision.rc {
            Some(rc) => Err(rc),
            None if !host.privileged() => Err(Return::NoPermission),
            None => host.update(|machine| {
                // While nvidia-smi runs, it has the driver open. If it is the only client and
                // persistence mode is off, the setting is lost when nvidia-smi ends.
                machine.open(Pid::own());
                let done = machine.set_timeslice(gpu, level);
                machine.close(Pid::own());
                done
            }),
        };
        let rc = done.err().unwrap_or(Return::Success);
        host.trace(fault::COMPUTE_POLICY_SET, Some(gpu), format!("value={}", level.name()), rc);
        host.after(decision);
        let name = level.name();
        match done {
            Ok(()) => outln!("Successfully set timeslice policy with value {name} for GPU {gpu}"),
            Err(rc) => {
                outln!("Failed to set timeslice policy with value {name} for GPU {gpu} : {}", words(rc));
                failures.push(rc);
            }
        }
    }
    if let Some(rc) = failures.last() {
        outln!("Failed to set timeslice for requested devices : {}", words(*rc));
    }
    Ok(failures)
}

/// Returns the text of `nvmlErrorString` for the usual return codes.
fn words(rc: Return) -> String {
    match rc {
        Return::NotSupported => "Not Supported".to_owned(),
        Return::NoPermission => "Insufficient Permissions".to_owned(),
        Return::InvalidArgument => "Invalid Argument".to_owned(),
        Return::GpuIsLost => "GPU is lost".to_owned(),
        Return::InUse => "In use by another client".to_owned(),
        Return::Timeout => "Timeout".to_owned(),
        Return::Unknown => "Unknown Error".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Asked, String> {
        parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_parsed_in_every_spelling() {
        let ids = |text: &str| Some(text.split(',').map(str::to_owned).collect::<Vec<_>>());
        for (text, expected) in [
            ("", Asked::Help),
            ("-l -h", Asked::Help),
            ("-i 0", Asked::Help),
            ("-l", Asked::List(None)),
            ("--list --id=0,1", Asked::List(ids("0,1"))),
            ("-i GPU-1 --set-timeslice 3", Asked::Set(Timeslice::Long, ids("GPU-1"))),
            ("--set-timeslice=0", Asked::Set(Timeslice::Default, None)),
        ] {
            assert_eq!(read(text), Ok(expected), "{text}");
        }
        for text in
            ["-l --set-timeslice=1", "--set-timeslice", "--set-timeslice=4", "--set-timeslice=short", "-x", "-i"]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
