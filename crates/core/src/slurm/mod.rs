//! Slurm: the decisions of its hooks, and its files as slurmd reads them. All functions are pure:
//! the caller reads the files and the environment.
//!
//! ```text
//! Prolog's environment ──environment──► Job ─┬─request──► share, refusal, or none
//!                        gres.conf ──────────┴─devices──► UUIDs, minors
//!                                             │
//!                     ask gpushd ◄────────────┘
//!                         │
//!                      decide ──► exit status, and the file of the job (`file`) for TaskProlog
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `environment` | variables of Prolog and Epilog |
//! | `request` | the share that a job requests, from any source |
//! | `devices` | the devices that Slurm allocated |
//! | `numbering` | how slurmd numbers the devices of a node |
//! | [`GpuPlugin`] | how the running slurmd finds GPUs |
//! | `decide` | the exit status of a hook |
//! | `file` | the file of a job, and what TaskProlog prints |
//! | [`JobExtent`] | whether `scancel` ends more than what runs on this node |
//! | `job_files` | names of the files of jobs, and the file that belongs to a task |
//! | [`GresConf`] | gres.conf, which maps the index of a GRES device to its device files |
//! | [`SlurmConf`] | slurm.conf, with the files that it includes |
//! | [`node_gres()`] | `Gres=` of a node in slurm.conf |
//! | [`gres_lines()`] | the lines of gres.conf for a node |
//! | [`HostList`] | the notation `node[01-04,7]`, which Slurm uses for nodes and for device files |
//! | [`mod@lines`] | the notation that all files of Slurm have |

pub mod decide;
pub mod devices;
pub mod environment;
pub mod file;
mod gpu_plugin;
mod gres_conf;
mod gres_count;
mod gres_lines;
mod host_list;
mod job_extent;
pub mod job_files;
mod lines;
mod node_gres;
pub mod numbering;
pub mod request;
mod slurm_conf;

pub use self::{
    environment::Job,
    gpu_plugin::GpuPlugin,
    gres_conf::{AutoDetect, GresConf, GresConfError, GresDevice, GresProblem, GresRecord, Position, UnknownKey},
    gres_lines::{GresLines, gres_lines},
    host_list::{HostList, HostListError},
    job_extent::{JOB_EXTENT_FORMAT, JobExtent},
    lines::{KeyValue, LineError, LogicalLine, lines},
    node_gres::{NodeGres, node_gres},
    slurm_conf::{SLURM_CONF_PATHS, SlurmConf},
};
