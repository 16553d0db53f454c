//! The devices that Slurm allocated to a job, from gres.conf and slurm.conf.

use std::path::{Path, PathBuf};

use gpush_api::SlurmDevice;
use gpush_core::slurm::{
    GresConf, Job,
    devices::{devices, node_gres},
    numbering::Numbering,
};

use super::variable;

/// Path of slurm.conf if the variable `SLURM_CONF` is not set. gres.conf is in the same directory.
const SLURM_CONF: &str = "/etc/slurm/slurm.conf";

/// Why the devices of a job are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NotFound {
    /// One sentence.
    pub(super) text: String,
    /// Whether only jobs with these devices cannot be served. Otherwise the files of the node are wrong.
    pub(super) is_refusal: bool,
}

/// Finds the devices of a job. `gres_conf` is the path of gres.conf if it is not next to slurm.conf.
///
/// # Errors
/// Why they are not known.
pub(super) fn found(job: &Job, gres_conf: Option<&Path>) -> Result<Vec<SlurmDevice>, NotFound> {
    let wrong = |text: String| NotFound { text, is_refusal: false };
    let numbering = match job.gres.is_empty() {
        true => Numbering::Listed(GresConf::default()),
        false => numbering(job, gres_conf).map_err(wrong)?,
    };
    devices(job, &numbering).map_err(|error| NotFound {
        text: format!("{error}: print the lines of gres.conf with `gpushctl slurm gres-conf`"),
        is_refusal: error.is_refusal(),
    })
}

/// Reads how slurmd numbers the devices of the node.
fn numbering(job: &Job, gres_conf: Option<&Path>) -> Result<Numbering, String> {
    let slurm_conf = variable("SLURM_CONF").filter(|path| !path.is_empty());
    let slurm_conf = slurm_conf.map_or_else(|| PathBuf::from(SLURM_CONF), PathBuf::from);
    let path = gres_conf.map_or_else(|| slurm_conf.with_file_name("gres.conf"), Path::to_owned);
    let around = path.parent().unwrap_or(Path::new("/")).to_owned();
    let text = match std::fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        // MIG devices have UUIDs, and need no file.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    };
    let include = |name: &str| {
        let bytes = std::fs::read(around.join(name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let conf = GresConf::parse(&text, &job.node, include).map_err(|error| format!("{}: {error}", path.display()))?;
    let gres = std::fs::read_to_string(&slurm_conf).ok().and_then(|text| node_gres(&text, &job.node));
    Ok(Numbering::of(conf, gres.as_deref()))
}
