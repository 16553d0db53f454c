//! `gpushctl slurm`: the hooks of Slurm, and commands for Slurm's administrators.
//!
//! The hooks are in the crate `gpush-slurm-hook`, whose program Slurm runs. gpushctl has them for administrators who try
//! them, and for scripts that call gpushctl.
//!
//! | file | subject |
//! |---|---|
//! | `reconcile` | leases of jobs that Slurm no longer knows |
//! | `usage` | what the leases of a job were used for |
//! | `gres_conf` | lines for gres.conf; the check of a request |

mod gres_conf;
mod reconcile;
mod usage;

use std::path::PathBuf;

use gpush_slurm_hook::{FAILS, Options, epilog, prolog, task_prolog};

use crate::{
    args::{Global, HookFiles, HookLimits, Slurm},
    exit::Outcome,
    output::Output,
};

pub(super) fn run(global: &Global, command: &Slurm, out: &Output) -> Outcome {
    match command {
        Slurm::Prolog { files, limits, gres_conf } => {
            Ok(prolog(&Options { gres_conf: gres_conf.clone(), ..options(global, files, Some(limits)) }))
        }
        Slurm::Epilog { files, limits } => Ok(epilog(&options(global, files, Some(limits)))),
        Slurm::TaskProlog { files } => {
            let answer = task_prolog(&options(global, files, None));
            // Write nothing to stderr, because Slurm also parses stderr.
            out.verbatim(answer.text.as_bytes())?;
            Ok(if answer.fails { FAILS } else { 0 })
        }
        Slurm::GresConf { which, node } => gres_conf::run(global, which, node.as_deref(), out),
        Slurm::CheckSpec { spec } => gres_conf::check(spec),
        Slurm::Reconcile { files, limits, squeue, cluster } => {
            reconcile::run(&options(global, files, Some(limits)), squeue, cluster.as_deref(), out)
        }
        Slurm::Usage { job } => super::ask(global, async |client| usage::run(client, job, out).await),
    }
}

/// Returns the options of a hook.
fn options(global: &Global, files: &HookFiles, limits: Option<&HookLimits>) -> Options {
    Options {
        socket: global.socket.clone(),
        config: files.config.clone(),
        dir: files.dir.clone(),
        deadline: limits.and_then(|limits| limits.deadline),
        gres_conf: None::<PathBuf>,
    }
}
