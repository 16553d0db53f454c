//! Access to the host: files, processes and programs below a root directory.
//!
//! The root is `/`. Tests use another directory and create faults there.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use gpush_host::proc::Status;

/// Maximum number of bytes read from a file.
const MOST: u64 = 64 << 10;

/// The examined host.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
    /// Value of the environment variable `SLURM_CONF`: a path of slurm.conf.
    slurm_conf: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Name of the process, at most 15 bytes.
    pub(crate) name: String,
}

impl Host {
    /// Returns the host with this root directory.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), slurm_conf: None }
    }

    /// Returns the host on which this process runs.
    #[must_use]
    pub fn local() -> Self {
        Self::at("/").with_slurm_conf(std::env::var("SLURM_CONF").ok())
    }

    /// Sets the value of the variable `SLURM_CONF`, which names slurm.conf.
    #[must_use]
    pub fn with_slurm_conf(self, path: Option<String>) -> Self {
        Self { slurm_conf: path.filter(|path| !path.is_empty()), ..self }
    }

    pub(crate) fn slurm_conf(&self) -> Option<&str> {
        self.slurm_conf.as_deref()
    }

    /// Returns a path of the host below the root directory. The leading `/` is optional.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the root directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the trimmed text of a file, at most 64 KiB; `None` if the file can't be read.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut bytes = Vec::new();
        fs::File::open(self.path(path)).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Returns whether a path exists.
    pub(crate) fn has(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }

    /// Returns the sorted names in a directory; empty if it can't be read.
    pub(crate) fn names(&self, directory: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path(directory)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Runs a program of the host and returns its standard output; `None` if it can't be run or fails.
    pub(crate) fn run(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Option<String> {
        let mut command = Command::new(self.path(program));
        let output = command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns all processes, sorted by pid.
    pub(crate) fn processes(&self) -> Vec<Process> {
        let pids = self.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
        let mut processes: Vec<Process> =
            pids.filter_map(|pid| Some(Process { pid, name: self.read(format!("proc/{pid}/comm"))? })).collect();
        processes.sort_by_key(|process| process.pid);
        processes
    }

    /// Returns the user id of a process; `None` if it can't be read, or if the process runs a setuid program, so that
    /// its four user ids differ.
    pub(crate) fn owner(&self, pid: u32) -> Option<u32> {
        let status = Status::parse(&format!("{}\n", self.read(format!("proc/{pid}/status"))?))?;
        (status.uids == [status.uid(); 4]).then_some(status.uid())
    }

    /// Returns an environment variable of a process; `None` if it is not set or can't be read.
    pub(crate) fn variable(&self, pid: u32, name: &str) -> Option<String> {
        let environment = self.read(format!("proc/{pid}/environ"))?;
        let found = environment.split('\0').find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='));
        found.map(str::to_owned)
    }
}
