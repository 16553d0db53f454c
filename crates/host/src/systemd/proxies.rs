//! The D-Bus interfaces of systemd, as far as gpushd uses them: see `org.freedesktop.systemd1(5)`.

use std::collections::HashMap;

use zbus::{
    proxy,
    zvariant::{OwnedObjectPath, OwnedValue, Value},
};

/// A unit in a list: name, description, load state, active state, sub state, unit that it follows,
/// object path; then id, type and path of its job.
pub(super) type UnitRow =
    (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// A property of a transient unit.
pub(super) type Property<'a> = (&'a str, Value<'a>);

/// systemd's manager.
#[proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1",
    gen_blocking = false
)]
pub(super) trait SystemManager {
    /// Version of systemd, with the suffix of the distribution: `257.13-1~deb13u1`.
    #[zbus(property)]
    fn version(&self) -> zbus::Result<String>;

    /// Makes systemd send signals to this connection.
    fn subscribe(&self) -> zbus::Result<()>;

    /// Queues a start and returns its job.
    fn start_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    /// Queues a stop and returns its job.
    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    /// Creates a transient unit, which systemd removes when the unit ends. Queues the start of the
    /// unit, and returns the job of the start.
    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[Property<'_>],
        auxiliary: &[(&str, &[Property<'_>])],
    ) -> zbus::Result<OwnedObjectPath>;

    /// Sets properties of a unit; with `runtime`, only until the next boot.
    fn set_unit_properties(&self, name: &str, runtime: bool, properties: &[Property<'_>]) -> zbus::Result<()>;

    fn kill_unit(&self, name: &str, processes: &str, signal: i32) -> zbus::Result<()>;

    fn reset_failed_unit(&self, name: &str) -> zbus::Result<()>;

    /// Lists units by active state and name.
    fn list_units_by_patterns(&self, states: &[&str], patterns: &[&str]) -> zbus::Result<Vec<UnitRow>>;

    /// Lists the processes of a unit: cgroup, pid, command line.
    fn get_unit_processes(&self, name: &str) -> zbus::Result<Vec<(String, u32, String)>>;

    /// systemd begins or has finished to reload its units.
    #[zbus(signal)]
    fn reloading(&self, active: bool) -> zbus::Result<()>;

    /// A job has ended, for example the start of a unit.
    #[zbus(signal)]
    fn job_removed(&self, id: u32, job: OwnedObjectPath, unit: String, result: String) -> zbus::Result<()>;
}

/// The properties of a unit. For an empty interface name, systemd returns the properties of all
/// interfaces, read at the same moment. zbus's own proxy for this interface refuses an empty name.
#[proxy(
    interface = "org.freedesktop.DBus.Properties",
    default_service = "org.freedesktop.systemd1",
    gen_blocking = false
)]
pub(super) trait UnitProperties {
    /// Returns the properties of an interface.
    fn get_all(&self, interface: &str) -> zbus::Result<HashMap<String, OwnedValue>>;

    #[zbus(signal)]
    fn properties_changed(
        &self,
        interface: String,
        changed: HashMap<String, OwnedValue>,
        invalidated: Vec<String>,
    ) -> zbus::Result<()>;
}
