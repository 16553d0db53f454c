//! Units started, killed and looked at, over systemd's D-Bus interface.
//!
//! `systemctl` would do, at 10 ms and a parser each time; and it says of a job that failed only that
//! it did. Here a call is about a millisecond, and the result is systemd's own word.
//!
//! ```text
//! start(unit) ─► subscribe to JobRemoved of it ─► StartUnit ─► its job ends ─► done: MainPID
//!                                                               │             else: its result
//!                                                               └ deadline, or the bus is gone
//!
//! becomes(unit, is) ─► subscribe to PropertiesChanged of it ─► look ─ is ──────────────► as it is
//!                                                               ▲   └ not yet ─► changed ─┐
//!                                                               └─────────────────────────┘
//! ```
//!
//! A start whose wait was broken off goes on: what became of it is asked with [`Manager::state`]. The
//! connection is made when it is needed first, and anew when the bus was restarted; nothing is sent
//! before it is known to be alive, so no call is made twice.

use std::{collections::HashMap, path::Path, time::Duration};

use nix::sys::signal::Signal;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout, timeout_at},
};
use zbus::{
    Connection, MatchRule, Message, MessageStream,
    export::{ordered_stream::OrderedStreamExt, serde::Serialize},
    message::Type,
    zvariant::{DynamicType, OwnedObjectPath, OwnedValue},
};

const SYSTEMD: &str = "org.freedesktop.systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(5);

/// How long a job is waited for. One that takes longer goes on, and whoever waits does something else.
const JOB: Duration = Duration::from_secs(10);

/// Between two looks at a unit of which no change is told.
const FORGOTTEN: Duration = Duration::from_millis(250);

/// Whether systemd is this host's service manager, as `sd_booted(3)` tells it.
pub fn is_the_service_manager() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// systemd's manager. One for the whole agent: calls share its connection.
#[derive(Debug, Default)]
pub struct Manager {
    connection: Mutex<Option<Connection>>,
}

/// A service unit, as of one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// `active`, `activating`, `deactivating`, `inactive`, `failed`.
    pub active: String,
    /// How it ended last: `success`, `exit-code`, `signal`, `oom-kill`, …
    pub result: String,
    /// Its main process, when it has one.
    pub main_pid: Option<u32>,
    /// How the main process ended: `CLD_EXITED` (1), `CLD_KILLED` (2), `CLD_DUMPED` (3); 0 before.
    pub exec_main_code: i32,
    /// Its exit status, or the signal.
    pub exec_main_status: i32,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no bus, or it went away.
    #[error("systemd can't be reached over the system bus")]
    Bus(#[source] zbus::Error),
    /// systemd refused, by an error of this name.
    #[error("systemd refused to {what}: {message} ({name})")]
    Refused {
        /// What was asked for.
        what: String,
        /// Name of the D-Bus error.
        name: String,
        /// systemd's own words.
        message: String,
    },
    /// The job ended otherwise than done: `failed`, `timeout`, `canceled`, `dependency`.
    #[error("the job to {what}: {result}")]
    Job {
        /// What was asked for.
        what: String,
        /// systemd's word.
        result: String,
    },
    /// No answer in time. What was asked for may still happen.
    #[error("systemd did not {what} within {} s", .after.as_secs())]
    Deadline {
        /// What was asked for.
        what: String,
        /// How long it had.
        after: Duration,
    },
}

impl Manager {
    /// Starts a unit, or finds it started, and gives its main process.
    pub async fn start(&self, unit: &str) -> Result<u32, Error> {
        self.started(unit).await?;
        let state = self.state(unit).await?;
        // It may have ended between the end of its job and this look.
        state.main_pid.ok_or(Error::Job { what: format!("start {unit}"), result: state.result })
    }

    /// Kills all processes of a unit.
    pub async fn kill(&self, unit: &str) -> Result<(), Error> {
        let what = format!("kill {unit}");
        self.ask(&what, "KillUnit", &(unit, "all", Signal::SIGKILL as i32)).await.map(|_| ())
    }

    /// Units that run, or are about to begin or to end, and are named like this.
    pub async fn running(&self, pattern: &str) -> Result<Vec<String>, Error> {
        /// Name, description, load, active and sub state, what it follows, path; and its job: id, type, path.
        type Row = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);
        let states = ["active", "reloading", "activating", "deactivating"];
        let answer = self.ask("list units", "ListUnitsByPatterns", &(&states[..], &[pattern][..])).await?;
        let rows: Vec<Row> = answer.body().deserialize().map_err(Error::Bus)?;
        Ok(rows.into_iter().map(|row| row.0).collect())
    }

    /// How many processes a unit has.
    pub async fn processes(&self, unit: &str) -> Result<usize, Error> {
        let answer = self.ask(&format!("list processes of {unit}"), "GetUnitProcesses", &(unit,)).await?;
        let rows: Vec<(String, u32, String)> = answer.body().deserialize().map_err(Error::Bus)?;
        Ok(rows.len())
    }

    /// Forgets that a unit failed.
    pub async fn reset_failed(&self, unit: &str) -> Result<(), Error> {
        match self.ask(&format!("reset {unit}"), "ResetFailedUnit", &(unit,)).await {
            Err(Error::Refused { name, .. }) if is_not_loaded(&name) => Ok(()),
            answer => answer.map(|_| ()),
        }
    }

    /// A service unit as it is now.
    pub async fn state(&self, unit: &str) -> Result<State, Error> {
        let what = format!("tell the state of {unit}");
        let connection = self.alive().await?;
        let path = path_of(&connection, &what, unit).await?;
        state_at(&connection, &what, &path).await
    }

    /// A service unit once it `is` so, or as it is after this time.
    pub async fn becomes(&self, unit: &str, within: Duration, is: impl Fn(&State) -> bool) -> Result<State, Error> {
        let what = format!("tell the state of {unit}");
        let connection = self.alive().await?;
        subscribe(&connection, &what).await?;
        let path = path_of(&connection, &what, unit).await?;
        // From before the look: what changes after it is heard.
        let mut changes = changes_at(&connection, &path).await.map_err(Error::Bus)?;
        let until = Instant::now() + within;
        loop {
            let state = state_at(&connection, &what, &path).await?;
            if is(&state) || Instant::now() >= until {
                return Ok(state);
            }
            // A unit that nobody needs is forgotten without a word: asked for, it is there again.
            let next = until.min(Instant::now() + FORGOTTEN);
            if let Ok(None) = timeout_at(next, changes.next()).await {
                return Err(Error::Bus(zbus::Error::Failure("the connection was closed".to_owned())));
            }
        }
    }

    /// Has a unit started and waits for the end of that job.
    async fn started(&self, unit: &str) -> Result<(), Error> {
        let what = format!("start {unit}");
        let connection = self.alive().await?;
        let begun = async {
            subscribe(&connection, &what).await?;
            // From before the call: a job may end before its answer is read.
            let mut ends = ends_of_jobs(&connection, unit).await.map_err(Error::Bus)?;
            let job = call(&connection, &what, MANAGER_PATH, MANAGER, "StartUnit", &(unit, "replace")).await?;
            let job: OwnedObjectPath = job.body().deserialize().map_err(Error::Bus)?;
            while let Some(signal) = ends.next().await {
                let signal = signal.map_err(Error::Bus)?;
                let (_, ended, _, result): (u32, OwnedObjectPath, String, String) =
                    signal.body().deserialize().map_err(Error::Bus)?;
                if ended == job {
                    return if result == "done" { Ok(()) } else { Err(Error::Job { what: what.clone(), result }) };
                }
            }
            Err(Error::Bus(zbus::Error::Failure("the connection was closed".to_owned())))
        };
        timeout(JOB, begun).await.unwrap_or_else(|_| Err(Error::Deadline { what: what.clone(), after: JOB }))
    }

    async fn ask<B: Serialize + DynamicType>(&self, what: &str, method: &str, body: &B) -> Result<Message, Error> {
        call(&self.alive().await?, what, MANAGER_PATH, MANAGER, method, body).await
    }

    /// A connection that was alive a moment ago: the one there is, or another.
    async fn alive(&self) -> Result<Connection, Error> {
        let mut connection = self.connection.lock().await;
        if let Some(connection) = connection.as_ref() {
            // Of the bus itself; its policy refuses pings, and says so in the journal.
            let bus = ("org.freedesktop.DBus", "/org/freedesktop/DBus");
            let asked = connection.call_method(Some(bus.0), bus.1, Some(bus.0), "GetId", &());
            if matches!(timeout(ANSWER, asked).await, Ok(Ok(_))) {
                return Ok(connection.clone());
            }
        }
        *connection = None;
        Ok(connection.insert(connect().await?).clone())
    }
}

async fn connect() -> Result<Connection, Error> {
    let what = "answer a connection".to_owned();
    let connected = timeout(ANSWER, Connection::system()).await;
    connected.map_err(|_| Error::Deadline { what, after: ANSWER })?.map_err(Error::Bus)
}

/// One call, within its deadline.
async fn call<B: Serialize + DynamicType>(
    connection: &Connection,
    what: &str,
    path: &str,
    interface: &str,
    method: &str,
    body: &B,
) -> Result<Message, Error> {
    let answer = connection.call_method(Some(SYSTEMD), path, Some(interface), method, body);
    match timeout(ANSWER, answer).await {
        Ok(Ok(message)) => Ok(message),
        Ok(Err(zbus::Error::MethodError(name, message, _))) => {
            Err(Error::Refused { what: what.to_owned(), name: name.to_string(), message: message.unwrap_or_default() })
        }
        Ok(Err(error)) => Err(Error::Bus(error)),
        Err(_) => Err(Error::Deadline { what: what.to_owned(), after: ANSWER }),
    }
}

/// Has systemd send signals to this connection; a second time is refused, and as good.
async fn subscribe(connection: &Connection, what: &str) -> Result<(), Error> {
    match call(connection, what, MANAGER_PATH, MANAGER, "Subscribe", &()).await {
        Ok(_) => Ok(()),
        Err(Error::Refused { name, .. }) if name == "org.freedesktop.systemd1.AlreadySubscribed" => Ok(()),
        Err(error) => Err(error),
    }
}

async fn path_of(connection: &Connection, what: &str, unit: &str) -> Result<OwnedObjectPath, Error> {
    let answer = call(connection, what, MANAGER_PATH, MANAGER, "LoadUnit", &(unit,)).await?;
    answer.body().deserialize().map_err(Error::Bus)
}

async fn state_at(connection: &Connection, what: &str, path: &OwnedObjectPath) -> Result<State, Error> {
    // Without an interface systemd gives the properties of all of them, as of one moment.
    let all = call(connection, what, path.as_str(), PROPERTIES, "GetAll", &("",)).await?;
    let all: HashMap<String, OwnedValue> = all.body().deserialize().map_err(Error::Bus)?;
    let main_pid = number::<u32>(&all, "MainPID")?;
    Ok(State {
        active: text(&all, "ActiveState")?,
        result: text(&all, "Result")?,
        main_pid: (main_pid != 0).then_some(main_pid),
        exec_main_code: number(&all, "ExecMainCode")?,
        exec_main_status: number(&all, "ExecMainStatus")?,
    })
}

async fn changes_at(connection: &Connection, path: &OwnedObjectPath) -> zbus::Result<MessageStream> {
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .sender(SYSTEMD)?
        .path(path.as_ref())?
        .interface(PROPERTIES)?
        .member("PropertiesChanged")?
        .build();
    MessageStream::for_match_rule(rule, connection, None).await
}

async fn ends_of_jobs(connection: &Connection, unit: &str) -> zbus::Result<MessageStream> {
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .sender(SYSTEMD)?
        .path(MANAGER_PATH)?
        .interface(MANAGER)?
        .member("JobRemoved")?
        .arg(2, unit)?
        .build();
    MessageStream::for_match_rule(rule, connection, None).await
}

/// A unit that was never started, or that systemd no longer keeps in memory.
fn is_not_loaded(name: &str) -> bool {
    matches!(name, "org.freedesktop.systemd1.NoSuchUnit" | "org.freedesktop.systemd1.UnitNotLoaded")
}

fn text(all: &HashMap<String, OwnedValue>, name: &str) -> Result<String, Error> {
    let value = all.get(name).and_then(|value| value.downcast_ref::<&str>().ok());
    value.map(str::to_owned).ok_or_else(|| lacks(name))
}

fn number<T>(all: &HashMap<String, OwnedValue>, name: &str) -> Result<T, Error>
where
    T: for<'v> TryFrom<&'v zbus::zvariant::Value<'v>, Error = zbus::zvariant::Error>,
{
    all.get(name).and_then(|value| value.downcast_ref::<T>().ok()).ok_or_else(|| lacks(name))
}

/// The unit is no service, or systemd is another than it was.
fn lacks(property: &str) -> Error {
    Error::Bus(zbus::Error::Failure(format!("systemd told no {property}")))
}
