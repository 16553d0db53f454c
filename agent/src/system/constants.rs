//! Time limits and other values that the config does not set. Tests replace them: `gpushd --constants KEY=VALUE,…`.

use std::{str::FromStr, time::Duration};

use gpush_api::MemoryLimit;
use gpush_core::{duration, supervisor::SupervisorPolicy};
use gpush_nvml::Deadlines;

/// The values that gpushd uses. `Constants::default()` has those of every host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Constants {
    /// Time limits of driver calls.
    pub(crate) driver: Deadlines,
    /// The supervision of MPS daemons. The config sets `restart_hung_with_clients`.
    pub(crate) mps: SupervisorPolicy,
    /// Size in bytes at which gpushd rotates the log of an MPS daemon.
    pub(crate) mps_log: u64,
    /// Maximum time for a reset of GPUs.
    pub(crate) reset: Duration,
    /// Shortest time between two records of what leases are used for.
    pub(crate) usage_record: Duration,
    /// How long the clock must show a month before the bills of the months before it are closed.
    pub(crate) usage_close: Duration,
    /// Absolute path of `systemctl`.
    pub(crate) systemctl: String,
}

impl Default for Constants {
    fn default() -> Self {
        Self {
            driver: Deadlines::default(),
            mps: SupervisorPolicy::default(),
            mps_log: 16 << 20,
            reset: Duration::from_secs(120),
            usage_record: Duration::from_secs(10),
            usage_close: Duration::from_secs(3600),
            systemctl: "/usr/bin/systemctl".to_owned(),
        }
    }
}

/// Why a text sets no constants.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotConstants {
    #[error("`{0}` is not KEY=VALUE")]
    NoValue(String),
    #[error("gpushd has no constant `{0}`")]
    UnknownKey(String),
    #[error("`{key}` can't be `{value}`: {why}")]
    WrongValue { key: String, value: String, why: String },
}

impl FromStr for Constants {
    type Err = NotConstants;

    fn from_str(text: &str) -> Result<Self, NotConstants> {
        let mut constants = Self::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| NotConstants::NoValue(pair.to_owned()))?;
            constants.set(key, value)?;
        }
        constants.driver.grace = constants.driver.grace.min(constants.driver.change);
        Ok(constants)
    }
}

impl Constants {
    fn set(&mut self, key: &str, value: &str) -> Result<(), NotConstants> {
        let wrong = |why: String| NotConstants::WrongValue { key: key.to_owned(), value: value.to_owned(), why };
        let time = match key {
            "driver.start" => &mut self.driver.start,
            "driver.read" => &mut self.driver.read,
            "driver.change" => &mut self.driver.change,
            "mps.start" => &mut self.mps.start,
            "mps.stop" => &mut self.mps.stop,
            "mps.pause" => &mut self.mps.pause,
            "mps.longest_pause" => &mut self.mps.longest_pause,
            "mps.within" => &mut self.mps.within,
            "reset" => &mut self.reset,
            "usage.record" => &mut self.usage_record,
            "usage.close" => &mut self.usage_close,
            "mps.failures" => {
                self.mps.failures = value.parse().map_err(|_| wrong("write a number".to_owned()))?;
                return Ok(());
            }
            "mps.log" => {
                let size = value.parse::<MemoryLimit>().map_err(|error| wrong(error.why.to_owned()))?;
                self.mps_log = size.mib() << 20;
                return Ok(());
            }
            "systemctl" => {
                value.clone_into(&mut self.systemctl);
                return Ok(());
            }
            _ => return Err(NotConstants::UnknownKey(key.to_owned())),
        };
        *time = duration::parse_positive(value).map_err(|error| wrong(error.to_string()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_command_line_replace_the_defaults() {
        let text = "driver.change=3s,driver.read=300ms,mps.stop=2s,mps.failures=2,mps.log=1M,systemctl=/a/systemctl";
        let constants: Constants = text.parse().unwrap();
        assert_eq!((constants.driver.change, constants.driver.grace), (Duration::from_secs(3), Duration::from_secs(3)));
        assert_eq!((constants.driver.read, constants.mps.stop), (Duration::from_millis(300), Duration::from_secs(2)));
        assert_eq!((constants.mps.failures, constants.mps_log), (2, 1 << 20));
        assert_eq!((constants.reset, constants.systemctl.as_str()), (Duration::from_secs(120), "/a/systemctl"));
    }

    #[test]
    fn constants_with_an_unknown_key_or_a_wrong_value_are_refused() {
        for (text, error) in [
            ("mps.stop", "`mps.stop` is not KEY=VALUE"),
            ("mps.stopp=2s", "gpushd has no constant `mps.stopp`"),
            ("mps.stop=0s", "`mps.stop` can't be `0s`: the duration must be longer than 0"),
            ("mps.failures=many", "`mps.failures` can't be `many`: write a number"),
        ] {
            assert_eq!(text.parse::<Constants>().unwrap_err().to_string(), error);
        }
    }
}
