//! Runs a short program in a transient unit, and returns its exit status.

use gpush_core::lease::access::AllowedDevice;
use zbus::zvariant::Value;

use super::{Error, JOB_TIMEOUT, Manager, call, devices::limits, proxies::Property, run_job};

/// The highest log level of a unit: warnings. systemd logs each start and stop of a unit with a lower level.
const WARNING: i32 = 4;

/// A short program. Every exit status is a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShortProgram {
    /// Name of the unit, with `.service`.
    pub unit: String,
    /// What `systemctl status` shows.
    pub description: String,
    /// Absolute path of the program, then its arguments.
    pub command: Vec<String>,
    /// The slice that contains it.
    pub slice: String,
    /// The devices that it may open; `None` for those of its slice.
    pub devices: Option<Vec<AllowedDevice>>,
}

impl Manager {
    /// Runs a program as root, and returns its exit status.
    ///
    /// # Errors
    /// When the program cannot be started, or was ended by a signal.
    pub async fn run_short(&self, program: &ShortProgram) -> Result<i32, Error> {
        let unit = program.unit.as_str();
        let what = format!("run {unit}");
        let manager = self.manager().await?;
        let path = program.command.first().map_or("", String::as_str);
        let every_status: Vec<i32> = (1..200).collect();
        let no_signals: Vec<i32> = Vec::new();
        let mut properties: Vec<Property<'_>> = vec![
            ("Description", Value::from(program.description.as_str())),
            ("Type", Value::from("oneshot")),
            // Otherwise systemd unloads the unit before its result can be read.
            ("RemainAfterExit", Value::from(true)),
            ("SuccessExitStatus", Value::from((every_status, no_signals))),
            ("Slice", Value::from(program.slice.as_str())),
            ("CollectMode", Value::from("inactive-or-failed")),
            ("LogLevelMax", Value::from(WARNING)),
            ("ExecStart", Value::from(vec![(path, program.command.clone(), false)])),
        ];
        if let Some(devices) = &program.devices {
            properties.extend(limits(devices));
        }
        run_job(&manager, &what, unit, JOB_TIMEOUT, || manager.start_transient_unit(unit, "fail", &properties, &[]))
            .await?;
        let state = self.state(unit).await;
        let stopped = call(&format!("stop {unit}"), manager.stop_unit(unit, "replace")).await;
        let state = state?;
        stopped?;
        Ok(state.exec_main_status)
    }
}
