//! Keys and values as a user writes them, checked.

use super::{
    RequestError,
    key::{Arity, Key, Spelling},
};
use crate::{nearest::nearest, quote::Quoted};

impl Key {
    /// Parses the name of a key.
    pub(super) fn parse(text: &str) -> Result<Self, RequestError> {
        let found = Self::ALL.into_iter().find(|key| key.name() == text);
        found.ok_or_else(|| RequestError::UnknownKey {
            key: Quoted(text).to_string(),
            nearest: nearest(text, Self::of_slurm().map(Self::name)),
        })
    }

    /// Returns the value of a term. Checks whether the key requires or allows a value.
    pub(super) fn check_value(self, value: Option<&str>, spelling: Spelling) -> Result<Option<&str>, RequestError> {
        match (self.arity(), value) {
            (Arity::None, Some(_)) => Err(RequestError::UnexpectedValue { key: self, spelling }),
            (Arity::Required, None | Some("")) | (Arity::Optional, Some("")) => {
                Err(RequestError::MissingValue { key: self, spelling })
            }
            (Arity::None | Arity::Optional, None) | (Arity::Optional | Arity::Required, Some(_)) => Ok(value),
        }
    }
}
