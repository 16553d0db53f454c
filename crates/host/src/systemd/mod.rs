//! Units of systemd, through its D-Bus interface. gpushd calls systemd only through this module.
//!
//! `systemctl` takes 10 ms for each call, needs a parser, and does not report why a job failed. A
//! D-Bus call takes about a millisecond, and returns systemd's own result.
//!
//! ```text
//! start(unit) ─► subscribe to its JobRemoved ─► StartUnit ─► its job ends ─► done: MainPID
//!                                                               │             else: its result
//!                                                               └ deadline, or the bus is gone
//!
//! wait_until(unit, is) ─► subscribe to its PropertiesChanged ─► read ─ is ───────────► return it
//!                                                               ▲   └ not yet ─► changed ─┐
//!                                                               └─────────────────────────┘
//! ```
//!
//! A start continues even if its caller stops waiting; [`Manager::state`] then returns the result
//! of the start. gpushd opens the connection when the connection is first needed, and again after a
//! restart of the bus. Before a call that changes something, gpushd checks the connection, so that no such call is sent
//! twice. It repeats the reading of limits on a new connection.

mod devices;
mod proxies;
mod scope;
#[cfg(feature = "scripted")]
mod scripted;
mod short_run;
mod state;
mod unit_limits;

use std::{future::Future, path::Path, time::Duration};

use nix::sys::signal::Signal;
use tokio::{
    sync::{Mutex, Semaphore},
    time::{Instant, timeout, timeout_at},
};
use zbus::{
    Connection, MatchRule, MessageStream,
    export::ordered_stream::OrderedStreamExt,
    fdo::DBusProxy,
    message::Type,
    proxy::CacheProperties,
    zvariant::{OwnedObjectPath, Value},
};

use self::proxies::{Property, SystemManagerProxy, UnitPropertiesProxy};
#[cfg(feature = "scripted")]
pub use self::scripted::{ScriptedFault, ScriptedSystemd};
pub use self::{
    devices::{FIRST_WITHOUT_GAPS, Lasts, UnitChanges, UnitDevices},
    scope::TransientScope,
    short_run::ShortProgram,
    state::State,
    unit_limits::{ReadLimits, UnitValue},
};
use crate::error_chain;

/// How long one call may take. D-Bus itself uses this limit. `systemctl daemon-reexec` and `daemon-reload` block systemd
/// for seconds on a busy host.
const CALL_TIMEOUT: Duration = Duration::from_secs(25);

/// How long a caller waits for a job. A job that takes longer continues.
const JOB_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of calls without an answer. The bus refuses more than 128 of a connection, and systemd answers one call
/// after the other.
const MOST_CALLS: usize = 64;

/// Time between two reads of a unit while systemd sends no signal about the unit. When systemd
/// unloads a unit that is no longer needed, it sends no signal.
const REREAD_INTERVAL: Duration = Duration::from_millis(250);

/// File that exists if cgroup v2 is mounted at the usual place.
const UNIFIED: &str = "/sys/fs/cgroup/cgroup.controllers";

/// Returns whether systemd is the service manager of this host, by the rule of `sd_booted(3)`.
pub fn is_the_service_manager() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// systemd's manager. gpushd has only one `Manager`. All its calls share one connection.
#[derive(Debug, Default)]
pub struct Manager {
    connection: Mutex<Option<Link>>,
    /// A systemd in a script, in place of the one of this host.
    #[cfg(feature = "scripted")]
    scripted: Option<ScriptedSystemd>,
}

/// A connection to the D-Bus system bus.
#[derive(Debug, Clone)]
struct Link {
    connection: Connection,
    /// Whether systemd sends signals to the connection.
    is_subscribed: bool,
    /// Whether this version of systemd accepts a pidfd as the process of a scope. gpushd reads the
    /// version when it subscribes to systemd's signals.
    takes_pidfds: bool,
}

/// A program to run in a transient unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransientService {
    /// Name of the unit, with `.service`.
    pub name: String,
    /// What `systemctl status` shows.
    pub description: String,
    /// Absolute path of the program, then its arguments.
    pub command: Vec<String>,
    /// The slice that contains it.
    pub slice: String,
    /// How long the program may take to report that it is ready.
    pub start_timeout: Duration,
}

/// Why a call to systemd failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no bus, or the connection ended.
    #[error("cannot reach systemd over the system bus")]
    Bus(#[source] zbus::Error),
    /// systemd refused the call, with the D-Bus error `name`.
    #[error("systemd refused to {what}: {message} ({name})")]
    Refused {
        /// What gpushd asked for.
        what: String,
        /// Name of the D-Bus error.
        name: String,
        /// systemd's own message.
        message: String,
    },
    /// The job ended with a result other than `done`: `failed`, `timeout`, `canceled`,
    /// `dependency`.
    #[error("the systemd job to {what} ended with result {result}")]
    Job {
        /// What gpushd asked for.
        what: String,
        /// systemd's result.
        result: String,
    },
    /// systemd knew a process only by its pid, and the process has ended. So another process may have got the pid, and
    /// systemd may have moved that process.
    #[error("cannot determine which process systemd moved to {what}: the calling process has ended")]
    Misplaced {
        /// What gpushd asked for.
        what: String,
    },
    /// Earlier calls had no answer for so long that gpushd did not make this call.
    #[error("gpushd did not ask systemd to {what}: systemd has not answered {MOST_CALLS} earlier calls")]
    NotCalled {
        /// What gpushd wanted to ask for.
        what: String,
    },
    /// systemd did not answer in time, but may still execute the call.
    #[error("systemd did not {what} within {}s", .after.as_secs())]
    Deadline {
        /// What gpushd asked for.
        what: String,
        /// The time limit.
        after: Duration,
    },
}

impl Error {
    /// Returns the message, and the causes that the message does not contain.
    pub fn in_full(&self) -> String {
        error_chain::in_full(self)
    }

    /// Returns whether systemd may have moved another process into a scope, or may still do so.
    pub fn may_move_another_process(&self) -> bool {
        matches!(self, Self::Misplaced { .. } | Self::Deadline { .. })
    }

    /// Returns whether systemd refused a call because the unit is not loaded.
    pub fn is_not_loaded(&self) -> bool {
        matches!(self, Self::Refused { name, .. } if is_not_loaded(name))
    }
}

impl Manager {
    /// Starts a unit, if it is not active, and returns its main process.
    ///
    /// # Errors
    /// When the start failed, or the unit has ended since.
    pub async fn start(&self, unit: &str) -> Result<u32, Error> {
        let what = format!("start {unit}");
        let manager = self.manager().await?;
        run_job(&manager, &what, unit, JOB_TIMEOUT, || manager.start_unit(unit, "replace")).await?;
        let state = self.state(unit).await?;
        state.main_pid.ok_or(Error::Job { what, result: state.result })
    }

    /// Starts a program in a transient unit and waits until the program has reported that it is
    /// ready. systemd unloads the unit after the unit has ended or failed.
    ///
    /// # Errors
    /// When the start failed.
    pub async fn start_transient(&self, service: &TransientService) -> Result<(), Error> {
        let what = format!("start {}", service.name);
        let manager = self.manager().await?;
        let program = service.command.first().map_or("", String::as_str);
        let timeout_us = u64::try_from(service.start_timeout.as_micros()).unwrap_or(u64::MAX);
        let properties: [Property<'_>; 8] = [
            ("Description", Value::from(service.description.as_str())),
            ("Type", Value::from("notify")),
            ("NotifyAccess", Value::from("main")),
            ("KillMode", Value::from("control-group")),
            ("TimeoutStartUSec", Value::from(timeout_us)),
            ("Slice", Value::from(service.slice.as_str())),
            ("CollectMode", Value::from("inactive-or-failed")),
            // The fields are the program, its arguments, and whether a failure of the program is
            // ignored.
            ("ExecStart", Value::from(vec![(program, service.command.clone(), false)])),
        ];
        run_job(&manager, &what, &service.name, service.start_timeout, || {
            manager.start_transient_unit(&service.name, "fail", &properties, &[])
        })
        .await
    }

    /// Kills all processes of a unit.
    ///
    /// # Errors
    /// When systemd refuses.
    pub async fn kill(&self, unit: &str) -> Result<(), Error> {
        let manager = self.manager().await?;
        call(&format!("kill {unit}"), manager.kill_unit(unit, "all", Signal::SIGKILL as i32)).await
    }

    /// Lists the units with a matching name that run, start or stop.
    ///
    /// # Errors
    /// When systemd refuses.
    pub async fn running(&self, pattern: &str) -> Result<Vec<String>, Error> {
        let states = ["active", "reloading", "activating", "deactivating"];
        let manager = self.manager().await?;
        let rows = call("list units", manager.list_units_by_patterns(&states, &[pattern])).await?;
        Ok(rows.into_iter().map(|row| row.0).collect())
    }

    /// Lists the services that run as another user than root, with the user. Leaves out services that have just ended.
    ///
    /// # Errors
    /// When systemd refuses.
    pub async fn services_of_users(&self) -> Result<Vec<(String, String)>, Error> {
        let mut found = Vec::new();
        for unit in self.running("*.service").await? {
            let state = match self.state(&unit).await {
                Err(Error::Refused { .. }) => continue,
                state => state?,
            };
            if !matches!(state.user.as_str(), "" | "root" | "0") {
                found.push((unit, state.user));
            }
        }
        Ok(found)
    }

    /// Returns how many processes a unit has.
    ///
    /// # Errors
    /// When systemd refuses.
    pub async fn processes(&self, unit: &str) -> Result<usize, Error> {
        let manager = self.manager().await?;
        Ok(call(&format!("list processes of {unit}"), manager.get_unit_processes(unit)).await?.len())
    }

    /// Makes systemd forget that a unit failed.
    ///
    /// # Errors
    /// When systemd refuses. It is not an error if the unit is not loaded.
    pub async fn reset_failed(&self, unit: &str) -> Result<(), Error> {
        let manager = self.manager().await?;
        match call(&format!("reset {unit}"), manager.reset_failed_unit(unit)).await {
            Err(Error::Refused { name, .. }) if is_not_loaded(&name) => Ok(()),
            answer => answer,
        }
    }

    /// Returns a service unit as it is now.
    ///
    /// # Errors
    /// When systemd refuses, or the unit is not a service.
    pub async fn state(&self, unit: &str) -> Result<State, Error> {
        let what = format!("read the state of {unit}");
        let manager = self.manager().await?;
        let properties = properties(&manager, unit).await?;
        State::of(&call(&what, properties.get_all("")).await?)
    }

    /// Returns the state of a service unit as soon as `is` accepts the state. After `within`,
    /// returns the current state anyway.
    ///
    /// # Errors
    /// When systemd refuses, or the unit is not a service.
    pub async fn wait_until(&self, unit: &str, within: Duration, is: impl Fn(&State) -> bool) -> Result<State, Error> {
        let what = format!("read the state of {unit}");
        let manager = self.manager().await?;
        subscribe(&manager, &what).await?;
        let properties = properties(&manager, unit).await?;
        // Subscribe before the first read, so that no later change is missed.
        let mut changes = properties.receive_properties_changed().await.map_err(Error::Bus)?;
        let until = Instant::now() + within;
        loop {
            let state = State::of(&call(&what, properties.get_all("")).await?)?;
            if is(&state) || Instant::now() >= until {
                return Ok(state);
            }
            let next = until.min(Instant::now() + REREAD_INTERVAL);
            if let Ok(None) = timeout_at(next, changes.next()).await {
                return Err(closed());
            }
        }
    }

    /// Returns a proxy on a connection that was alive a moment ago.
    async fn manager(&self) -> Result<SystemManagerProxy<'static>, Error> {
        let connection = self.live_connection().await?;
        let builder = SystemManagerProxy::builder(&connection).cache_properties(CacheProperties::No);
        builder.build().await.map_err(Error::Bus)
    }

    /// Returns the connection, or a new connection when the old one is not alive.
    async fn live_connection(&self) -> Result<Connection, Error> {
        let mut link = self.connection.lock().await;
        if let Some(link) = link.as_ref()
            && is_alive(&link.connection).await
        {
            return Ok(link.connection.clone());
        }
        *link = None;
        Ok(link.insert(self.new_link().await?).connection.clone())
    }

    async fn new_link(&self) -> Result<Link, Error> {
        let connected = timeout(CALL_TIMEOUT, self.connect()).await;
        let what = "answer a connection".to_owned();
        let connection = connected.map_err(|_| Error::Deadline { what, after: CALL_TIMEOUT })?.map_err(Error::Bus)?;
        Ok(Link { connection, is_subscribed: false, takes_pidfds: false })
    }

    /// Returns whether the host uses cgroup v2.
    pub fn is_unified(&self) -> bool {
        #[cfg(feature = "scripted")]
        if let Some(scripted) = &self.scripted {
            return scripted.is_unified();
        }
        Path::new(UNIFIED).exists()
    }

    async fn connect(&self) -> zbus::Result<Connection> {
        #[cfg(feature = "scripted")]
        if let Some(scripted) = &self.scripted {
            return scripted.connect().await;
        }
        Connection::system().await
    }
}

/// Checks the connection with a request for the bus id. A ping is not suitable, because the bus
/// policy refuses and logs pings.
async fn is_alive(connection: &Connection) -> bool {
    let asked = async { DBusProxy::new(connection).await?.get_id().await };
    matches!(timeout(CALL_TIMEOUT, asked).await, Ok(Ok(_)))
}

/// Makes one call within its deadline. The call waits while too many others have no answer yet.
async fn call<T>(what: &str, answer: impl Future<Output = zbus::Result<T>>) -> Result<T, Error> {
    static UNANSWERED: Semaphore = Semaphore::const_new(MOST_CALLS);
    let until = Instant::now() + CALL_TIMEOUT;
    let Ok(_permit) = timeout_at(until, UNANSWERED.acquire()).await else {
        return Err(Error::NotCalled { what: what.to_owned() });
    };
    match timeout_at(until, answer).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(zbus::Error::MethodError(name, message, _))) => {
            Err(Error::Refused { what: what.to_owned(), name: name.to_string(), message: message.unwrap_or_default() })
        }
        Ok(Err(error)) => Err(Error::Bus(error)),
        Err(_) => Err(Error::Deadline { what: what.to_owned(), after: CALL_TIMEOUT }),
    }
}

/// Queues a job and waits for its end.
async fn run_job<F>(
    manager: &SystemManagerProxy<'_>,
    what: &str,
    unit: &str,
    within: Duration,
    queue: impl FnOnce() -> F,
) -> Result<(), Error>
where
    F: Future<Output = zbus::Result<OwnedObjectPath>>,
{
    let run = async {
        subscribe(manager, what).await?;
        // Subscribe before the call, because a job may end before gpushd has read the answer to the
        // call.
        let ends = ends_of_jobs(manager, unit).await?;
        job_ends(what, ends, queue()).await
    };
    timeout(within, run).await.unwrap_or_else(|_| Err(Error::Deadline { what: what.to_owned(), after: within }))
}

/// Makes a call that queues a job, and waits until `ends` reports the end of that job.
async fn job_ends(
    what: &str,
    mut ends: MessageStream,
    queue: impl Future<Output = zbus::Result<OwnedObjectPath>>,
) -> Result<(), Error> {
    let queued = call(what, queue).await?;
    while let Some(signal) = ends.next().await {
        let signal = signal.map_err(Error::Bus)?;
        let (_id, job, _unit, result): (u32, OwnedObjectPath, String, String) =
            signal.body().deserialize().map_err(Error::Bus)?;
        if job == queued {
            return if result == "done" { Ok(()) } else { Err(Error::Job { what: what.to_owned(), result }) };
        }
    }
    Err(closed())
}

/// Reports when jobs of a unit end (`JobRemoved`). A signal stream of zbus would need three round
/// trips instead of one, because it also asks the bus twice for the owner of systemd's name.
async fn ends_of_jobs(manager: &SystemManagerProxy<'_>, unit: &str) -> Result<MessageStream, Error> {
    let proxy = manager.inner();
    let rule = async {
        let rule = MatchRule::builder().msg_type(Type::Signal).sender(proxy.destination())?;
        let rule = rule.path(proxy.path())?.interface(proxy.interface())?.member("JobRemoved")?.arg(2, unit)?.build();
        MessageStream::for_match_rule(rule, proxy.connection(), None).await
    };
    timeout(CALL_TIMEOUT, rule).await.map_err(|_| closed())?.map_err(Error::Bus)
}

/// Makes systemd send signals to this connection. It is not an error if the connection is already
/// subscribed.
async fn subscribe(manager: &SystemManagerProxy<'_>, what: &str) -> Result<(), Error> {
    match call(what, manager.subscribe()).await {
        Err(Error::Refused { name, .. }) if name == "org.freedesktop.systemd1.AlreadySubscribed" => Ok(()),
        answer => answer,
    }
}

/// Returns a proxy for the properties of a unit. Makes no call. systemd loads the unit when it gets a call for the unit.
async fn properties(manager: &SystemManagerProxy<'_>, unit: &str) -> Result<UnitPropertiesProxy<'static>, Error> {
    let connection = manager.inner().connection();
    let builder = UnitPropertiesProxy::builder(connection).path(object_path(unit)).map_err(Error::Bus)?;
    builder.cache_properties(CacheProperties::No).build().await.map_err(Error::Bus)
}

/// Returns the object path of a unit: systemd writes each character other than a letter or a digit, and a digit at the
/// start, as `_` and two hexadecimal digits.
fn object_path(unit: &str) -> String {
    let mut path = "/org/freedesktop/systemd1/unit/".to_owned();
    for (at, byte) in unit.bytes().enumerate() {
        match byte {
            b'0'..=b'9' if at == 0 => path += &format!("_{byte:02x}"),
            b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => path.push(char::from(byte)),
            _ => path += &format!("_{byte:02x}"),
        }
    }
    path
}

/// Returns whether an error means that the unit was never started, or that systemd has unloaded it.
fn is_not_loaded(name: &str) -> bool {
    matches!(name, "org.freedesktop.systemd1.NoSuchUnit" | "org.freedesktop.systemd1.UnitNotLoaded")
}

fn closed() -> Error {
    Error::Bus(zbus::Error::Failure("the connection was closed".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_paths_are_those_of_systemd() {
        for (unit, path) in [
            ("user-1000.slice", "user_2d1000_2eslice"),
            ("gpush-mps@g1.service", "gpush_2dmps_40g1_2eservice"),
            ("2fa.service", "_32fa_2eservice"),
        ] {
            assert_eq!(object_path(unit), format!("/org/freedesktop/systemd1/unit/{path}"));
        }
    }
}
