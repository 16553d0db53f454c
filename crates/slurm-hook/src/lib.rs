//! The hooks of Slurm: Prolog, Epilog and TaskProlog.
//!
//! Slurm runs these hooks for every job, so they must start quickly. The program `gpush-slurm-hook` has no parser for
//! command lines and no runtime. `gpushctl slurm` has the same hooks for administrators who try them, and for scripts
//! that call gpushctl.
//!
//! Prolog and Epilog run as root. They write the files of jobs, because gpushd may lack the permission to give a file to
//! a user. TaskProlog runs as the user and only reads. If all is well, a hook prints nothing. If it fails or refuses the
//! job, it prints one line.
//!
//! | file | subject |
//! |---|---|
//! | `options` | the options of the program |
//! | `settings` | the config, with the options of a hook |
//! | `directory` | the files of jobs |
//! | `hook_start` | when Slurm started a hook |
//! | `call` | requests to gpushd within the time of the hook |
//! | `mapping` | the devices of a job |
//! | `prolog`, `epilog`, `task` | the hooks |
//! | `admin_comment` | what a job used, in Slurm's accounting |
//! | `report` | the lines that hooks print |

mod admin_comment;
mod call;
mod directory;
mod epilog;
mod hook_start;
mod mapping;
mod options;
mod prolog;
mod report;
mod settings;
mod slurmd;
mod task;

pub use self::{
    call::{Calls, Unanswered},
    directory::{BegunRun, Directory},
    epilog::run as epilog,
    mapping::{read_slurm_conf, slurm_conf_path},
    options::{Command, Options},
    prolog::run as prolog,
    report::{print_error, sentence},
    settings::Settings,
    task::run as task_prolog,
};

/// Exit status of a hook that has failed.
pub const FAILS: u8 = 1;

/// Returns a variable that Slurm sets. Replaces bytes that are not UTF-8; such a value comes from the user.
#[must_use]
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
