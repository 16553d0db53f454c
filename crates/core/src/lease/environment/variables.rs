//! Parses the names and values of an environment to typed values.
//!
//! gpushd sends the environment of a lease as names and values. A client parses these names and
//! values to an [`Environment`] before it prints or sets them, so that only plain values reach a
//! shell.

use std::fmt;

use gpush_api::{MemoryLimit, Percentage, Priority};

use super::{DeviceUuid, Environment, LEASE_VARIABLE, MpsClient, NOTICE_VARIABLE, NoticeFile, PipeDirectory};

/// Error: a variable of the environment is missing or unknown, or its value has the wrong type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAnEnvironment {
    /// Name of the variable that is missing, unknown or wrong.
    pub name: String,
}

impl fmt::Display for NotAnEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the environment variable {:?} is missing, unknown or has a wrong value", self.name)
    }
}

impl std::error::Error for NotAnEnvironment {}

impl Environment {
    /// Parses names and values in any order. This is the inverse of [`Environment::variables`].
    ///
    /// # Errors
    /// A variable is missing or unknown, or its value has the wrong type.
    pub fn from_variables(variables: &[(String, String)]) -> Result<Self, NotAnEnvironment> {
        let wrong = |name: &str| NotAnEnvironment { name: name.to_owned() };
        if let Some((name, _)) = variables.iter().find(|(name, _)| !super::ALL.contains(&name.as_str())) {
            return Err(wrong(name));
        }
        let value = |name: &str| {
            let found = variables.iter().find(|(one, _)| one == name);
            found.map(|(_, value)| value.as_str()).ok_or_else(|| wrong(name))
        };
        let list = value("CUDA_VISIBLE_DEVICES")?;
        let devices: Result<_, _> = list.split(',').map(DeviceUuid::new).collect();
        let devices = devices.map_err(|_| wrong("CUDA_VISIBLE_DEVICES"))?;
        let lease = value(LEASE_VARIABLE)?.parse().map_err(|_| wrong(LEASE_VARIABLE))?;
        let mps = match value("CUDA_MPS_PIPE_DIRECTORY") {
            Err(_) => None,
            Ok(path) => Some(MpsClient {
                pipe_directory: PipeDirectory::new(path).map_err(|_| wrong("CUDA_MPS_PIPE_DIRECTORY"))?,
                percentage: value("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")?
                    .parse::<Percentage>()
                    .map_err(|_| wrong("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))?,
                memory_limit: value("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").ok().map(memory_limit).transpose()?,
                priority: value("CUDA_MPS_CLIENT_PRIORITY")?
                    .parse()
                    .ok()
                    .and_then(Priority::of_number)
                    .ok_or_else(|| wrong("CUDA_MPS_CLIENT_PRIORITY"))?,
            }),
        };
        let notice = value(NOTICE_VARIABLE).ok().map(NoticeFile::new).transpose();
        let notice = notice.map_err(|_| wrong(NOTICE_VARIABLE))?;
        Ok(Self { lease, devices, mps, notice })
    }
}

/// Parses `0=8192M`: the limit of device 0, the only device that the daemon sees.
fn memory_limit(value: &str) -> Result<MemoryLimit, NotAnEnvironment> {
    let limit = value.strip_prefix("0=").and_then(|limit| limit.parse().ok());
    limit.ok_or_else(|| NotAnEnvironment { name: "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT".to_owned() })
}
