//! `[slurm]`: how Slurm's hooks treat jobs, and what Epilog does about processes that remain after
//! a job.

use std::time::Duration;

use gpush_api::LeaseOwner;
use toml::de::DeTable;

use super::{
    Config, Rule,
    reader::{HOUR, Reader, SECOND},
    toml_text::{span, text},
};

/// `[slurm]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slurm {
    /// What Prolog and Epilog do if a job needs gpushd and gpushd does not answer.
    pub agent_down: AgentDown,
    /// Time after which Prolog and Epilog give up. Slurm's PrologEpilogTimeout must be longer.
    pub deadline: Duration,
    /// What happens to a job whose share is not free.
    pub busy: Busy,
    /// What Epilog does about processes of a job that still use the job's GPUs.
    pub leftovers: Leftovers,
    /// What Epilog does while a process outside the job's cgroup keeps a GPU of the job in use.
    pub unattributed: Unattributed,
    /// Absolute path of scontrol, with which Epilog writes what a job used into Slurm's accounting; `None` to write
    /// nothing.
    pub admin_comment: Option<String>,
}

/// What Prolog and Epilog do while gpushd does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AgentDown {
    /// The hook fails. Slurm then drains the node and requeues the job.
    #[default]
    Fail,
    /// The hook succeeds, and the job runs without a lease.
    Pass,
}

/// What happens to a job whose share is not free, for example because a process of an earlier job still runs, or because
/// the MPS daemon serves another user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Busy {
    /// Prolog waits until the share is free. At the deadline of the hook, the tasks of the job fail.
    #[default]
    Wait,
    /// The tasks of the job fail at once.
    Fail,
}

/// What Epilog does about processes of a job that still use the job's GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Leftovers {
    /// gpushd ends the processes in the job's cgroup with SIGTERM, then with SIGKILL.
    #[default]
    End,
    /// Epilog reports the processes, and fails if they do not end in time.
    Report,
}

/// What Epilog does while a process that cannot be attributed to the job keeps a GPU of the job in
/// use. gpushd never ends such a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Unattributed {
    /// Epilog succeeds, and the GPU remains reserved: gpushd refuses the next jobs on it. So a user
    /// cannot cause Slurm to drain the node.
    #[default]
    Reserve,
    /// Epilog fails. Slurm then drains the node.
    Drain,
}

/// The config of the system's gpushd, which hooks and gpushctl read.
pub const DEFAULT_FILE: &str = "/etc/gpush/config.toml";

/// Directory for the files that Prolog writes for TaskProlog.
pub const SLURM_DIRECTORY: &str = "/run/gpush-slurm";

impl Default for Slurm {
    fn default() -> Self {
        Self {
            agent_down: AgentDown::default(),
            // Longer than the watchdog of gpushd's unit (30 s) and a start of gpushd: systemd restarts a gpushd that hangs,
            // and the hook repeats its request.
            deadline: Duration::from_secs(45),
            busy: Busy::default(),
            leftovers: Leftovers::default(),
            unattributed: Unattributed::default(),
            admin_comment: None,
        }
    }
}

const AGENT_DOWN: [(&str, AgentDown); 2] = [("fail", AgentDown::Fail), ("pass", AgentDown::Pass)];

const BUSY: [(&str, Busy); 2] = [("wait", Busy::Wait), ("fail", Busy::Fail)];

const LEFTOVERS: [(&str, Leftovers); 2] = [("end", Leftovers::End), ("report", Leftovers::Report)];

const UNATTRIBUTED: [(&str, Unattributed); 2] = [("reserve", Unattributed::Reserve), ("drain", Unattributed::Drain)];

impl Config {
    /// Returns the labels of rules with `owner = "slurm"` and a dynamic layout. gpushd refuses every
    /// job on the GPUs of such a rule.
    pub fn slurm_rules_with_dynamic_layout(&self) -> impl Iterator<Item = String> {
        let is_slurms = |rule: &Rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm);
        let rules = self.rules.iter().enumerate().filter(move |(_, rule)| rule.is_dynamic() && is_slurms(rule));
        rules.map(|(position, rule)| rule.label(position))
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Slurm {
    let default = Slurm::default();
    Slurm {
        agent_down: reader
            .choice(table, "agent_down", "valid value of `agent_down`", &AGENT_DOWN)
            .unwrap_or(default.agent_down),
        deadline: reader.duration(table, "deadline", SECOND..=HOUR, default.deadline),
        busy: reader.choice(table, "busy", "valid value of `busy`", &BUSY).unwrap_or(default.busy),
        leftovers: reader
            .choice(table, "leftovers", "valid value of `leftovers`", &LEFTOVERS)
            .unwrap_or(default.leftovers),
        unattributed: reader
            .choice(table, "unattributed", "valid value of `unattributed`", &UNATTRIBUTED)
            .unwrap_or(default.unattributed),
        admin_comment: reader.absolute(table, "admin_comment", "/usr/bin/scontrol"),
    }
}

/// Returns the keys with their values.
pub(super) fn written(slurm: &Slurm) -> [(&'static str, Option<String>); 6] {
    let Slurm { agent_down, deadline, busy, leftovers, unattributed, admin_comment } = slurm;
    [
        ("agent_down", Some(text(name(&AGENT_DOWN, agent_down)))),
        ("deadline", Some(span(*deadline))),
        ("busy", Some(text(name(&BUSY, busy)))),
        ("leftovers", Some(text(name(&LEFTOVERS, leftovers)))),
        ("unattributed", Some(text(name(&UNATTRIBUTED, unattributed)))),
        ("admin_comment", admin_comment.as_deref().map(text)),
    ]
}

fn name<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, one)| one == value).map_or("", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_layout_of_a_slurm_rule_is_found() {
        let rule = |gpu: u32, name: &str, layout: &str, owner: &str| {
            format!(
                "[[gpu]]\nname = {name:?}\nmatch = [\"{gpu}\"]\nmode = \"mig\"\nlayout = {layout:?}\nowner = {owner:?}\n"
            )
        };
        let text = [rule(0, "a", "dynamic", "slurm"), rule(1, "b", "none", "slurm"), rule(2, "c", "dynamic", "users")]
            .concat();
        let config = Config::from_bytes(text.as_bytes(), "config.toml").unwrap();
        assert_eq!(config.slurm_rules_with_dynamic_layout().collect::<Vec<_>>(), ["a"]);
    }
}
