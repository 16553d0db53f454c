//! Names of GPUs and targets: [`GpuUuid`] and [`TargetUuid`] stay the same, a [`GpuIndex`] may change.
//!
//! A target is a whole GPU or a MIG device. So each [`GpuUuid`] is also a [`TargetUuid`], but not the other way round.
//! The types do not convert to text by themselves. Text becomes a name where it enters gpush: at the driver, in the
//! store, in JSON and on the command line.

use std::{borrow::Borrow, fmt, num::ParseIntError, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

/// Prefix of the UUID of a whole GPU.
const GPU_PREFIX: &str = "GPU-";

/// Prefix of the UUID of a MIG device.
const MIG_PREFIX: &str = "MIG-";

/// UUID of a whole GPU, `GPU-<uuid>`. It never changes.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuUuid(TargetUuid);

/// UUID of a target: `GPU-<uuid>` for a whole GPU, `MIG-<uuid>` for a MIG device.
///
/// A MIG device that is created again in the same slot gets the same UUID.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TargetUuid(Arc<str>);

/// Index of a GPU in the driver's list. It may change when a GPU is lost, or at the next start of the driver.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuIndex(pub u32);

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for TargetUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for GpuIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Error: the text is not a UUID of this kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotAUuid {
    /// The text does not name a whole GPU.
    Gpu,
    /// The text names neither a whole GPU nor a MIG device.
    Target,
}

impl fmt::Display for NotAUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "the UUID of a GPU begins with GPU-",
            Self::Target => "the UUID of a target begins with GPU- or MIG-",
        })
    }
}

impl std::error::Error for NotAUuid {}

/// Returns whether the text has the prefix and something after it.
fn has_prefix(text: &str, prefix: &str) -> bool {
    text.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty())
}

impl GpuUuid {
    /// Returns the text of the UUID.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Returns whether the UUID is not known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the whole GPU as a target.
    #[must_use]
    pub fn as_target(&self) -> &TargetUuid {
        &self.0
    }
}

impl TargetUuid {
    /// Returns the text of the UUID.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the UUID of the GPU; `None` if the target is a MIG device.
    #[must_use]
    pub fn to_gpu(&self) -> Option<GpuUuid> {
        has_prefix(self.as_str(), GPU_PREFIX).then(|| GpuUuid(self.clone()))
    }

    /// Returns whether the UUID is not known yet, because the MIG device does not exist yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<GpuUuid> for TargetUuid {
    fn from(gpu: GpuUuid) -> Self {
        gpu.0
    }
}

impl From<&GpuUuid> for TargetUuid {
    fn from(gpu: &GpuUuid) -> Self {
        gpu.0.clone()
    }
}

impl TryFrom<TargetUuid> for GpuUuid {
    type Error = NotAUuid;

    fn try_from(target: TargetUuid) -> Result<Self, NotAUuid> {
        if has_prefix(target.as_str(), GPU_PREFIX) { Ok(Self(target)) } else { Err(NotAUuid::Gpu) }
    }
}

impl FromStr for GpuUuid {
    type Err = NotAUuid;

    fn from_str(text: &str) -> Result<Self, NotAUuid> {
        if has_prefix(text, GPU_PREFIX) { Ok(Self::from(text)) } else { Err(NotAUuid::Gpu) }
    }
}

impl FromStr for TargetUuid {
    type Err = NotAUuid;

    fn from_str(text: &str) -> Result<Self, NotAUuid> {
        let is_uuid = has_prefix(text, GPU_PREFIX) || has_prefix(text, MIG_PREFIX);
        if is_uuid { Ok(Self::from(text)) } else { Err(NotAUuid::Target) }
    }
}

impl Borrow<TargetUuid> for GpuUuid {
    fn borrow(&self) -> &TargetUuid {
        &self.0
    }
}

impl AsRef<TargetUuid> for GpuUuid {
    fn as_ref(&self) -> &TargetUuid {
        &self.0
    }
}

impl PartialEq<GpuUuid> for TargetUuid {
    fn eq(&self, gpu: &GpuUuid) -> bool {
        *self == gpu.0
    }
}

impl PartialEq<TargetUuid> for GpuUuid {
    fn eq(&self, target: &TargetUuid) -> bool {
        self.0 == *target
    }
}

/// Implements what both kinds of UUIDs share. `From` takes text of the driver or of gpushd unchecked; `FromStr` checks
/// text of a user.
macro_rules! uuid_text {
    ($($name:ident: $from:expr;)*) => {
        $(
            impl From<&str> for $name {
                fn from(text: &str) -> Self {
                    let from: fn(&str) -> Self = $from;
                    from(text)
                }
            }

            impl From<String> for $name {
                fn from(text: String) -> Self {
                    Self::from(text.as_str())
                }
            }

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.pad(self.as_str())
                }
            }

            impl Borrow<str> for $name {
                fn borrow(&self) -> &str {
                    self.as_str()
                }
            }

            impl PartialEq<str> for $name {
                fn eq(&self, text: &str) -> bool {
                    self.as_str() == text
                }
            }

            impl PartialEq<&str> for $name {
                fn eq(&self, text: &&str) -> bool {
                    self.as_str() == *text
                }
            }
        )*
    };
}

uuid_text! {
    GpuUuid: |text| Self(TargetUuid::from(text));
    TargetUuid: |text| Self(Arc::from(text));
}

impl From<u32> for GpuIndex {
    fn from(index: u32) -> Self {
        Self(index)
    }
}

impl FromStr for GpuIndex {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for GpuIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq<u32> for GpuIndex {
    fn eq(&self, index: &u32) -> bool {
        self.0 == *index
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn uuid_text_with_wrong_prefix_is_refused() {
        assert_eq!("GPU-5d1b".parse(), Ok(GpuUuid::from("GPU-5d1b")));
        assert_eq!("GPU-5d1b".parse(), Ok(TargetUuid::from("GPU-5d1b")));
        assert_eq!("MIG-5d1b".parse(), Ok(TargetUuid::from("MIG-5d1b")));
        for text in ["", "GPU-", "MIG-5d1b", "gpu-5d1b", " GPU-5d1b", "0", "5d1b"] {
            assert_eq!(text.parse::<GpuUuid>(), Err(NotAUuid::Gpu), "{text}");
        }
        for text in ["", "GPU-", "MIG-", "mig-5d1b", " MIG-5d1b", "0", "0:1g.10gb@0"] {
            assert_eq!(text.parse::<TargetUuid>(), Err(NotAUuid::Target), "{text}");
        }
    }

    #[test]
    fn whole_gpu_is_a_target_and_mig_device_is_not_a_gpu() {
        let gpu = GpuUuid::from("GPU-5d1b");
        let target = TargetUuid::from(&gpu);
        assert_eq!(target, gpu);
        assert_eq!(target.to_gpu().as_ref(), Some(&gpu));
        assert_eq!(GpuUuid::try_from(target), Ok(gpu));
        let device = TargetUuid::from("MIG-5d1b");
        assert_eq!(device.to_gpu(), None);
        assert_eq!(GpuUuid::try_from(device), Err(NotAUuid::Gpu));
    }

    #[test]
    fn names_round_trip_through_text_and_json() {
        let (gpu, target) = (GpuUuid::from("GPU-5d1b"), TargetUuid::from("MIG-5d1b"));
        let json = serde_json::to_string(&(&gpu, &target, GpuIndex(4))).unwrap();
        assert_eq!(json, r#"["GPU-5d1b","MIG-5d1b",4]"#);
        assert_eq!(serde_json::from_str::<(GpuUuid, TargetUuid, GpuIndex)>(&json).unwrap(), (gpu, target, GpuIndex(4)));
        assert_eq!("4".parse(), Ok(GpuIndex(4)));
        assert!("GPU-4".parse::<GpuIndex>().is_err());
        assert_eq!(format!("{:>3}|{:<9}|", GpuIndex(4), GpuUuid::from("GPU-1")), "  4|GPU-1    |");
    }

    /// A map with these keys answers for text, so hash and order of a name must be those of its text.
    #[test]
    fn map_of_names_is_asked_with_text_or_target() {
        let gpus: BTreeMap<GpuUuid, u32> = ["GPU-b", "GPU-a"].map(|uuid| (GpuUuid::from(uuid), 1)).into();
        assert!(gpus.contains_key("GPU-a") && !gpus.contains_key("GPU-c"));
        assert!(gpus.contains_key(&TargetUuid::from("GPU-b")) && !gpus.contains_key(&TargetUuid::from("MIG-b")));
        assert!(gpus.keys().map(GpuUuid::as_str).eq(["GPU-a", "GPU-b"]));
    }
}
