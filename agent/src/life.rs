//! The life of the agent: start, serve, stop.
//!
//! ```text
//! socket taken over ─► config ─► log ─► store opened ─► socket ─► serving ─► READY
//!                                                                              │ SIGHUP: config again
//!                                                                              ▼ SIGTERM
//!                               nothing new begins ─► operations end ─► connections end ─► gone
//! ```
//!
//! Ready means serving, not having a driver: without one the agent stays up and says what is
//! wrong. The hardware is first read while the agent is already answering. A second SIGTERM ends
//! it at once, whatever it is doing.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use gpush_api::{ApiError, Code, PendingRestart};
use gpush_core::config::Config;
use gpush_nvml::{Hardware, Options};
use sd_notify::NotifyState;
use tokio::task::JoinHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agent::Agent,
    apply,
    beside::Beside,
    conditions::Conditions,
    durable::{self, Remembered},
    http,
    listen::{
        accept::{self, Door},
        socket::{Access, HandedOver, Listening, SocketError, SocketFile},
    },
    logging::{self, Log},
    observe::Observer,
    operation::Operations,
    options::{Arguments, Paths, Surroundings},
    outside::Outside,
    people::People,
    settings::Settings,
    signals::{self, Asked, Signals},
    startup::{self, Startup},
};

/// Stands for the boot when its id can't be read.
const UNKNOWN_BOOT: &str = "unknown";

/// An accept loop.
type Serving = JoinHandle<std::io::Result<()>>;

/// How long the driver worker may take to end.
const WORKER_END: Duration = Duration::from_millis(500);

/// How long the runtime waits for its last tasks.
const RUNTIME_END: Duration = Duration::from_millis(200);

/// Runs the agent until it is told to stop.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    signals::arm().context("signals can't be handled")?;
    // Before any thread: it changes the environment.
    let handed_over = Listening::handed_over()?;
    let paths = Paths::resolve(arguments, &Surroundings::of_this_process())?;
    let settings = Settings::load(&paths.config, paths.config_named)?;
    let config = settings.config();
    let filter = arguments.log.clone().unwrap_or_else(|| config.log.level.name().to_owned());
    let log = logging::start(&filter).map_err(anyhow::Error::msg)?;
    let boot = startup::boot::id(&paths.boot_id_file);
    // Before the socket: the one that may not have the state directory must not be asked anything.
    let remembered = durable::open(&paths.state_dir, boot.as_deref().unwrap_or(UNKNOWN_BOOT))?;
    // The last handle waits for what is being recorded, so it is dropped here, off the runtime.
    let store = remembered.store.clone();
    let doors = doors(handed_over, &paths, &config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the runtime can't be started")?;
    let options = driver(arguments, &config);
    let outside = Outside {
        beside: Beside::new(&paths.state_dir, arguments.systemd_run.clone()),
        proc: arguments.proc.clone(),
        nvidia_smi: arguments.nvidia_smi.clone(),
        driverless: Default::default(),
    };
    // A filter of the command line is not the config's to change.
    let level = arguments.log.is_none().then_some(&log);
    let result = runtime.block_on(serve(settings, boot, remembered, doors, options, outside, level));
    runtime.shutdown_timeout(RUNTIME_END);
    drop(store);
    result
}

/// The sockets to serve.
struct Doors {
    public: Listening,
    admin: Option<Listening>,
}

/// The sockets that systemd made, and those that it did not.
fn doors(handed_over: Option<HandedOver>, paths: &Paths, config: &Config) -> Result<Doors, SocketError> {
    let named = paths.admin_socket.clone().or_else(|| config.api.admin_socket.as_ref().map(PathBuf::from));
    let (public, admin, beside) = match handed_over {
        // Where systemd makes the one, the other is systemd's to make as well: its sandbox may keep
        // us from it.
        Some(HandedOver { public, admin }) => (public, admin, None),
        None => {
            let beside = Some(paths.socket.with_file_name("admin.sock")).filter(|path| *path != paths.socket);
            (Listening::bind(&paths.socket, &access(config), "--socket")?, None, beside)
        }
    };
    let admin = match (admin, named.or(beside)) {
        (Some(admin), _) => Some(admin),
        (None, Some(path)) => Some(Listening::bind(&path, &Access::own(), "--admin-socket")?),
        (None, None) => None,
    };
    Ok(Doors { public, admin })
}

fn access(config: &Config) -> Access {
    Access { mode: config.api.socket_mode, group: config.api.socket_group.clone() }
}

/// How the driver worker is run: the command line's library before the config's.
fn driver(arguments: &Arguments, config: &Config) -> Options {
    // Not by its path: after an upgrade that names another version, whose worker speaks otherwise.
    let mut options = Options::new("/proc/self/exe");
    let configured =
        (config.driver != gpush_core::config::Driver::default()).then(|| PathBuf::from(&config.driver.library));
    options.library = arguments.library.clone().or(configured);
    options.deadlines.start = Duration::from_secs(config.driver.start_s.into());
    options.deadlines.read = Duration::from_millis(config.driver.read_ms.into());
    options.deadlines.change = Duration::from_secs(config.driver.change_s.into());
    options.deadlines.grace = options.deadlines.grace.min(options.deadlines.change);
    options
}

async fn serve(
    settings: Settings,
    boot: Result<String, ApiError>,
    remembered: Remembered,
    doors: Doors,
    options: Options,
    outside: Outside,
    level: Option<&Log>,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen().context("signals can't be handled")?;
    let hardware = Hardware::start(options);
    let people = People::start().context("a thread can't be started")?;
    let startup = Startup::default();
    let boot_id = boot.clone().unwrap_or_else(|_| UNKNOWN_BOOT.to_owned());
    let Remembered { store, notes, last_boot, unfinished, conditions } = remembered;
    let due = startup.due(&settings.config(), boot, last_boot);
    let agent = Arc::new(Agent {
        settings,
        observer: Observer::new(hardware.clone(), people.clone()),
        hardware,
        outside,
        people,
        operations: Operations::new(store.clone()),
        conditions: Conditions::of_the_store(store.clone(), conditions),
        store,
        notes,
        startup,
        desk: Default::default(),
        tasks: TaskTracker::new(),
        stopping: CancellationToken::new(),
        own_uid: nix::unistd::geteuid().as_raw(),
    });
    // Their GPUs are theirs before anybody is served.
    apply::take_over(&agent, unfinished, &boot_id).await;
    let name = doors.public.name.clone();
    let (listener, socket_file) = doors.public.split();
    let closing = CancellationToken::new();
    let open =
        |listener, door| tokio::spawn(accept::serve(listener, door, http::router(Arc::clone(&agent)), closing.clone()));
    let public = open(listener, Door::Public);
    let (admin, admin_file) = doors.admin.map(Listening::split).unzip();
    let admin = admin.map(|listener| open(listener, Door::Admin));
    let mut server = tokio::spawn(served(public, admin));
    say(&[NotifyState::Ready, NotifyState::Status(&format!("serving on {name}"))]);
    tracing::info!("ready: gpushd {} serves on {name}", env!("CARGO_PKG_VERSION"));
    let first_look = tokio::spawn(look(Arc::clone(&agent)));
    let startup = tokio::spawn(startup::run(Arc::clone(&agent), due));

    let ended = loop {
        tokio::select! {
            asked = signals.next() => match asked {
                Asked::Reload => reload(&agent, &socket_file, level),
                Asked::Stop => break None,
            },
            ended = &mut server => break Some(ended),
        }
    };
    say(&[NotifyState::Stopping]);
    agent.stopping.cancel();
    let unfinished = agent.operations.unfinished();
    if unfinished > 0 {
        tracing::info!("stopping once {unfinished} operations have ended; a second SIGTERM breaks them off");
        say(&[NotifyState::Status("finishing operations")]);
    }
    agent.tasks.close();
    agent.tasks.wait().await;
    let _ = startup.await;
    first_look.abort();
    closing.cancel();
    let result = match ended {
        Some(ended) => ended,
        None => server.await,
    };
    // Unlinked before the lock goes: the next agent never sees a stale file of ours.
    drop((socket_file, admin_file));
    let _ = tokio::time::timeout(WORKER_END, agent.hardware.stop()).await;
    tracing::info!("stopped");
    result.context("the accept loops broke off")?
}

/// Ends when all sockets are closed, or one can't be served.
async fn served(public: Serving, admin: Option<Serving>) -> anyhow::Result<()> {
    let ended = async |serving: Serving| {
        serving.await.context("the accept loop broke off")?.context("the socket can't be served")
    };
    let admin = async {
        match admin {
            Some(admin) => ended(admin).await,
            None => Ok(()),
        }
    };
    tokio::try_join!(ended(public), admin).map(|_| ())
}

/// Looks at the hardware so that the first asker finds it read, and notes what it is.
async fn look(agent: Arc<Agent>) {
    match agent.observer.recent().await {
        Ok(host) => {
            let driver = agent.hardware.status().driver;
            let (version, simulated) = driver.map_or_else(
                || ("?".to_owned(), ""),
                |driver| (driver.version, if driver.simulated { ", simulated" } else { "" }),
            );
            tracing::info!("driver {version}{simulated}: {} GPUs", host.gpus.len());
            let gpus = crate::view::compose(&agent, &crate::auth::Asker::agent(), host);
            for finding in gpush_core::desired::findings(&agent.settings.config(), &gpus) {
                tracing::warn!("{finding}");
            }
        }
        Err(error) => tracing::warn!("no driver yet: {error}"),
    }
}

fn reload(agent: &Agent, socket_file: &SocketFile, level: Option<&Log>) {
    let live = |wanted: &Config| {
        let (before, access) = (agent.settings.config(), access(wanted));
        if self::access(&before) != access {
            socket_file.set_access(&access).map_err(|error| to_api(&error))?;
        }
        if let Some(log) = level.filter(|_| before.log != wanted.log) {
            log.set_level(wanted.log.level);
        }
        Ok(())
    };
    match agent.settings.reload(live) {
        Ok(()) => {
            tracing::info!("the config was read again");
            for PendingRestart { key, in_force, in_file } in agent.settings.pending_restart() {
                let [in_force, in_file] =
                    [in_force, in_file].map(|value| value.unwrap_or_else(|| "not set".to_owned()));
                tracing::warn!("{key} stays {in_force} until gpushd is started anew: the file has {in_file}");
            }
            say(&[NotifyState::Status("the config was read again")]);
            agent.startup.reloaded();
        }
        Err(error) => {
            let causes: String = error.causes.iter().map(|cause| format!("; {cause}")).collect();
            tracing::error!("{error}{causes}");
            say(&[NotifyState::Status("the config is wrong and was not taken")]);
        }
    }
}

fn to_api(error: &SocketError) -> ApiError {
    let mut answer = ApiError::new(Code::ConfigInvalid, error.to_string());
    let mut at: &dyn std::error::Error = error;
    while let Some(source) = at.source() {
        answer = answer.cause(source.to_string());
        at = source;
    }
    answer.hint("mend socket_group and socket_mode under [api], then `systemctl reload gpushd`")
}

fn say(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::warn!("the service manager can't be notified: {error}");
    }
}
