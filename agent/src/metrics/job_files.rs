//! Files with the Slurm jobs on each GPU. Exporters that know no leases attach these jobs to their own series.
//!
//! | directory | file | content | read by |
//! |---|---|---|---|
//! | `dcgm` | `GPU`, or `GPU.INSTANCE` with MIG: index and GPU instance id | ids of the jobs, one in each line | dcgm-exporter, `--hpc-job-mapping-dir` |
//! | `jobstats` | UUID of the GPU or MIG device | `JOB UID`, if only one job has it | the exporter of jobstats, in `/run/gpustat` |
//!
//! A file is replaced by renaming, so a reader never sees a part of it. A file of `dcgm` without jobs becomes empty and
//! stays: dcgm-exporter fails a scrape if a file disappears in the meantime. A file of `jobstats` is removed.
//!
//! The directories exist only while `metrics.job_files` is true.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use gpush_api::{GpuIndex, LeaseBinding};
use gpush_host::subtask;

use crate::state::{HostState, context::HostContext};

const DCGM: &str = "dcgm";
const JOBSTATS: &str = "jobstats";

/// Name of a file in one of the directories, and its content.
type Files = BTreeMap<String, String>;

/// The files of both directories.
#[derive(Debug, Default, PartialEq, Eq)]
struct JobFiles {
    dcgm: Files,
    jobstats: Files,
}

/// Keeps the files below `directory` as the leases are, until gpushd stops.
pub(crate) async fn run(context: Arc<HostContext>, directory: PathBuf) {
    let mut snapshots = context.state.watch();
    let mut written: Option<JobFiles> = None;
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        // Without GPUs, gpushd does not know the index of a GPU.
        let wanted = host.config.metrics.job_files.then(|| JobFiles::of(&host));
        let is_known = !host.gpus.is_empty() || wanted.is_none();
        if is_known && wanted != written {
            let (directory, next) = (directory.clone(), wanted.unwrap_or_default());
            let is_wanted = host.config.metrics.job_files;
            let result = subtask::blocking(move || {
                let result = if is_wanted { next.write(&directory) } else { remove(&directory) };
                (result.map_err(|error| (directory, error)), next)
            });
            match result.await {
                Some((Ok(()), now)) => written = is_wanted.then_some(now),
                Some((Err((directory, error)), _)) => {
                    tracing::warn!("cannot write the jobs of the GPUs into {}: {error}", directory.display());
                    // The next change of the leases tries again.
                    written = None;
                }
                None => return,
            }
        }
        tokio::select! {
            () = context.stopping.cancelled() => return,
            changed = snapshots.changed() => if changed.is_err() { return },
        }
    }
}

impl JobFiles {
    /// Returns the files for the leases of jobs that hold capacity.
    fn of(host: &HostState) -> Self {
        let mut on_gpus: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        let mut on_targets: BTreeMap<String, BTreeSet<(u32, u32)>> = BTreeMap::new();
        for lease in host.leases.holding() {
            let LeaseBinding::Job { job, .. } = lease.record.binding else { continue };
            for member in &lease.record.members {
                on_targets.entry(member.target.to_string()).or_default().insert((job, lease.record.holder.uid));
                let Some(gpu) = host.gpu(&member.gpu_uuid).map(|one| &one.gpu) else { continue };
                let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
                let gi = instances.into_iter().find_map(|instance| {
                    let has = instance.compute.iter().any(|device| device.uuid.as_ref() == Some(&member.target));
                    has.then_some(instance.id)
                });
                on_gpus.entry(dcgm_name(gpu.index, gi)).or_default().insert(job);
            }
        }
        let lines = |jobs: BTreeSet<u32>| jobs.into_iter().map(|job| format!("{job}\n")).collect();
        let only = |jobs: BTreeSet<(u32, u32)>| match jobs.into_iter().collect::<Vec<_>>()[..] {
            [(job, uid)] => Some(format!("{job} {uid}\n")),
            _ => None,
        };
        Self {
            dcgm: on_gpus.into_iter().map(|(name, jobs)| (name, lines(jobs))).collect(),
            jobstats: on_targets.into_iter().filter_map(|(name, jobs)| Some((name, only(jobs)?))).collect(),
        }
    }

    /// Writes the files. Exporters run as users without privileges, so everybody may read them.
    fn write(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
        let (dcgm, jobstats) = (directory.join(DCGM), directory.join(JOBSTATS));
        for (directory, files) in [(&dcgm, &self.dcgm), (&jobstats, &self.jobstats)] {
            fs::create_dir_all(directory)?;
            fs::set_permissions(directory, Permissions::from_mode(0o755))?;
            for (name, content) in files {
                replace(directory, name, content)?;
            }
        }
        for name in others(&dcgm, &self.dcgm)? {
            replace(&dcgm, &name, "")?;
        }
        for name in others(&jobstats, &self.jobstats)? {
            fs::remove_file(jobstats.join(name))?;
        }
        Ok(())
    }
}

fn dcgm_name(gpu: GpuIndex, gi: Option<u32>) -> String {
    match gi {
        Some(gi) => format!("{gpu}.{gi}"),
        None => gpu.to_string(),
    }
}

/// Replaces a file by renaming, unless it has this content.
fn replace(directory: &Path, name: &str, content: &str) -> io::Result<()> {
    let path = directory.join(name);
    if fs::read_to_string(&path).is_ok_and(|present| present == content) {
        return Ok(());
    }
    // An exporter reads no file whose name begins with a dot.
    let new = directory.join(format!(".{name}"));
    fs::write(&new, content)?;
    fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    fs::rename(&new, &path)
}

/// Returns the names of the files in a directory that are not in `files`.
fn others(directory: &Path, files: &Files) -> io::Result<Vec<String>> {
    let names = fs::read_dir(directory)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| !files.contains_key(name)).filter(|name| !name.starts_with('.')).collect())
}

fn remove(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[(&str, &str)]) -> Files {
        names.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect()
    }

    fn read(directory: &Path) -> Files {
        let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
        let content = |entry: &fs::DirEntry| fs::read_to_string(entry.path()).unwrap();
        entries.map(|entry| (entry.file_name().into_string().unwrap(), content(&entry))).collect()
    }

    #[test]
    fn file_without_jobs_is_empty_for_dcgm_and_removed_for_jobstats() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("jobs");
        let both =
            JobFiles { dcgm: files(&[("0", "7\n9\n"), ("1.4", "8\n")]), jobstats: files(&[("MIG-1", "8 1000\n")]) };
        both.write(&directory).unwrap();
        assert_eq!(read(&directory.join(DCGM)), both.dcgm);
        assert_eq!(read(&directory.join(JOBSTATS)), both.jobstats);
        let later = JobFiles { dcgm: files(&[("0", "9\n")]), jobstats: files(&[("GPU-0", "9 1001\n")]) };
        later.write(&directory).unwrap();
        assert_eq!(read(&directory.join(DCGM)), files(&[("0", "9\n"), ("1.4", "")]));
        assert_eq!(read(&directory.join(JOBSTATS)), later.jobstats);
        remove(&directory).unwrap();
        remove(&directory).unwrap();
        assert!(!directory.exists());
    }
}
