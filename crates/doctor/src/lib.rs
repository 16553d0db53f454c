//! Examines a host: finds what prevents gpush from working, and returns the command that solves
//! each problem.
//!
//! Each [`Area`] is a module with one function, which reads the host through [`Host`] and returns
//! findings. This crate never changes the host, and does not connect to gpushd: the caller passes
//! the result of asking gpushd as an [`Agent`]. If [`Service::find`] shows that gpushd is stopped, the caller must not
//! send a request, because this would start gpushd.
//!
//! | module | subject |
//! |---|---|
//! | `host` | access to files, processes and programs below a root directory |
//! | `finding` | areas, findings and their severity |
//! | `system` | kernel and systemd |
//! | `driver` | kernel module and library of the NVIDIA driver |
//! | `devices` | device nodes and which users may open them |
//! | `mps` | NVIDIA's MPS programs |
//! | `managers` | other programs that manage or hold the GPUs |
//! | `agent` | sockets, reachability, version and health of gpushd |
//! | `service` | state of gpushd's systemd units |
//! | `config` | the config file |
//! | `disk` | the state directory and its free space |
//! | `security` | SELinux and AppArmor |
//! | `user_limits` | limits of users that gpushd cannot carry over to their leases |
//! | `slurm` | files of Slurm, and its hooks |

mod agent;
mod config;
mod devices;
mod disk;
mod driver;
mod finding;
mod host;
mod managers;
mod mps;
mod security;
mod service;
mod slurm;
mod system;
mod user_limits;

pub use self::{
    agent::Agent,
    finding::{Area, Finding, Severity},
    host::Host,
    service::Service,
};

/// Returns the lines of Slurm's files that the area `slurm` reads, for a bug report; `None` when
/// the host has no slurm.conf. Omits all other lines, because they may contain passwords.
#[must_use]
pub fn slurm_excerpt(host: &Host) -> Option<String> {
    slurm::excerpt(host)
}

/// Returns the programs on a host that manage the GPUs in addition to gpushd, for `config check`.
#[must_use]
pub fn other_managers(host: &Host) -> Vec<Finding> {
    managers::other_managers(host)
}

/// Examines areas of a host, in the order of [`Area::ALL`].
///
/// A caller without root privileges cannot read everything. A finding names each check that is skipped for this reason.
#[must_use]
pub fn examine(host: &Host, agent: &Agent, areas: &[Area]) -> Vec<Finding> {
    let (config, mut of_config) = config::examine(host, agent);
    let examined = Area::ALL.into_iter().filter(|area| areas.contains(area));
    examined
        .flat_map(|area| match area {
            Area::System => system::examine(host),
            Area::Driver => driver::examine(host, &config),
            Area::Devices => devices::examine(host),
            Area::Mps => mps::examine(host, &config),
            Area::Managers => managers::examine(host),
            Area::Agent => agent::examine(host, agent),
            Area::Config => std::mem::take(&mut of_config),
            Area::Disk => disk::examine(host),
            Area::Security => security::examine(host, &config),
            Area::Slurm => slurm::examine(host, agent, &config),
        })
        .collect()
}
