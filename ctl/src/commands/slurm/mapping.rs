//! The devices that Slurm allocated to a job, from gres.conf and slurm.conf.

use std::path::{Path, PathBuf};

use gpush_api::SlurmDevice;
use gpush_core::slurm::{GresConf, Job, SlurmConf, devices::devices, numbering::Numbering};

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
/// Returns why the devices of the job are not known.
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
    let slurm_conf = slurm_conf_path();
    let path = gres_conf.map_or_else(|| slurm_conf.with_file_name("gres.conf"), Path::to_owned);
    let text = match std::fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        // MIG devices have UUIDs, and need no file.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    };
    let conf = GresConf::parse(&text, &job.node, included(&path));
    let conf = conf.map_err(|error| format!("{}: {error}", path.display()))?;
    // Without slurm.conf, the types follow the order of gres.conf.
    Ok(Numbering::of(conf, read_slurm_conf(&slurm_conf).node_gres(&job.node).as_deref()))
}

/// Returns the path of slurm.conf.
pub(super) fn slurm_conf_path() -> PathBuf {
    let path = variable("SLURM_CONF").filter(|path| !path.is_empty());
    path.map_or_else(|| PathBuf::from(SLURM_CONF), PathBuf::from)
}

/// Reads slurm.conf. A file that cannot be read has no settings.
pub(super) fn read_slurm_conf(path: &Path) -> SlurmConf {
    let text = std::fs::read(path).unwrap_or_default();
    SlurmConf::parse(&String::from_utf8_lossy(&text), included(path))
}

/// Returns a function that reads a file that `file` includes. A relative path is relative to the
/// directory of `file`.
fn included(file: &Path) -> impl Fn(&str) -> Option<String> {
    let directory = file.parent().unwrap_or(Path::new("/")).to_owned();
    move |name| {
        let bytes = std::fs::read(directory.join(name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}
