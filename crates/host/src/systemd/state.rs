//! The state of a service unit at one moment.

use std::collections::HashMap;

use zbus::zvariant::{Error as VariantError, OwnedValue, Value};

use super::Error;

/// The state of a service unit at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// `active`, `activating`, `deactivating`, `inactive`, `failed`.
    pub active: String,
    /// How the last run of the unit ended: `success`, `exit-code`, `signal`, `oom-kill`, …
    pub result: String,
    /// The configured user, as a name or number; empty if the unit has no `User=` and starts as root.
    pub user: String,
    /// Main process of the unit, if any.
    pub main_pid: Option<u32>,
    /// How the main process ended: `CLD_EXITED` (1), `CLD_KILLED` (2), `CLD_DUMPED` (3); 0 while it
    /// has not ended.
    pub exec_main_code: i32,
    /// Exit status or signal of the main process.
    pub exec_main_status: i32,
}

impl State {
    /// Reads the state from the properties of a unit.
    ///
    /// # Errors
    /// When a property is missing, because the unit is not a service.
    pub(super) fn of(properties: &HashMap<String, OwnedValue>) -> Result<Self, Error> {
        let main_pid = number::<u32>(properties, "MainPID")?;
        Ok(Self {
            active: text(properties, "ActiveState")?,
            result: text(properties, "Result")?,
            user: text(properties, "User")?,
            main_pid: (main_pid != 0).then_some(main_pid),
            exec_main_code: number(properties, "ExecMainCode")?,
            exec_main_status: number(properties, "ExecMainStatus")?,
        })
    }
}

fn text(properties: &HashMap<String, OwnedValue>, name: &str) -> Result<String, Error> {
    let value = properties.get(name).and_then(|value| value.downcast_ref::<&str>().ok());
    value.map(str::to_owned).ok_or_else(|| missing(name))
}

fn number<T>(properties: &HashMap<String, OwnedValue>, name: &str) -> Result<T, Error>
where
    T: for<'v> TryFrom<&'v Value<'v>, Error = VariantError>,
{
    properties.get(name).and_then(|value| value.downcast_ref::<T>().ok()).ok_or_else(|| missing(name))
}

fn missing(property: &str) -> Error {
    Error::Bus(zbus::Error::Failure(format!("systemd returned no {property}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties() -> HashMap<String, OwnedValue> {
        let value = |value: Value<'_>| value.try_to_owned().unwrap();
        HashMap::from([
            ("ActiveState".to_owned(), value("failed".into())),
            ("Result".to_owned(), value("signal".into())),
            ("User".to_owned(), value("alice".into())),
            ("MainPID".to_owned(), value(0_u32.into())),
            ("ExecMainCode".to_owned(), value(2_i32.into())),
            ("ExecMainStatus".to_owned(), value(9_i32.into())),
        ])
    }

    #[test]
    fn properties_of_a_service_give_its_state() {
        let state = State::of(&properties()).unwrap();
        assert_eq!((state.active.as_str(), state.result.as_str(), state.main_pid), ("failed", "signal", None));
        assert_eq!(state.user, "alice");
        assert_eq!((state.exec_main_code, state.exec_main_status), (2, 9));
    }

    #[test]
    fn unit_that_is_not_a_service_is_an_error() {
        let mut properties = properties();
        properties.remove("MainPID");
        assert!(matches!(State::of(&properties), Err(Error::Bus(_))));
    }
}
