//! Layouts: the instances that a MIG GPU shall have, as people write them.
//!
//! ```text
//! 3g.40gb          one GPU instance with one compute instance that takes all of it
//! 1g.10gb*2        two of them
//! 1g.10gb@4        one that starts at memory slice 4
//! 1c.3g.40gb*3     three one-slice compute instances, packed into as few 3g.40gb as hold them
//! 2g.20gb:mps      its MIG device is shared through MPS
//! ```

use std::fmt;

/// How the MIG devices of an entry are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Share {
    /// `:mps`
    Mps,
}

/// One entry of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Compute slices of the compute instance when it is not the whole GPU instance: the 1 of `1c.3g.40gb`.
    pub compute_slices: Option<u8>,
    /// GPU instance profile, `3g.40gb`.
    pub profile: String,
    /// Start in memory slices, when it is fixed.
    pub start: Option<u8>,
    /// How many; at least 1.
    pub count: u8,
    /// Sharing of the MIG device.
    pub share: Option<Share>,
}

/// A layout; order matters only to people.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Layout {
    /// Entries as written; empty only for the reserved layout `none`.
    pub entries: Vec<Entry>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(slices) = self.compute_slices {
            write!(f, "{slices}c.")?;
        }
        f.write_str(&self.profile)?;
        if let Some(start) = self.start {
            write!(f, "@{start}")?;
        }
        if self.count > 1 {
            write!(f, "*{}", self.count)?;
        }
        match self.share {
            Some(Share::Mps) => f.write_str(":mps"),
            None => Ok(()),
        }
    }
}
