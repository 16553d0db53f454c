//! The terms of a request that describe its share, and the share that they give together.

use gpush_api::{LeaseShare, MemoryLimit, Percentage, Priority};

use super::{Key, RequestError, Spelling, mebibytes, number};

/// The terms of a request that describe its share.
#[derive(Debug, Default)]
pub(super) struct ShareTerms {
    /// The terms that select a kind, in the order of the request.
    kinds: Vec<Key>,
    profile: Option<String>,
    memory: Option<MemoryLimit>,
    slices: Option<u8>,
    percentage: Option<Percentage>,
    priority: Option<Priority>,
}

impl ShareTerms {
    /// Adds a term about the share.
    ///
    /// # Errors
    /// The value is wrong; the text says why.
    pub(super) fn add(&mut self, key: Key, value: Option<&str>) -> Result<(), String> {
        let text = value.unwrap_or_default();
        match key {
            Key::Mig => {
                self.profile = Some(super::profile::profile(text)?);
                self.kinds.push(key);
            }
            Key::Mps => {
                let percentage = value.map(|text| text.parse::<Percentage>().map_err(|error| error.why.to_owned()));
                self.percentage = percentage.transpose()?;
                self.kinds.push(key);
            }
            Key::Timeslice | Key::Whole => self.kinds.push(key),
            Key::Memory => self.memory = Some(mebibytes(value)?),
            Key::Slices => {
                let slices = number(value)?;
                self.slices = Some(u8::try_from(slices).map_err(|_| "no GPU has that many slices".to_owned())?);
            }
            Key::Priority => {
                self.priority = Some(text.parse::<Priority>().map_err(|error| error.why.to_owned())?);
            }
            Key::Gpu | Key::Count | Key::For | Key::Wait => {}
        }
        Ok(())
    }

    /// Builds the share from the terms.
    pub(super) fn build(self, spelling: Spelling) -> Result<LeaseShare, RequestError> {
        if let [first, second, ..] = self.kinds[..] {
            return Err(RequestError::Contradiction { first, second, spelling });
        }
        let kind = self.kinds.first().copied();
        let unfit = |key: Key| RequestError::Unfit { key, kind, spelling };
        let refuse = |given: bool, key: Key| if given { Err(unfit(key)) } else { Ok(()) };
        match kind {
            Some(Key::Mig) => {
                refuse(self.memory.is_some(), Key::Memory)?;
                refuse(self.slices.is_some(), Key::Slices)?;
                refuse(self.priority.is_some(), Key::Priority)?;
                Ok(LeaseShare::MigProfile { profile: self.profile.unwrap_or_default() })
            }
            Some(Key::Mps) => {
                refuse(self.slices.is_some(), Key::Slices)?;
                let (percentage, memory_limit_mib, priority) = (self.percentage, self.memory, self.priority);
                Ok(LeaseShare::Mps { percentage, memory_limit_mib, priority })
            }
            Some(kind @ (Key::Timeslice | Key::Whole)) => {
                refuse(self.memory.is_some(), Key::Memory)?;
                refuse(self.slices.is_some(), Key::Slices)?;
                refuse(self.priority.is_some(), Key::Priority)?;
                Ok(if kind == Key::Whole { LeaseShare::Whole {} } else { LeaseShare::Timeslice {} })
            }
            // `kinds` contains only keys that select a kind.
            Some(_) | None => {
                refuse(self.priority.is_some(), Key::Priority)?;
                match (self.memory, self.slices) {
                    (None, None) => Ok(LeaseShare::Default {}),
                    (memory, slices) => Ok(LeaseShare::MigSize { memory_mib: memory.map(MemoryLimit::mib), slices }),
                }
            }
        }
    }
}
