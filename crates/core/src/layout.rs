//! Layouts: the desired instances of a MIG GPU, as users write them.
//!
//! ```text
//! layout  = entry {"," entry}            or a list of such strings, or the reserved word `none`
//! entry   = [Nc.]PROFILE[@START][*COUNT][:mps]      @START and *COUNT in either order
//! PROFILE = <slices>g.<memory>gb[+suffix|-suffix]
//!
//! 3g.40gb          one GPU instance with one compute instance that occupies all of it
//! 1g.10gb*2        two 1g.10gb
//! 1g.10gb@4        one 1g.10gb that starts at memory slice 4
//! 1c.3g.40gb*3     three one-slice compute instances, packed into as few 3g.40gb as possible
//! 1c.1g.20gb       the smaller of the two compute profiles of a double-memory 1g (Hopper and newer)
//! 2g.20gb:mps      one 2g.20gb whose MIG device is shared through MPS
//! none             no instances
//! ```
//!
//! Case is ignored, and the canonical form is lower case. This module does not check whether a GPU
//! *has* the profile; the planner checks that for each GPU. An error names the position in the text
//! and suggests a correction. Any user may send a layout, so parsing must be cheap: this module
//! refuses layouts that are larger than any GPU ([`MOST_IN_ALL`], [`LONGEST`]).

use std::{collections::BTreeMap, fmt};

use gpush_api::LayoutSource;

mod before;
pub mod edit;
mod grammar;

pub use self::{
    before::{equals_rule_layout, layout_before},
    grammar::LayoutError,
};

/// The reserved word for the empty layout.
pub const NONE: &str = "none";

/// The reserved word for a layout whose instances gpushd creates on demand for leases. Only config
/// rules may use this word.
pub const DYNAMIC: &str = "dynamic";

/// Maximum count of one entry. No GPU has more GPU instances than this.
pub const MOST: u8 = 8;

/// Maximum number of entries, and of instances in all entries together. No GPU can have so many
/// instances: the hardware allows at most 7 GPU instances with up to 8 compute instances each.
pub const MOST_IN_ALL: usize = 64;

/// Maximum total length of a layout's texts, in bytes.
pub const LONGEST: usize = 4096;

/// How the MIG devices of an entry are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Share {
    /// `:mps`
    Mps,
}

/// One entry of a layout.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Number of compute slices of the compute instance, as written: the 1 of `1c.3g.40gb`. `None`
    /// if one compute instance occupies the whole GPU instance.
    pub compute_slices: Option<u8>,
    /// GPU instance profile, `3g.40gb`.
    pub profile: String,
    /// First memory slice, if the user wrote one.
    pub start: Option<u8>,
    /// Number of instances; at least 1.
    pub count: u8,
    /// How the MIG device is shared; `None` if it is not shared.
    pub share: Option<Share>,
}

/// A layout. The order of its entries has no effect.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Layout {
    /// Entries as written; empty only for the reserved layout `none`.
    pub entries: Vec<Entry>,
}

impl Layout {
    /// Returns the reserved layout `none`. With this layout, gpushd destroys idle instances and
    /// creates no instances.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns whether this is the reserved layout `none`.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.entries.is_empty()
    }

    /// Parses a layout from one comma-separated text.
    ///
    /// # Errors
    /// The first problem, with its position in the text.
    pub fn parse(text: &str) -> Result<Self, LayoutError> {
        Self::parse_list(&[text])
    }

    /// Parses a layout from a list of texts. Each text contains one or more entries, separated by
    /// commas.
    ///
    /// # Errors
    /// The first problem, with its text and its position in that text.
    pub fn parse_list<S: AsRef<str>>(texts: &[S]) -> Result<Self, LayoutError> {
        grammar::layout(texts).map_err(|mut errors| errors.swap_remove(0))
    }

    /// Parses like [`Layout::parse_list`], but reports all problems at once.
    ///
    /// # Errors
    /// All problems, in order; never an empty list.
    pub fn parse_all<S: AsRef<str>>(texts: &[S]) -> Result<Self, Vec<LayoutError>> {
        grammar::layout(texts)
    }

    /// Returns the entries in canonical text, as the API shows them. Returns `["none"]` for the
    /// reserved layout.
    #[must_use]
    pub fn canonical(&self) -> Vec<String> {
        if self.is_none() {
            return vec![NONE.to_owned()];
        }
        self.entries.iter().map(ToString::to_string).collect()
    }

    /// Returns the number of instances of each entry. The key is the text of the entry without its count. Two layouts with
    /// equal numbers are the same.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<String, u32> {
        let mut counts = BTreeMap::new();
        for entry in &self.entries {
            let one = Entry { count: 1, ..entry.clone() };
            *counts.entry(one.to_string()).or_default() += u32::from(entry.count);
        }
        counts
    }

    /// Returns whether any of these entries requests a shared MIG device. Returns `false` if an entry is invalid.
    #[must_use]
    pub fn shares_devices<S: AsRef<str>>(entries: &[S]) -> bool {
        Self::parse_list(entries).is_ok_and(|layout| layout.shared().is_some())
    }

    /// Returns the first entry whose MIG device is shared.
    #[must_use]
    pub fn shared(&self) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.share.is_some())
    }
}

/// Returns whether a text names a layout or lists entries. A name begins with a letter, and an
/// entry begins with a digit, so there is no ambiguity.
#[must_use]
pub fn source_of(text: &str) -> LayoutSource {
    let text = text.trim();
    if is_name(text) {
        LayoutSource::Named(text.to_owned())
    } else {
        LayoutSource::Entries(text.split(',').map(|entry| entry.trim().to_owned()).collect())
    }
}

/// Returns whether a text can be the name of a layout: a letter, then letters, digits, `-` and `_`.
#[must_use]
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.len() <= 64
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
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

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.canonical().join(","))
    }
}

#[cfg(test)]
mod tests;
