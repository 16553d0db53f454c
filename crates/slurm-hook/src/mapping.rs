//! Finds the devices that Slurm allocated to a job, with gres.conf and slurm.conf.

use std::path::{Path, PathBuf};

use gpush_api::SlurmDevice;
use gpush_core::slurm::{
    GresConf, Job, SLURM_CONF_PATHS, SlurmConf,
    devices::{devices, has_indexes},
    numbering::Numbering,
};

use crate::{slurmd, variable};

/// Why the devices of a job cannot be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotFound {
    /// One sentence.
    pub(crate) text: String,
    /// What the administrator can do. If the job is refused: what its user can do.
    pub(crate) hint: &'static str,
    /// Whether the problem concerns only this job. If `true`, gpush can still serve jobs with other devices. If
    /// `false`, the files of the node are wrong.
    pub(crate) is_refusal: bool,
}

/// Finds the devices of a job. `gres_conf` is the path of gres.conf if it is not next to slurm.conf.
///
/// # Errors
/// If the devices cannot be found. The error says why.
pub(crate) fn found(job: &Job, gres_conf: Option<&Path>) -> Result<Vec<SlurmDevice>, NotFound> {
    let wrong = |text: String| NotFound {
        text,
        hint: "check the files with `gpushctl doctor --only slurm`",
        is_refusal: false,
    };
    let numbering = match has_indexes(job) {
        true => numbering(job, gres_conf).map_err(wrong)?,
        false => Numbering::Listed(GresConf::default()),
    };
    devices(job, &numbering).map_err(|error| NotFound {
        text: error.to_string(),
        hint: match error.is_refusal() {
            true => "ask the administrator of the node to run `gpushctl doctor --only slurm`",
            false => "print the lines of gres.conf with `gpushctl slurm gres-conf`",
        },
        is_refusal: error.is_refusal(),
    })
}

/// Finds out how slurmd numbers the devices of the node.
fn numbering(job: &Job, gres_conf: Option<&Path>) -> Result<Numbering, String> {
    let slurm_conf = slurm_conf_path();
    let path = gres_conf.map_or_else(|| slurm_conf.with_file_name("gres.conf"), Path::to_owned);
    let text = match std::fs::read(&path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        // A missing gres.conf is not an error: MIG devices can be found by their UUIDs.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    };
    let conf = GresConf::parse(&text, &job.node, included(&slurm_conf));
    let conf = conf.map_err(|error| format!("{}: {error}", path.display()))?;
    // If slurm.conf cannot be read, use the order of types in gres.conf.
    let gres = read_slurm_conf(&slurm_conf).node_gres(&job.node);
    Ok(Numbering::of(conf, gres.as_deref(), slurmd::gpu_plugin()))
}

/// Returns the path of slurm.conf: the variable `SLURM_CONF`, else the first of the usual paths that exists.
#[must_use]
pub fn slurm_conf_path() -> PathBuf {
    if let Some(path) = variable("SLURM_CONF").filter(|path| !path.is_empty()) {
        return path.into();
    }
    let existing = SLURM_CONF_PATHS.into_iter().find(|path| Path::new(path).exists());
    existing.unwrap_or(SLURM_CONF_PATHS[0]).into()
}

/// Reads slurm.conf. If the file cannot be read, returns no settings.
#[must_use]
pub fn read_slurm_conf(path: &Path) -> SlurmConf {
    let text = std::fs::read(path).unwrap_or_default();
    SlurmConf::parse(&String::from_utf8_lossy(&text), included(path))
}

/// Returns a function that reads a file which `file` includes. Relative paths start at the directory of `file`.
fn included(file: &Path) -> impl Fn(&str) -> Option<String> {
    let directory = file.parent().unwrap_or(Path::new("/")).to_owned();
    move |name| {
        let bytes = std::fs::read(directory.join(name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}
