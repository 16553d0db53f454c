//! Attributes the energy of a board to leases.
//!
//! ```text
//! counter difference ──┬── one lease on the whole GPU: all of it                                        board
//!                      └── idle energy: least power × time ──► by shares; the free part: unattributed
//!                          active energy ──► GPU instances by activity × share ──► one lease            gpm
//!                                            several leases: by the use of their processes              process
//!                                            or by the shares of the leases with a process              slices
//! ```
//!
//! Active energy from a time before these leases held their shares is unattributed: an earlier lease can have used it.
//! The part of a lease that ended since the last reading of the counter is unattributed too, because the totals of the
//! lease are final. Such a lease counts with its share if it may have worked.
//!
//! The parts of the leases and the unattributed part always add up to the counter difference, in whole millijoules.

mod attribute;
mod counter;
mod split;

pub(crate) use attribute::{EndedInWindow, EnergyWindow, HeldInWindow, InstanceActivity, OtherProcesses, attribute};
pub(crate) use counter::EnergyCounter;
pub use gpush_api::EnergyMethod;
pub use split::split;

#[cfg(test)]
mod tests;
