//! A simulated systemd, for tests of code that changes units. No program that ships uses it.
//!
//! It speaks D-Bus with the [`Manager`], over a socket pair in place of the system bus. So tests run the same code as a
//! host: calls, properties, jobs and errors.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use gpush_core::lease::access::GPU_MAJOR;
use gpush_locked::Locked;
use tokio::net::UnixStream;
use zbus::{
    Connection, Message, MessageStream,
    connection::Builder,
    export::ordered_stream::OrderedStreamExt,
    message::Type,
    zvariant::{DynamicType, ObjectPath, OwnedValue, Value},
};

use super::{Manager, UnitDevices, object_path};
use crate::device_probe::{ALLOWED, DENIED};

const MANAGER: &str = "/org/freedesktop/systemd1";
const INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const REFUSED: &str = "org.freedesktop.DBus.Error.AccessDenied";

/// How a change of a unit fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptedFault {
    /// systemd refuses it.
    Refused,
    /// The connection ends before systemd executes it.
    LostBefore,
    /// The connection ends after systemd has executed it.
    LostAfter,
    /// systemd neither executes nor answers it.
    Hangs,
}

/// A simulated systemd. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub struct ScriptedSystemd(Arc<Locked<Script>>);

#[derive(Debug)]
struct Script {
    version: String,
    /// Whether the host uses cgroup v2.
    is_unified: bool,
    /// Whether the kernel obeys the lists of devices.
    obeys_lists: bool,
    /// Whether systemd refuses to show units.
    refuses_reads: bool,
    units: BTreeMap<String, ScriptedUnit>,
    /// The faults of the next changes of units, in order. With `None`, the change succeeds.
    faults: Vec<Option<ScriptedFault>>,
    /// The changes that were executed: `set user.slice`.
    changes: Vec<String>,
    jobs: u32,
    /// Changes that were not answered.
    hanging: u32,
}

#[derive(Debug, Clone, Default)]
struct ScriptedUnit {
    user: String,
    slice: String,
    devices: UnitDevices,
    exit_status: i32,
}

impl ScriptedSystemd {
    /// Returns systemd of this version on a host with cgroup v2, without a service.
    #[must_use]
    pub fn new(version: u32) -> Self {
        let script = Script {
            version: format!("{version}.1-1"),
            is_unified: true,
            obeys_lists: true,
            refuses_reads: false,
            units: BTreeMap::from([(
                "user.slice".to_owned(),
                ScriptedUnit { devices: open_devices(), ..Default::default() },
            )]),
            faults: Vec::new(),
            changes: Vec::new(),
            jobs: 0,
            hanging: 0,
        };
        Self(Arc::new(Locked::new(script)))
    }

    /// Returns a manager that calls this systemd.
    #[must_use]
    pub fn manager(&self) -> Manager {
        Manager { scripted: Some(self.clone()), ..Manager::default() }
    }

    /// Starts a service as `user`; as root if `user` is empty.
    pub fn run_service(&self, unit: &str, user: &str) {
        let one = ScriptedUnit { user: user.to_owned(), devices: open_devices(), ..ScriptedUnit::default() };
        self.0.lock().units.insert(unit.to_owned(), one);
    }

    /// Starts a scope with processes that may open all devices.
    pub fn run_scope(&self, unit: &str) {
        self.run_service(unit, "");
    }

    /// Sets whether the host uses cgroup v2.
    pub fn set_unified(&self, is_unified: bool) {
        self.0.lock().is_unified = is_unified;
    }

    /// Sets whether the kernel obeys the lists of devices.
    pub fn set_obeys_lists(&self, obeys: bool) {
        self.0.lock().obeys_lists = obeys;
    }

    /// Sets whether systemd refuses to show units.
    pub fn set_refuses_reads(&self, refuses: bool) {
        self.0.lock().refuses_reads = refuses;
    }

    /// Lets the change of a unit fail after this number of changes that work.
    pub fn fail_after(&self, changes: usize, fault: ScriptedFault) {
        let mut faults = vec![None; changes];
        faults.push(Some(fault));
        self.0.lock().faults = faults;
    }

    /// Returns the devices of a unit.
    #[must_use]
    pub fn devices(&self, unit: &str) -> UnitDevices {
        self.0.lock().units.get(unit).map(|one| one.devices.clone()).unwrap_or_default()
    }

    /// Sets the list of a unit, as an administrator does it.
    pub fn set_devices(&self, unit: &str, policy: &str, allowed: &[&str]) {
        if let Some(one) = self.0.lock().units.get_mut(unit) {
            let allowed = allowed.iter().map(|pattern| (*pattern).to_owned()).collect();
            one.devices = UnitDevices { policy: policy.to_owned(), allowed };
        }
    }

    /// Returns the changes since the last call, in order.
    #[must_use]
    pub fn take_changes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().changes)
    }

    /// Returns how many changes were not answered.
    #[must_use]
    pub fn hanging(&self) -> u32 {
        self.0.lock().hanging
    }

    pub(super) fn is_unified(&self) -> bool {
        self.0.lock().is_unified
    }

    /// Connects to this systemd.
    pub(super) async fn connect(&self) -> zbus::Result<Connection> {
        let (own, client) = UnixStream::pair().map_err(|error| zbus::Error::InputOutput(Arc::new(error)))?;
        let server = Builder::unix_stream(own).server(zbus::Guid::generate())?.p2p().build();
        let client = Builder::unix_stream(client).p2p().build();
        let (server, client) = tokio::try_join!(server, client)?;
        let (script, messages) = (self.clone(), MessageStream::from(&server));
        #[expect(clippy::disallowed_methods, reason = "this task simulates another process")]
        tokio::spawn(async move { script.serve(server, messages).await });
        Ok(client)
    }

    async fn serve(self, connection: Connection, mut messages: MessageStream) {
        while let Some(Ok(message)) = OrderedStreamExt::next(&mut messages).await {
            if message.message_type() == Type::MethodCall && self.answer(&connection, &message).await.is_err() {
                let _it_may_be_closed_already = connection.close().await;
                return;
            }
        }
    }

    /// Answers a call. An error ends the connection.
    async fn answer(&self, connection: &Connection, call: &Message) -> zbus::Result<()> {
        let header = call.header();
        let path = header.path().map(ToString::to_string).unwrap_or_default();
        let member = header.member().map(ToString::to_string).unwrap_or_default();
        match member.as_str() {
            "GetId" => reply(connection, call, &"0123456789abcdef0123456789abcdef").await,
            "Get" => {
                let version = self.0.lock().version.clone();
                reply(connection, call, &Value::from(version)).await
            }
            "GetAll" if self.0.lock().refuses_reads => refuse(connection, call, REFUSED, "Access denied").await,
            "GetAll" => match self.properties(&path) {
                Some(properties) => reply(connection, call, &properties).await,
                None => refuse(connection, call, "org.freedesktop.systemd1.NoSuchUnit", "not loaded").await,
            },
            "ListUnitsByPatterns" => {
                let (_states, patterns): (Vec<String>, Vec<String>) = call.body().deserialize()?;
                reply(connection, call, &self.listed(&patterns)).await
            }
            "SetUnitProperties" => self.set_properties(connection, call).await,
            "StartTransientUnit" => {
                let (unit, _mode, properties, _others): Started = call.body().deserialize()?;
                let job = self.start(&unit, properties);
                let job = ObjectPath::try_from(job)?;
                reply(connection, call, &job).await?;
                let ended = (1_u32, job, unit.as_str(), "done");
                connection.emit_signal(None::<&str>, MANAGER, INTERFACE, "JobRemoved", &ended).await
            }
            "StopUnit" => {
                let (unit, _mode): (String, String) = call.body().deserialize()?;
                self.0.lock().units.remove(&unit);
                reply(connection, call, &ObjectPath::try_from(format!("{MANAGER}/job/0"))?).await
            }
            // Subscribe, AddMatch and RemoveMatch.
            _ => reply(connection, call, &()).await,
        }
    }

    async fn set_properties(&self, connection: &Connection, call: &Message) -> zbus::Result<()> {
        let (unit, _runtime, properties): (String, bool, Vec<(String, OwnedValue)>) = call.body().deserialize()?;
        let fault = {
            let mut script = self.0.lock();
            if script.faults.is_empty() { None } else { script.faults.remove(0) }
        };
        let lost = || zbus::Error::Failure("the script ends the connection".to_owned());
        match fault {
            Some(ScriptedFault::Refused) => return refuse(connection, call, REFUSED, "Access denied").await,
            Some(ScriptedFault::LostBefore) => return Err(lost()),
            Some(ScriptedFault::Hangs) => {
                self.0.lock().hanging += 1;
                return Ok(());
            }
            Some(ScriptedFault::LostAfter) | None => {}
        }
        let is_known = {
            let mut script = self.0.lock();
            let known = script.units.get_mut(&unit).map(|one| apply(&mut one.devices, properties));
            if known.is_some() {
                script.changes.push(format!("set {unit}"));
            }
            known.is_some()
        };
        match (fault, is_known) {
            (Some(_), _) => Err(lost()),
            (None, true) => reply(connection, call, &()).await,
            (None, false) => refuse(connection, call, "org.freedesktop.systemd1.NoSuchUnit", "not loaded").await,
        }
    }

    /// Returns all properties of the unit with this object path.
    fn properties(&self, path: &str) -> Option<HashMap<&'static str, Value<'static>>> {
        let script = self.0.lock();
        let unit = script.units.iter().find(|(name, _)| object_path(name) == path)?.1;
        let allowed: Vec<(String, String)> =
            unit.devices.allowed.iter().map(|pattern| (pattern.clone(), "rwm".to_owned())).collect();
        Some(HashMap::from([
            ("DevicePolicy", Value::from(unit.devices.policy.clone())),
            ("DeviceAllow", Value::from(allowed)),
            ("ActiveState", Value::from("active")),
            ("Result", Value::from("success")),
            ("User", Value::from(unit.user.clone())),
            ("MainPID", Value::from(0_u32)),
            ("ExecMainCode", Value::from(1_i32)),
            ("ExecMainStatus", Value::from(unit.exit_status)),
        ]))
    }

    /// Returns the services and scopes with names that match one of the patterns.
    fn listed(&self, patterns: &[String]) -> Vec<Row> {
        let script = self.0.lock();
        let matches =
            |name: &&String| !name.ends_with(".slice") && patterns.iter().any(|pattern| matches_pattern(pattern, name));
        let names = script.units.keys().filter(matches);
        let path = |name: &str| ObjectPath::try_from(object_path(name)).unwrap_or_default();
        let text = String::new;
        names
            .map(|name| {
                (name.clone(), text(), text(), text(), text(), text(), path(name), 0, text(), ObjectPath::default())
            })
            .collect()
    }

    /// Runs the program of a probe, and returns its job.
    fn start(&self, unit: &str, properties: Vec<(String, OwnedValue)>) -> String {
        let mut script = self.0.lock();
        let mut one = ScriptedUnit { devices: open_devices(), ..ScriptedUnit::default() };
        let text = |value: &OwnedValue| value.downcast_ref::<&str>().map(str::to_owned).unwrap_or_default();
        let find = |name: &str| properties.iter().find(|(own, _)| own == name).map(|(_, value)| value);
        one.slice = find("Slice").map(text).unwrap_or_default();
        let command = find("ExecStart").and_then(|value| ProgramList::try_from(value.clone()).ok()).unwrap_or_default();
        let minor = command.first().and_then(|(_, arguments, _)| arguments.get(3).cloned()).unwrap_or_default();
        apply(&mut one.devices, properties);
        let of_slice = script.units.get(&one.slice).map_or_else(open_devices, |slice| slice.devices.clone());
        let opens = [&one.devices, &of_slice].into_iter().all(|devices| opens(devices, &minor));
        one.exit_status = i32::from(if opens || !script.obeys_lists { ALLOWED } else { DENIED });
        script.units.insert(unit.to_owned(), one);
        script.jobs += 1;
        format!("{MANAGER}/job/{}", script.jobs)
    }
}

/// The arguments of a start: name, mode, properties, other units.
type Started = (String, String, Vec<(String, OwnedValue)>, Vec<(String, Vec<(String, OwnedValue)>)>);

/// The programs of a unit: path, arguments, whether a failure is ignored.
type ProgramList = Vec<(String, Vec<String>, bool)>;

/// A unit in a list.
type Row = (String, String, String, String, String, String, ObjectPath<'static>, u32, String, ObjectPath<'static>);

/// Returns whether a name matches a pattern with at most one star.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end),
    }
}

fn open_devices() -> UnitDevices {
    UnitDevices { policy: "auto".to_owned(), allowed: Vec::new() }
}

/// Returns whether a unit with these devices may open the GPU with this minor number.
fn opens(devices: &UnitDevices, minor: &str) -> bool {
    if devices.policy == "auto" && devices.allowed.is_empty() {
        return true;
    }
    let own = [format!("/dev/char/{GPU_MAJOR}:{minor}"), format!("char-{GPU_MAJOR}"), "char-*".to_owned()];
    devices.allowed.iter().any(|pattern| own.contains(pattern))
}

/// Sets the properties about devices. A list adds to the present one, and an empty list removes it.
fn apply(devices: &mut UnitDevices, properties: Vec<(String, OwnedValue)>) {
    for (name, value) in properties {
        match name.as_str() {
            "DevicePolicy" => devices.policy = value.downcast_ref::<&str>().unwrap_or("auto").to_owned(),
            "DeviceAllow" => {
                let pairs = <Vec<(String, String)>>::try_from(value).unwrap_or_default();
                if pairs.is_empty() {
                    devices.allowed.clear();
                }
                devices.allowed.extend(pairs.into_iter().map(|(pattern, _)| pattern));
            }
            _ => {}
        }
    }
}

async fn reply<B: serde::Serialize + DynamicType>(
    connection: &Connection,
    call: &Message,
    body: &B,
) -> zbus::Result<()> {
    connection.reply(&call.header(), body).await
}

async fn refuse(connection: &Connection, call: &Message, name: &'static str, message: &str) -> zbus::Result<()> {
    connection.reply_error(&call.header(), name, &message).await
}
