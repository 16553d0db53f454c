//! Lease ids.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// Id of a lease: `L` and a number, such as `L17`. In JSON it is a string.
///
/// Numbers increase. Within a boot, no number is used twice, even if the database was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

/// Error: the text is not a lease id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotALeaseId;

impl fmt::Display for NotALeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a lease id is L and a number, such as L17")
    }
}

impl std::error::Error for NotALeaseId {}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "L{}", self.0)
    }
}

impl FromStr for LeaseId {
    type Err = NotALeaseId;

    /// Reads `L17` or `l17`. Refuses a bare number, because it could also be the index of a GPU.
    fn from_str(text: &str) -> Result<Self, NotALeaseId> {
        let digits = text.strip_prefix(['L', 'l']).ok_or(NotALeaseId)?;
        // `parse` would accept a sign, as in `+17`. Leading zeros would give one lease several
        // names.
        let is_number = digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        if is_number { digits.parse().map(Self).map_err(|_| NotALeaseId) } else { Err(NotALeaseId) }
    }
}

impl Serialize for LeaseId {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LeaseId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lease_id_other_notation_is_refused() {
        assert_eq!("l17".parse(), Ok(LeaseId(17)));
        for text in
            ["", "L", "17", "L017", "L0", "L+1", "L-1", "L 1", "L1 ", "LL1", "L1x", "L99999999999999999999", "Ｌ1"]
        {
            assert_eq!(text.parse::<LeaseId>(), Err(NotALeaseId), "{text}");
        }
    }

    proptest! {
        #[test]
        fn lease_id_text_and_json_round_trip(number in 1..u64::MAX) {
            let id = LeaseId(number);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
            let json = serde_json::to_string(&id).unwrap();
            prop_assert_eq!(serde_json::from_str::<LeaseId>(&json).unwrap(), id);
        }
    }
}
