//! Values for MPS daemons and clients. gpush validates them, because the daemon accepts invalid
//! values without an error.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// Error: the text is not a valid value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadValue {
    /// Text that was read.
    pub text: String,
    /// Description of the expected value.
    pub what: &'static str,
    /// What is wrong, or what is allowed.
    pub why: &'static str,
}

impl fmt::Display for BadValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a valid {}: {}", self.text, self.what, self.why)
    }
}

impl std::error::Error for BadValue {}

/// An active thread percentage: more than 0, at most 100, with at most one decimal. In JSON it is a number: `25`,
/// `12.5`.
///
/// Only one decimal is allowed. The daemon reports only one, so gpushd could not verify further decimals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percentage {
    tenths: u16,
}

impl Percentage {
    /// 100 %, which is the daemon's default.
    pub const ALL: Self = Self { tenths: 1000 };

    /// Converts tenths of a percent, 1 to 1000.
    #[must_use]
    pub fn of_tenths(tenths: u16) -> Option<Self> {
        (1..=1000).contains(&tenths).then_some(Self { tenths })
    }

    /// Returns tenths of a percent.
    #[must_use]
    pub fn tenths(self) -> u16 {
        self.tenths
    }
}

impl fmt::Display for Percentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tenths / 10, self.tenths % 10) {
            (whole, 0) => write!(f, "{whole}"),
            (whole, tenth) => write!(f, "{whole}.{tenth}"),
        }
    }
}

impl FromStr for Percentage {
    type Err = BadValue;

    /// Reads `25`, `12.5` or `50%`.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let bad = |why| BadValue { text: text.to_owned(), what: "active thread percentage", why };
        let number = text.trim();
        let number = number.strip_suffix('%').unwrap_or(number).trim_end();
        let (whole, tenth) = match number.split_once('.') {
            None => (number, "0"),
            Some((_, tenth)) if tenth.len() != 1 => return Err(bad("write at most one decimal, as in 12.5")),
            Some(parts) => parts,
        };
        // `parse` would accept a sign, as in `+25`.
        let digits = |text: &str| !text.is_empty() && text.len() <= 3 && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(tenth) {
            return Err(bad("write a number that is more than 0 and at most 100"));
        }
        let tenths = whole.parse::<u16>().ok().zip(tenth.parse::<u16>().ok()).map(|(whole, tenth)| whole * 10 + tenth);
        tenths.and_then(Self::of_tenths).ok_or_else(|| bad("the percentage must be more than 0 and at most 100"))
    }
}

impl Serialize for Percentage {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match (self.tenths / 10, self.tenths % 10) {
            (whole, 0) => to.serialize_u16(whole),
            _ => to.serialize_f64(f64::from(self.tenths) / 10.0),
        }
    }
}

impl<'de> Deserialize<'de> for Percentage {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // Parse the text of the number, because a float cannot represent 33.3 exactly.
        serde_json::Number::deserialize(from)?.to_string().parse().map_err(D::Error::custom)
    }
}

/// A limit of pinned device memory: a whole number of MiB, at least 1. In JSON it is the number of
/// MiB.
///
/// gpushd passes the limit to the daemon only in the form `NM`, such as `1536M`. The daemon would
/// read `1.5G`, `1 G` and `1T` as 1 MiB, and `512K` as 512 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryLimit {
    mib: u64,
}

/// Maximum limit in MiB: 16 TiB. It is more than any GPU has, and too small to overflow in the
/// daemon.
const MOST_MIB: u64 = 16 << 20;

const NONE: &str = "write 1M or more, or leave the limit out";
const TOO_MUCH: &str = "no GPU has that much memory; to set no limit, leave the value out";

impl MemoryLimit {
    /// Converts a number of MiB, 1 MiB to 16 TiB.
    #[must_use]
    pub fn of_mib(mib: u64) -> Option<Self> {
        (1..=MOST_MIB).contains(&mib).then_some(Self { mib })
    }

    /// Returns the number of MiB.
    #[must_use]
    pub fn mib(self) -> u64 {
        self.mib
    }
}

impl Serialize for MemoryLimit {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.mib)
    }
}

impl<'de> Deserialize<'de> for MemoryLimit {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mib = u64::deserialize(from)?;
        let bad = || D::Error::custom(format!("{mib} MiB is not a memory limit: write 1 to {MOST_MIB}"));
        Self::of_mib(mib).ok_or_else(bad)
    }
}

impl fmt::Display for MemoryLimit {
    /// Writes the form that the daemon receives: `1536M`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}M", self.mib)
    }
}

impl FromStr for MemoryLimit {
    type Err = BadValue;

    /// Reads `8G`, `8GB`, `8Gi`, `8 GiB`, `1536M`, `1536 MiB`: whole numbers. As in the names of MIG profiles, `GB` means GiB.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let bad = |why| BadValue { text: text.to_owned(), what: "memory limit", why };
        let upper = text.trim().to_ascii_uppercase();
        let split = upper.find(|c: char| !c.is_ascii_digit()).unwrap_or(upper.len());
        let (number, unit) = upper.split_at(split);
        let factor = match unit.trim_start() {
            "M" | "MB" | "MI" | "MIB" => 1,
            "G" | "GB" | "GI" | "GIB" => 1024,
            "" if !number.is_empty() && number.bytes().all(|digit| digit == b'0') => return Err(bad(NONE)),
            "" => return Err(bad("add the unit: 8G or 8192M")),
            unit if unit.starts_with('.') => return Err(bad("write whole GiB or MiB: 1536M for 1.5 GiB")),
            _ => return Err(bad("write whole MiB or GiB, such as 8192M or 8G")),
        };
        let number: u64 = number.parse().map_err(|_| bad("write whole MiB or GiB, such as 8192M or 8G"))?;
        let mib = number.checked_mul(factor).ok_or_else(|| bad(TOO_MUCH))?;
        match Self::of_mib(mib) {
            Some(limit) => Ok(limit),
            None if mib == 0 => Err(bad(NONE)),
            None => Err(bad(TOO_MUCH)),
        }
    }
}

/// Priority of a client's kernels. It is a hint to the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Priority {
    /// 0: the priority of processes without MPS.
    #[default]
    Normal,
    /// 1: lower than normal.
    BelowNormal,
}

impl Priority {
    /// Returns the priority that has this number in the daemon's protocol.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Normal),
            1 => Some(Self::BelowNormal),
            _ => None,
        }
    }

    /// Returns the number of this priority in the daemon's protocol.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::BelowNormal => 1,
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Normal => "normal",
            Self::BelowNormal => "below-normal",
        })
    }
}

impl FromStr for Priority {
    type Err = BadValue;

    /// Reads `normal` or `below-normal`.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text.trim() {
            "normal" => Ok(Self::Normal),
            "below-normal" => Ok(Self::BelowNormal),
            _ => Err(BadValue { text: text.to_owned(), what: "priority", why: "write `normal` or `below-normal`" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentages_are_over_0_and_up_to_100_with_one_decimal() {
        for (text, tenths) in [("25", 250), ("100", 1000), ("100.0", 1000), ("0.1", 1), ("12.5%", 125), (" 50 % ", 500)]
        {
            assert_eq!(text.parse::<Percentage>().map(Percentage::tenths), Ok(tenths), "{text}");
        }
        for text in [
            "0", "0.0", "101", "100.1", "-5", "+5", "NaN", "inf", "abc", "", "%", "1e2", "33.37", "5.", ".5", "１０",
            "99999",
        ] {
            assert!(text.parse::<Percentage>().is_err(), "{text}");
        }
    }

    #[test]
    fn memory_limits_are_whole_and_have_a_unit() {
        for (text, mib) in [
            ("8G", 8192),
            ("1536M", 1536),
            ("8 GiB", 8192),
            ("8Gi", 8192),
            ("1mib", 1),
            ("10GB", 10240),
            ("10gb", 10240),
            ("8 GB", 8192),
        ] {
            assert_eq!(text.parse::<MemoryLimit>().map(MemoryLimit::mib), Ok(mib), "{text}");
        }
        for text in
            ["1.5G", "0", "0M", "-1G", "512", "512K", "1T", "abc", "", "G", "99999999G", "18446744073709551615G"]
        {
            assert!(text.parse::<MemoryLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn in_json_they_are_numbers() {
        let percentage: Percentage = "12.5".parse().unwrap();
        let limit: MemoryLimit = "8G".parse().unwrap();
        assert_eq!(serde_json::to_string(&(percentage, Percentage::ALL, limit)).unwrap(), "[12.5,100,8192]");
        assert_eq!(serde_json::from_str::<(Percentage, MemoryLimit)>("[33.3, 1536]").unwrap().0.tenths(), 333);
        for bad in ["0", "101", "-1", "33.37", "\"25\"", "null", "1e9"] {
            assert!(serde_json::from_str::<Percentage>(bad).is_err(), "{bad}");
        }
        for bad in ["0", "-1", "1.5", "\"8G\"", "99999999999"] {
            assert!(serde_json::from_str::<MemoryLimit>(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(tenths in 1..=1000_u16, mib in 1..=MOST_MIB) {
            let percentage = Percentage::of_tenths(tenths).unwrap();
            prop_assert_eq!(percentage.to_string().parse::<Percentage>().unwrap(), percentage);
            let limit = MemoryLimit::of_mib(mib).unwrap();
            prop_assert_eq!(limit.to_string().parse::<MemoryLimit>().unwrap(), limit);
        }

        #[test]
        fn no_text_makes_a_reader_panic(text in ".{0,12}") {
            let _ = (text.parse::<Percentage>(), text.parse::<MemoryLimit>(), text.parse::<Priority>());
        }
    }
}
