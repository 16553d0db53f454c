//! What each sharing mechanism isolates.
//!
//! `gpushctl config check` prints one sentence for each rule. `gpushctl explain isolation` and
//! docs/isolation.md show [`TABLE`]. Sources: NVIDIA's MIG user guide ("Partitioning", "Compute
//! Instances"), the Multi-Process Service documentation ("Memory Protection", "Error Containment"),
//! and the documentation of time-slicing in NVIDIA's device plugin for Kubernetes.

use gpush_api::{ComputeMode, ConfigView, LeaseOwner, LeaseRequirement, Mode, MpsUsers, RuleView, UnleasedPolicy};

mod table;

use crate::layout::Layout;

pub use table::{Aspect, Cell, MECHANISMS, Mechanism, SOURCES, Source, TABLE, markdown};

/// Returns one sentence about what the mechanism of a rule isolates, and what it does not isolate.
#[must_use]
pub fn sentence(config: &ConfigView, rule: &RuleView) -> String {
    let shares_devices = shares_devices(config, rule);
    let apart = match rule.mode {
        Mode::NoRule | Mode::Unmanaged => return "gpushd changes nothing and isolates nothing".to_owned(),
        Mode::Timeslice if is_prohibited(rule) => {
            return "no program can use the GPU, because its compute mode is `prohibited`: gpushd grants no leases of it"
                .to_owned();
        }
        Mode::Timeslice if rule.timeslice.as_ref().is_none_or(|policy| policy.replicas == 1) => {
            "one lease at a time has the GPU, because `timeslice.replicas` is 1: to share the GPU, set for example \
            `timeslice = { replicas = 4 }`"
        }
        Mode::Exclusive => "gpushd grants one lease of the GPU at a time",
        Mode::Mig if shares_devices => {
            "MIG devices have separate memory, bandwidth, compute and faults; clients of one MPS daemon share faults \
            and bandwidth, and their limits are ceilings, not reservations"
        }
        Mode::Mig => "MIG devices have separate memory, bandwidth, compute and faults",
        Mode::Mps => {
            "MPS separates address spaces only: clients share faults and bandwidth, and the percentage and the memory \
            limit are ceilings that only cooperating clients respect"
        }
        Mode::Timeslice => {
            "time-slicing separates address spaces only: holders share memory, faults and bandwidth, and slow each other \
             down"
        }
    };
    let terms = rule.lease.unwrap_or_default();
    let through_mps = terms.requirement_for(true).needs_lease();
    let does = match config.unleased {
        UnleasedPolicy::Report | UnleasedPolicy::Warn => "reports",
        UnleasedPolicy::End => "ends",
    };
    let access = match terms.requirement_for(rule.mode == Mode::Mps) {
        LeaseRequirement::Required => format!("gpushd {does} processes without a lease, but does not prevent them"),
        LeaseRequirement::Enforced => format!(
            "once `gpushctl enforce status` shows it, the kernel denies the GPU to login sessions without a lease; gpushd \
            {does} other processes without a lease"
        ),
        LeaseRequirement::Optional if shares_devices && through_mps => format!(
            "on devices that are shared through MPS, gpushd {does} processes without a lease, but does not prevent them"
        ),
        LeaseRequirement::Optional if terms.owner == LeaseOwner::Slurm => {
            "programs outside of Slurm jobs can use the GPU too".to_owned()
        }
        LeaseRequirement::Optional => "programs without a lease can use the GPU too".to_owned(),
    };
    let users = match &rule.mps {
        Some(policy) if is_for_one_user(config, rule) && policy.users == MpsUsers::One => {
            "; one user at a time, or several with `users = \"many\"` (driver 555 or later)"
        }
        Some(_) | None => "",
    };
    format!("{apart}{users}; {access}")
}

/// Returns whether the rule has MPS daemons, which serve one user at a time by default.
fn is_for_one_user(config: &ConfigView, rule: &RuleView) -> bool {
    rule.mode == Mode::Mps || rule.mode == Mode::Mig && shares_devices(config, rule)
}

/// Returns whether the rule prohibits programs on the GPU.
fn is_prohibited(rule: &RuleView) -> bool {
    rule.timeslice.as_ref().is_some_and(|policy| policy.compute_mode == Some(ComputeMode::Prohibited))
}

/// Returns whether the rule's layout contains MIG devices that are shared through MPS.
fn shares_devices(config: &ConfigView, rule: &RuleView) -> bool {
    match rule.layout.as_deref() {
        Some([name]) => match config.layouts.iter().find(|layout| layout.name == *name) {
            Some(layout) => Layout::shares_devices(&layout.entries),
            None => Layout::shares_devices(&[name]),
        },
        Some(entries) => Layout::shares_devices(entries),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use crate::config::Config;

    use super::*;

    #[test]
    fn sentence_says_whether_gpushd_ends_unleased_processes() {
        for (unleased, does) in [("report", "gpushd reports processes"), ("end", "gpushd ends processes")] {
            let text = format!("[processes]\nunleased = \"{unleased}\"\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n");
            let view = Config::parse(&text, "config.toml").unwrap().view(None, &[]);
            assert!(sentence(&view, &view.rules[0]).contains(does), "{unleased}");
        }
    }

    #[test]
    fn isolation_sentence_of_each_mechanism() {
        let config = Config::parse(
            "[layouts]\nhalves = [\"3g.40gb*2:mps\"]\n\
             [[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nlease = \"required\"\n\
             [[gpu]]\nmatch = [\"1\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n\
             [[gpu]]\nmatch = [\"2\"]\nmode = \"mig\"\nlayout = [\"2g.20gb:mps\", \"3g.40gb\"]\n\
             [[gpu]]\nmatch = [\"3\"]\nmode = \"mps\"\n\
             [[gpu]]\nmatch = [\"6\"]\nmode = \"mig\"\nlayout = \"halves\"\nlease = \"required\"\n\
             [[gpu]]\nmatch = [\"4\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n\
             [[gpu]]\nmatch = [\"5\"]\nmode = \"unmanaged\"\n\
             [[gpu]]\nmatch = [\"7\"]\nmode = \"timeslice\"\ntimeslice = { compute_mode = \"prohibited\" }\n",
            "config.toml",
        )
        .unwrap();
        let mut shown = String::new();
        let view = config.view(None, &[]);
        for rule in &view.rules {
            let _ = writeln!(shown, "{}: {}: {}", rule.name, rule.mode.name(), sentence(&view, rule));
        }
        insta::assert_snapshot!(shown);
    }
}
