//! Files of Slurm, as slurmd reads them. Everything here is pure: the caller reads the files.
//!
//! - [`GresConf`]: gres.conf, which maps the index of a GRES device to its device files.
//! - [`HostList`]: `node[01-04,7]`, which Slurm uses for nodes and for device files.
//! - [`lines`]: the form that all files of Slurm have.

mod gres_conf;
mod host_list;
mod lines;

pub use self::{
    gres_conf::{AutoDetect, GresConf, GresConfError, GresDevice, GresProblem, GresRecord, Place, UnknownKey},
    host_list::{HostList, HostListError},
    lines::{KeyValue, LineError, LogicalLine, lines},
};
