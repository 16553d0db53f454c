//! `[history]`: how long gpushd keeps what leases were used for.

use toml::de::DeTable;

use super::reader::Reader;

/// `[history]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct History {
    /// How many days gpushd keeps the sums of ended leases. With 0, it records no use.
    pub days: u32,
}

impl Default for History {
    fn default() -> Self {
        Self { days: 400 }
    }
}

impl History {
    /// Returns the keys and their values as TOML.
    pub(super) fn written(self) -> [(&'static str, Option<String>); 1] {
        [("days", Some(self.days.to_string()))]
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> History {
    History { days: reader.number(table, "days", 0..=3660, History::default().days) }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn days_are_a_number_up_to_ten_years() {
        let read = |days: &str| Config::parse(&format!("[history]\ndays = {days}\n"), "config.toml");
        assert_eq!(read("0").unwrap().history.days, 0);
        assert_eq!(Config::default().history.days, 400);
        for days in ["-1", "3661", "\"400d\"", "1.5"] {
            assert!(read(days).is_err(), "{days}");
        }
    }
}
