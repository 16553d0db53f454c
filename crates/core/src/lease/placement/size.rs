//! Which MIG profiles fulfil a request.

use gpush_api::GpuProfile;

use crate::geometry::{Geometry, Profile};

/// The requested MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RequestedDevice {
    /// A device of this profile.
    Profile(String),
    /// The smallest device with at least these sizes.
    AtLeast {
        /// Minimum memory in MiB. Placement compares this value with the nominal memory of
        /// profiles.
        memory_mib: u64,
        /// Minimum number of compute slices.
        slices: u8,
    },
}

impl RequestedDevice {
    /// Returns whether a device fulfils the request if the device occupies a whole GPU instance of
    /// this profile.
    pub(super) fn is_met_by(&self, profile: &Profile) -> bool {
        match self {
            Self::Profile(name) => profile.profile.name == *name,
            Self::AtLeast { memory_mib, slices } => {
                memory_of(&profile.profile) >= *memory_mib && profile.profile.slices >= *slices
            }
        }
    }

    /// Returns whether a device that occupies a whole GPU instance of this profile is at least as large as the
    /// requested device.
    pub(super) fn fits_in(&self, geometry: &Geometry, profile: &Profile) -> bool {
        match self {
            Self::Profile(name) => geometry.named(name).is_some_and(|wanted| {
                profile.memory_slices() >= wanted.memory_slices() && profile.profile.slices >= wanted.profile.slices
            }),
            Self::AtLeast { .. } => self.is_met_by(profile),
        }
    }

    /// Returns whether a device that is only a part of its GPU instance fulfils the request. Such a
    /// device shares the memory of the GPU instance, so it fulfils only a request for its profile
    /// name.
    pub(super) fn is_met_by_part(&self, name: &str) -> bool {
        matches!(self, Self::Profile(wanted) if wanted == name)
    }
}

/// Returns the nominal memory of a profile in MiB: 10 GiB for `1g.10gb`. Drivers report less memory
/// than the nominal memory.
fn memory_of(profile: &GpuProfile) -> u64 {
    nominal_mib(&profile.name).unwrap_or(0).max(profile.memory_mib)
}

/// Parses the nominal memory in MiB from a profile name.
#[must_use]
pub fn nominal_mib(name: &str) -> Option<u64> {
    let (_, memory) = name.rsplit_once("g.")?;
    let digits = memory.split(|c: char| !c.is_ascii_digit()).next()?;
    memory[digits.len()..].starts_with("gb").then_some(())?;
    digits.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the sort key of a profile: memory slices, compute slices, engines. Small profiles come
/// first. Among profiles of the same size, those with fewer media engines come first.
pub(super) fn rank(profile: &Profile) -> [u32; 3] {
    let engines = profile.engines.iter().map(|engines| u32::from(*engines)).sum();
    [profile.memory_slices(), u32::from(profile.profile.slices), engines]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nominal_size_of_every_profile_is_read_from_its_name() {
        let sizes = [("1g.10gb", Some(10)), ("1c.3g.40gb", Some(40)), ("1g.10gb+me", Some(10)), ("4g.96gb", Some(96))];
        for (name, gib) in sizes {
            assert_eq!(nominal_mib(name), gib.map(|gib: u64| gib * 1024), "{name}");
        }
        for name in ["", "g.", "profile 19", "1g.gb", "1g.10", "1g.99999999999999999999gb"] {
            assert_eq!(nominal_mib(name), None, "{name}");
        }
        for key in gpush_geometry::KEYS {
            for profile in &Geometry::of_model(&gpush_geometry::model(key).unwrap()).profiles {
                assert!(nominal_mib(&profile.profile.name).is_some(), "{key} {}", profile.profile.name);
            }
        }
    }

    #[test]
    fn ten_gib_is_met_by_a_profile_that_reports_less() {
        let geometry = Geometry::of_model(&gpush_geometry::model("a100-80").unwrap());
        let wanted = RequestedDevice::AtLeast { memory_mib: 10 * 1024, slices: 1 };
        let smallest = geometry.named("1g.10gb").unwrap();
        assert!(smallest.profile.memory_mib < 10 * 1024 && wanted.is_met_by(smallest));
        let more = RequestedDevice::AtLeast { memory_mib: 10 * 1024 + 1, slices: 1 };
        assert!(!more.is_met_by(smallest) && more.is_met_by(geometry.named("1g.20gb").unwrap()));
    }
}
