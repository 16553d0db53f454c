//! Slurm: slurm.conf, gres.conf and cgroup.conf compared with the host and with what gpush's hooks need.
//!
//! | module | subject |
//! |---|---|
//! | `files` | the files, and where they are |
//! | `hooks` | Prolog, Epilog and TaskProlog |
//! | `devices` | gres.conf and the device files |
//! | `counts` | numbers of GRES, and combinations that Slurm does not support |
//! | `lines` | types and devices of the lines of gres.conf, and the rules of gpush |
//! | `daemon` | slurmd |
//! | `gpus` | the GPUs that Slurm uses, and those that gpushd knows |
//! | `excerpt` | the lines of these files for a bug report |
//! | `limits` | flags, timeouts, and settings that isolate jobs from each other |

mod counts;
mod daemon;
mod devices;
mod excerpt;
mod files;
mod gpus;
mod hooks;
mod limits;
mod lines;

use gpush_api::LeaseOwner;
use gpush_core::config::Config;

pub(crate) use self::excerpt::excerpt;
use self::files::Files;
use crate::{Agent, Area, Finding, Host};

pub(crate) fn examine(host: &Host, agent: &Agent, config: &Config) -> Vec<Finding> {
    let is_slurms = |terms: gpush_api::LeaseTerms| terms.owner == LeaseOwner::Slurm;
    let has_owner = config.rules.iter().any(|rule| rule.lease.is_some_and(is_slurms));
    let Some(files) = Files::of(host) else {
        return vec![if has_owner {
            let message = "a rule of the config has owner = \"slurm\", but this host has no slurm.conf";
            let hint = "install Slurm, or remove the key `owner` from the rule and run `gpushctl config reload`";
            Finding::problem(Area::Slurm, message, hint).cause(format!("looked for {}", Files::paths(host).join(", ")))
        } else {
            Finding::ok(Area::Slurm, "Slurm is not used on this host")
        }];
    };
    let mut findings = hooks::examine(host, &files, has_owner);
    findings.extend(limits::examine(host, &files, config, has_owner));
    findings.extend(config.slurm_rules_with_dynamic_layout().map(|rule| {
        let message = format!("gpushd refuses every job on the GPUs of {rule}");
        let hint = "write a static layout, such as `layout = [\"1g.10gb*7\"]`, then run `gpushctl config reload` and \
                    `gpushctl apply`";
        let cause =
            "the rule has owner = \"slurm\" and layout = \"dynamic\", but Slurm knows MIG devices only from gres.conf";
        Finding::warning(Area::Slurm, message, hint).cause(cause)
    }));
    findings.extend(devices::examine(host, agent, &files, has_owner));
    if findings.is_empty() {
        findings.push(Finding::ok(Area::Slurm, format!("{} has the settings that gpush's hooks need", files.path)));
    }
    findings
}
