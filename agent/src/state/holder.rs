//! Who has claimed a GPU.

use std::fmt;

/// The operation that has claimed a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// An operation that gpushd is still planning. It has no id yet and changes nothing.
    Planning,
    /// The operation with this id, which has begun to change the GPU.
    Operation(String),
}

impl Holder {
    /// Returns whether the operation has begun to change the GPU.
    pub(crate) fn has_begun(&self) -> bool {
        match self {
            Self::Planning => false,
            Self::Operation(_) => true,
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planning => f.write_str("an operation that is being planned"),
            Self::Operation(id) => write!(f, "operation {id}"),
        }
    }
}
