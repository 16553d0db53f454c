//! Driver versions: their order, their branches, and the CUDA version of each branch.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A driver version, such as `550.163.01`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DriverVersion {
    branch: u32,
    minor: u32,
    patch: u32,
    /// Whether the version has a third number. The versions of old branches have only two numbers.
    three: bool,
}

/// The error for a text that is not a driver version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no driver version; write it as 550.163.01")]
pub struct NoDriverVersion(String);

impl DriverVersion {
    /// A version that is new enough for every GPU model of the geometry data.
    pub const NEWEST: Self = Self::new(595, 58, 3);

    /// Creates a version from its three numbers.
    #[must_use]
    pub const fn new(branch: u32, minor: u32, patch: u32) -> Self {
        Self { branch, minor, patch, three: true }
    }

    /// Returns the branch, such as 550 for `550.163.01`.
    #[must_use]
    pub const fn branch(&self) -> u32 {
        self.branch
    }

    /// Returns the CUDA version of the branch, as `major * 1000 + minor * 10`. Source: NVIDIA's
    /// CUDA release notes.
    #[must_use]
    pub const fn cuda(&self) -> u32 {
        match self.branch {
            0..=417 => 10_000,
            418..=449 => 10_020,
            450..=459 => 11_000,
            460..=469 => 11_020,
            470..=509 => 11_040,
            510..=519 => 11_060,
            520..=524 => 11_080,
            525..=529 => 12_000,
            530..=534 => 12_010,
            535..=544 => 12_020,
            545..=549 => 12_030,
            550..=554 => 12_040,
            555..=559 => 12_050,
            560..=564 => 12_060,
            565..=569 => 12_070,
            570..=574 => 12_080,
            575..=579 => 12_090,
            580..=589 => 13_000,
            590..=594 => 13_010,
            595..=609 => 13_020,
            610..=614 => 13_030,
            _ => 13_040,
        }
    }
}

/// Parses `12.4` as 12040.
pub(super) fn cuda_number(text: &str) -> Option<u32> {
    let (major, minor) = text.split_once('.')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    (major < 100 && minor < 100).then_some(major * 1000 + minor * 10)
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.branch, self.minor)?;
        if self.three { write!(f, ".{:02}", self.patch) } else { Ok(()) }
    }
}

impl FromStr for DriverVersion {
    type Err = NoDriverVersion;

    fn from_str(text: &str) -> Result<Self, NoDriverVersion> {
        let wrong = || NoDriverVersion(text.to_owned());
        let parts: Vec<u32> = text
            .split('.')
            .map(|part| if part.len() <= 4 { part.parse().map_err(|_| wrong()) } else { Err(wrong()) })
            .collect::<Result<_, _>>()?;
        match *parts.as_slice() {
            [branch, minor] => Ok(Self { branch, minor, patch: 0, three: false }),
            [branch, minor, patch] => Ok(Self::new(branch, minor, patch)),
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for DriverVersion {
    type Error = NoDriverVersion;

    fn try_from(text: String) -> Result<Self, NoDriverVersion> {
        text.parse()
    }
}

impl From<DriverVersion> for String {
    fn from(version: DriverVersion) -> Self {
        version.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_order_by_number_and_read_back() {
        let read = |text: &str| text.parse::<DriverVersion>().unwrap();
        assert!(read("550.90.07") < read("550.163.01"));
        assert!(read("575.51.03") > read("550.163.01"));
        for text in ["550.163.01", "410.79", "525.60.13", "450.80.02"] {
            assert_eq!(read(text).to_string(), text);
        }
        for text in ["", "550", "550.x", "5.5.5.5", "-1.0", "550.163.99999999999"] {
            assert!(text.parse::<DriverVersion>().is_err(), "{text}");
        }
        assert_eq!(read("550.163.01").cuda(), 12_040);
        assert_eq!(cuda_number("12.4"), Some(12_040));
    }
}
