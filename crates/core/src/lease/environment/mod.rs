//! The environment of the processes of a lease.
//!
//! Every value is typed: a UUID, a path that gpushd chose, or a number. No value contains text from
//! a user, so no value needs escaping in a shell, in a Docker command, or in Slurm's TaskProlog
//! protocol. The output formats quote the values anyway.

use std::fmt;

use gpush_api::{LeaseId, MemoryLimit, Percentage, Priority};

mod format;
mod variables;

pub use format::{Format, SHELL_FAILURE};
pub use variables::NotAnEnvironment;

/// Name of the variable that contains the lease.
pub const LEASE_VARIABLE: &str = "GPUSH_LEASE";

/// Maximum length, in bytes, of a path that nvidia-cuda-mps-control accepts. With a longer path,
/// nvidia-cuda-mps-control fails without a message.
const LONGEST_PIPE_DIRECTORY: usize = 87;

/// Name of the variable with the path of the file to which gpushd writes notices.
const NOTICE_VARIABLE: &str = "GPUSH_NOTICE";

/// Maximum length of the path of that file, in bytes.
const LONGEST_NOTICE_FILE: usize = 255;

/// UUID of a GPU or MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceUuid(String);

/// Pipe directory of an MPS daemon: an absolute path of at most 87 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PipeDirectory(String);

/// Path of the file with the notices of a lease: an absolute path of at most 255 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NoticeFile(String);

/// A value that cannot be part of an environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotAValue {
    /// The text is not the UUID of a device.
    Uuid,
    /// The text is not a valid pipe directory.
    PipeDirectory,
    /// The text is not a valid path of a file with notices.
    NoticeFile,
}

impl fmt::Display for NotAValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uuid => "the value is not the UUID of a GPU or MIG device",
            Self::PipeDirectory => "the pipe directory is not an absolute path of at most 87 plain characters",
            Self::NoticeFile => "the file with notices is not an absolute path of at most 255 plain characters",
        })
    }
}

impl std::error::Error for NotAValue {}

impl DeviceUuid {
    /// Accepts a text of the form `GPU-<uuid>` or `MIG-<uuid>`, or `MIG-GPU-<uuid>/<gi>/<ci>`, as drivers before R470
    /// name MIG devices.
    ///
    /// # Errors
    /// The text has another form.
    pub fn new(text: &str) -> Result<Self, NotAValue> {
        let is_id = |id: &str| (1..=3).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_digit());
        let with_ids = text.strip_prefix("MIG-GPU-").and_then(|rest| {
            let (uuid, ids) = rest.split_once('/')?;
            ids.split_once('/').filter(|(gi, ci)| is_id(gi) && is_id(ci)).map(|_| uuid)
        });
        let of_uuid = || text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let uuid = with_ids.or_else(of_uuid).ok_or(NotAValue::Uuid)?;
        let fits = |(at, b): (usize, u8)| match at {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        };
        let is_uuid = uuid.len() == 36 && uuid.bytes().enumerate().all(fits);
        if is_uuid { Ok(Self(text.to_owned())) } else { Err(NotAValue::Uuid) }
    }

    /// Returns the UUID.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl PipeDirectory {
    /// Accepts an absolute path that consists of letters, digits and `/_.-`, without `..`.
    ///
    /// # Errors
    /// The path has another form, or is too long for nvidia-cuda-mps-control.
    pub fn new(path: &str) -> Result<Self, NotAValue> {
        let is_short = path.len() <= LONGEST_PIPE_DIRECTORY;
        if is_short && is_plain_path(path) { Ok(Self(path.to_owned())) } else { Err(NotAValue::PipeDirectory) }
    }
}

impl NoticeFile {
    /// Accepts an absolute path that consists of letters, digits and `/_.-`, without `..`.
    ///
    /// # Errors
    /// The path has another form, or is too long.
    pub fn new(path: &str) -> Result<Self, NotAValue> {
        if path.len() <= LONGEST_NOTICE_FILE && is_plain_path(path) {
            Ok(Self(path.to_owned()))
        } else {
            Err(NotAValue::NoticeFile)
        }
    }
}

fn is_plain_path(path: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/_.-".contains(&b);
    path.starts_with('/') && path.bytes().all(plain) && path.split('/').all(|part| part != "..")
}

/// The variables that make processes clients of an MPS daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsClient {
    /// Pipe directory of the daemon.
    pub pipe_directory: PipeDirectory,
    /// Active thread percentage.
    pub percentage: Percentage,
    /// Maximum device memory that one process may pin.
    pub memory_limit: Option<MemoryLimit>,
    /// Priority of kernels.
    pub priority: Priority,
}

/// The environment of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Id of the lease.
    pub lease: LeaseId,
    /// Devices that the processes may use, in order.
    pub devices: Vec<DeviceUuid>,
    /// Variables for MPS clients; only in leases of kind `mps`.
    pub mps: Option<MpsClient>,
    /// File to which gpushd writes notices; `None` if gpushd could not create it.
    pub notice: Option<NoticeFile>,
}

impl Environment {
    /// Returns the names and values of the variables, in a fixed order.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let devices: Vec<&str> = self.devices.iter().map(DeviceUuid::as_str).collect();
        let mut variables = vec![
            ("CUDA_VISIBLE_DEVICES", devices.join(",")),
            // CUDA_DEVICE_ORDER has no effect on UUIDs. If a program uses indexes anyway, it gets
            // the order of nvidia-smi.
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
        ];
        if let Some(mps) = &self.mps {
            variables.push(("CUDA_MPS_PIPE_DIRECTORY", mps.pipe_directory.0.clone()));
            variables.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", mps.percentage.to_string()));
            // The daemon sees only one device, and that device has the number 0.
            let limit = mps.memory_limit.map(|limit| format!("0={limit}"));
            variables.extend(limit.map(|limit| ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit)));
            variables.push(("CUDA_MPS_CLIENT_PRIORITY", mps.priority.number().to_string()));
        }
        variables.extend(self.notice.as_ref().map(|file| (NOTICE_VARIABLE, file.0.clone())));
        variables.push((LEASE_VARIABLE, self.lease.to_string()));
        variables
    }

    /// Returns the variables that the caller must remove from its environment. If the caller has
    /// such variables, they belong to other leases or shares.
    #[must_use]
    pub fn unset(&self) -> Vec<&'static str> {
        let set: Vec<&str> = self.variables().iter().map(|(name, _)| *name).collect();
        ALL.into_iter().filter(|name| !set.contains(name)).collect()
    }

    /// Returns the environment in the given format. The text ends with a newline.
    #[must_use]
    pub fn text(&self, format: Format) -> String {
        format::text(self, format)
    }
}

/// All variables that an environment can set.
const ALL: [&str; 8] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    NOTICE_VARIABLE,
    LEASE_VARIABLE,
];

#[cfg(test)]
mod tests;
