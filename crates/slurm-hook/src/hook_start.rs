//! Finds out when Slurm started a hook.
//!
//! The restart count does not show which run an Epilog ends. In Slurm 22.05, the Epilog of a requeued run has the
//! restart count of the next run, and no other variable of the Epilog shows the run. But slurmd starts an Epilog only
//! after all processes of the run have ended. So if Slurm started an Epilog before the Prolog of a run, the Epilog does
//! not end that run.

use std::path::Path;

use gpush_host::{
    boot,
    proc::{self, Environment},
};
use serde::{Deserialize, Serialize};

/// The boot id, which changes when the host reboots.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The time at which Slurm started a hook of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HookStart {
    /// Id of the boot.
    boot: String,
    /// Clock ticks since boot. They do not change if the clock of the host is set.
    ticks: u64,
}

impl HookStart {
    /// Returns the start time of the process that Slurm started for this hook: gpushctl itself, or the outermost script
    /// that runs gpushctl. To find that script, looks for the job id in the environments of the parent processes. All
    /// scripts of the hook have the id, but slurmd does not have it. Returns `None` if `/proc` cannot be read.
    pub(crate) fn of_this_process(job: u32) -> Option<Self> {
        let boot = boot::id(Path::new(BOOT_ID)).ok()?;
        Some(Self { boot, ticks: proc::start(hook_of(std::process::id(), job))? })
    }

    /// Returns whether Slurm started this hook before the other one, on the same boot.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        self.boot == other.boot && self.ticks < other.ticks
    }

    #[cfg(test)]
    pub(crate) fn at(ticks: u64) -> Self {
        Self { boot: "boot-1".to_owned(), ticks }
    }
}

/// Returns the process that Slurm has started as the hook: `pid`, or its outermost parent with this job id in its
/// environment.
fn hook_of(pid: u32, job: u32) -> u32 {
    let is_of_job = |pid: u32| match proc::environment(pid, "SLURM_JOB_ID") {
        Ok(Environment::Set(id)) => String::from_utf8_lossy(&id).trim() == job.to_string(),
        Ok(Environment::Unset | Environment::Unknown) | Err(_) => false,
    };
    proc::ancestors(pid).take_while(|pid| is_of_job(*pid)).last().unwrap_or(pid)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn starts_are_compared_within_one_boot() {
        let (early, late) = (HookStart::at(5), HookStart::at(6));
        assert!(early.is_before(&late) && !late.is_before(&early) && !early.is_before(&early));
        assert!(!HookStart { boot: "boot-2".to_owned(), ..early }.is_before(&late));
    }

    #[test]
    fn this_process_has_a_start() {
        let start = HookStart::of_this_process(u32::MAX).unwrap();
        assert!(start.ticks > 0 && !start.boot.is_empty());
    }

    #[test]
    fn hook_is_the_outermost_script_of_the_job() {
        let script = "sh -c 'sleep 600 & echo $!; wait'; true";
        let mut outer =
            Command::new("sh").args(["-c", script]).env("SLURM_JOB_ID", "42").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(outer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let innermost: u32 = line.trim().parse().unwrap();
        let found = (hook_of(innermost, 42), hook_of(innermost, 43));
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(innermost.cast_signed()), nix::sys::signal::Signal::SIGKILL)
            .unwrap();
        outer.wait().unwrap();
        assert_eq!(found, (outer.id(), innermost));
    }
}
