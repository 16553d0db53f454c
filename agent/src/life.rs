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

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use gpush_api::{ApiError, Code, ConfigChange, Happening, PendingRestart, Reloaded};
use gpush_core::config::Config;
use gpush_host::{
    boot,
    helper::{
        Helpers,
        trust::{self, Untrusted},
    },
    identity::Users,
    machine,
    notify::{self, Notification},
};
use gpush_nvml::{Hardware, Options};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    agent::{Agent, Shared},
    apply::{self, Executor, Planner, Recovery, Services},
    caller::Viewer,
    durable::{self, Remembered},
    http,
    idempotency::Idempotency,
    lanes::Lanes,
    listen::{
        accept::{self, Door},
        accounts::{self, Accounts},
        socket::{Access, HandedOver, Listening, SocketError, SocketFile},
    },
    logging::{self, Log},
    maintenance,
    modes::{driver::Driver, mig::MigMode},
    monitor::Monitor,
    mps::{self, Mps},
    operation::{Ongoing, Operations},
    options::{Arguments, Paths, Surroundings, Trust},
    outside::Outside,
    overrides,
    processes::{self, SeenShares, Strays},
    reload::{self, Wish},
    settings::Settings,
    shared_gpus::{self, SharedGpus},
    signals::{self, Asked, Signals},
    startup::{self, Startup},
    state::{Commits, Conditions, Events, Initial, Overrides, State, readings::Readings, words},
    timeslice::{self, Timeslice},
    watchdog,
};

/// Stands for the boot when its id can't be read.
const UNKNOWN_BOOT: &str = "unknown";

/// An accept loop.
type Serving = JoinHandle<std::io::Result<()>>;

/// How long the driver worker may take to end.
const WORKER_END: Duration = Duration::from_millis(500);

/// How long those who follow an operation to its end are still answered after it, where it was waited
/// for: between two of their questions, they must not find the door closed.
const LAST_WORD: Duration = Duration::from_millis(250);

/// How long the runtime waits for its last tasks.
const RUNTIME_END: Duration = Duration::from_millis(200);

/// Runs the agent until it is told to stop.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Before any thread: it changes the environment.
    let handed_over = Listening::handed_over()?;
    let early = signals::arm().context("signals can't be handled")?;
    let paths = Paths::resolve(arguments, &Surroundings::of_this_process())?;
    let settings = Settings::load(&paths.config, paths.config_named, paths.trust)?;
    let config = settings.config();
    let filter = arguments.log.clone().unwrap_or_else(|| config.log.level.name().to_owned());
    let log = logging::start(&filter).map_err(anyhow::Error::msg)?;
    let boot = boot::id(&paths.boot_id_file);
    // Before the socket: the one that may not have the state directory must not be asked anything.
    let remembered = durable::open(&durable::Origin {
        directory: &paths.state_dir,
        boot_id: boot.as_deref().unwrap_or(UNKNOWN_BOOT),
        marker: &paths.store_marker,
        host_root: &arguments.host_root,
    })?;
    // The last handle waits for what is being recorded, so it is dropped here, off the runtime.
    let store = remembered.store.clone();
    let doors = doors(handed_over, &paths, &config)?;
    // Before anything is looked for in it.
    let _mps_lock = mps::lock_base(&paths.mps_dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the runtime can't be started")?;
    let options = driver(arguments, &config);
    check_trust(&paths, options.library.as_deref())?;
    let outside = Outside {
        helpers: Helpers::new(&paths.state_dir),
        proc: arguments.proc.clone(),
        nvidia_smi: arguments.nvidia_smi.clone(),
        driverless: Default::default(),
        services: Default::default(),
        not_started: Default::default(),
    };
    // A filter of the command line is not the config's to change.
    let level = arguments.log.is_none().then_some(&log);
    let (mps_dir, mps_programs) = (paths.mps_dir.clone(), arguments.mps_programs.clone());
    let here = Here { boot, host_root: arguments.host_root.clone(), outside, early, mps_dir, mps_programs };
    let result = runtime.block_on(serve(settings, here, remembered, doors, options, level));
    runtime.shutdown_timeout(RUNTIME_END);
    drop(store);
    result
}

/// Where the agent runs.
struct Here {
    /// The boot's id, or why it can't be told.
    boot: Result<String, ApiError>,
    /// Root of the host's file system.
    host_root: PathBuf,
    /// Helper units and other processes of the host.
    outside: Outside,
    /// What was asked by signal so far.
    early: signals::Early,
    /// Directory of MPS daemons.
    mps_dir: PathBuf,
    /// Directory of NVIDIA's MPS programs, if not the config's.
    mps_programs: Option<PathBuf>,
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
    options.events = true;
    options.deadlines.start = Duration::from_secs(config.driver.start_s.into());
    options.deadlines.read = Duration::from_millis(config.driver.read_ms.into());
    options.deadlines.change = Duration::from_secs(config.driver.change_s.into());
    options.deadlines.grace = options.deadlines.grace.min(options.deadlines.change);
    options
}

/// Refuses a driver library that another user could have written, or logs it where trust is not required. The
/// config file was checked as it was read. A library without a path is found by the dynamic linker, whose
/// directories are root's.
fn check_trust(paths: &Paths, library: Option<&Path>) -> anyhow::Result<()> {
    let own = nix::unistd::geteuid().as_raw();
    let library = library.filter(|library| library.components().count() > 1);
    for (what, path) in [("config file", Some(paths.config.as_path())), ("driver library", library)] {
        let Some(why) = path.and_then(|path| trust::check_file(path, own).err()) else { continue };
        // The loader says what is wrong with a library that is not there, and health tells it.
        if matches!(why, Untrusted::Unreadable(_)) {
            continue;
        }
        let path = path.unwrap_or(Path::new("")).display();
        match paths.trust {
            Trust::Required => anyhow::bail!("the {what} {path} is not trusted: {why}; {}", why.remedy()),
            Trust::Logged => tracing::warn!("the {what} {path} would not be trusted by the system's service: {why}"),
        }
    }
    Ok(())
}

async fn serve(
    settings: Settings,
    Here { boot, host_root, outside, early, mps_dir, mps_programs }: Here,
    remembered: Remembered,
    doors: Doors,
    options: Options,
    level: Option<&Log>,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen(early).context("signals can't be handled")?;
    let hardware = Hardware::start(options);
    let users = Users::start().context("a thread can't be started")?;
    let startup = Startup::default();
    let boot_id = boot.clone().unwrap_or_else(|_| UNKNOWN_BOOT.to_owned());
    let Remembered {
        store,
        notes,
        last_boot,
        unfinished,
        superseded,
        conditions,
        overrides,
        mps_shares,
        mps_targets,
        shared_gpus,
        generation,
        noticed,
        lost,
        known_since,
    } = remembered;
    let (reloads, mut inbox) = reload::channel();
    let read_only = durable::read_only(&notes);
    let unknown = lost.as_ref().is_some_and(|lost| lost.holds) || read_only.is_some();
    let due = startup.due(&settings.config(), boot, last_boot, unknown);
    let initial = Initial {
        config: settings.config(),
        conditions: Conditions::new(conditions, noticed),
        overrides: Overrides::new(generation, overrides),
        lost,
        known_since,
    };
    let state = State::new(store.clone(), Events::new(store.instance()), initial);
    mps_targets.iter().for_each(|target| state.share(&target.target, target.in_force.is_some()));
    let readings = Readings::new(hardware.clone(), users.clone(), state.clone());
    let lanes = Lanes::new(state.clone());
    let shared_gpus =
        SharedGpus::new(store.clone(), state.clone(), readings.clone(), hardware.clone(), lanes.clone(), shared_gpus);
    let stopping = CancellationToken::new();
    let outside = Arc::new(outside);
    let timeslice = Timeslice::new(
        state.clone(),
        readings.clone(),
        hardware.clone(),
        lanes.clone(),
        shared_gpus.clone(),
        Arc::clone(&outside),
        stopping.clone(),
    );
    let own_uid = nix::unistd::geteuid().as_raw();
    let idempotency = Idempotency::new(store.clone());
    let remembered: Arc<SeenShares> = Arc::default();
    let named = Arc::clone(&remembered);
    let handles = mps::Handles {
        state: state.clone(),
        readings: readings.clone(),
        lanes: lanes.clone(),
        hardware: hardware.clone(),
        store: store.clone(),
        users: users.clone(),
        shared_gpus: shared_gpus.clone(),
        timeslice: timeslice.clone(),
        idempotency: idempotency.clone(),
        named_share: Arc::new(move |pid| named.named_share(pid)),
        stopping: stopping.clone(),
        own_uid,
    };
    let mps = Mps::new(mps_dir, mps_programs, mps_shares, mps_targets, handles);
    let strays = Strays::new(
        state.clone(),
        readings.clone(),
        mps.clone(),
        store.clone(),
        stopping.clone(),
        read_only.clone(),
        remembered,
    );
    let operations = Operations::new(store.clone(), state.events().clone(), lanes.clone());
    let mig = MigMode {
        driver: Driver { hardware: hardware.clone(), readings: readings.clone() },
        outside: Arc::clone(&outside),
        users: users.clone(),
        state: state.clone(),
    };
    let planner =
        Planner { mig: mig.clone(), mps: mps.clone(), operations: operations.clone(), host_root: host_root.clone() };
    let services = Services {
        state: state.clone(),
        store: store.clone(),
        outside: Arc::clone(&outside),
        stopping: stopping.clone(),
    };
    let tasks = TaskTracker::new();
    let executor = Executor {
        mig,
        mps: mps.clone(),
        timeslice: timeslice.clone(),
        services,
        operations: operations.clone(),
        tasks: tasks.clone(),
    };
    let agent = Arc::new(Agent {
        settings,
        planner,
        executor,
        readings,
        commits: Commits::new(store.clone(), state.clone()),
        hardware,
        outside,
        users,
        operations,
        lanes,
        state,
        queue: Default::default(),
        idempotency,
        mps,
        shared_gpus,
        timeslice,
        strays,
        reloads,
        store,
        notes,
        read_only,
        turn: tokio::sync::Mutex::default(),
        host_root,
        startup,
        desk: Default::default(),
        tasks,
        stopping,
        own_uid,
    });
    // Before anybody could ask the driver, and before a queued operation could begin.
    maintenance::resume(&agent);
    // Their GPUs are theirs before anybody is served.
    mps::find(&agent.mps);
    let recovery =
        Recovery { executor: agent.executor.clone(), planner: agent.planner.clone(), stopping: agent.stopping.clone() };
    let enqueue = |ongoing: &Arc<Ongoing>, order, since| agent.queue.enter_again(&agent.lanes, ongoing, order, since);
    let changed = recovery.take_over(unfinished, &superseded, &boot_id, enqueue).await;
    agent.startup.leave(changed.into_iter());
    let queue = tokio::spawn(apply::queue::run(Arc::clone(&agent)));
    // Listens from before there is a worker to be heard.
    let monitor =
        Monitor { state: agent.state.clone(), readings: agent.readings.clone(), hardware: agent.hardware.clone() };
    let monitoring = tokio::spawn(monitor.run(agent.hardware.events(), agent.stopping.clone()));
    let name = doors.public.name.clone();
    let (listener, socket_file) = doors.public.split();
    let closing = CancellationToken::new();
    let accounts = Accounts::default();
    let access = Arc::clone(&agent);
    let admin_groups = move || access.settings.config().access.admin_groups.clone();
    let following = tokio::spawn(accounts::follow(accounts.clone(), admin_groups, agent.stopping.clone()));
    let open = |listener, door| {
        let (knock, knocks) = mpsc::channel(1);
        let router = http::router(Arc::clone(&agent));
        (tokio::spawn(accept::serve(listener, door, accounts.clone(), router, closing.clone(), knocks)), knock)
    };
    let (public, knock) = open(listener, Door::Public);
    let fed = notify::watchdog_period().map(|period| tokio::spawn(watchdog::feed(period, knock, agent.store.clone())));
    let (admin, admin_file) = doors.admin.map(Listening::split).unzip();
    let admin = admin.map(|listener| open(listener, Door::Admin).0);
    let mut server = tokio::spawn(served(public, admin));
    notify::send(Notification::Ready);
    notify::send(Notification::Status(format!("serving on {name}")));
    tracing::info!("host {}", machine::describe());
    tracing::info!("ready: gpushd {} serves on {name}", env!("CARGO_PKG_VERSION"));
    let first_look = tokio::spawn(look(Arc::clone(&agent)));
    let startup = tokio::spawn(startup::run(Arc::clone(&agent), due));
    let expiry = overrides::expire(agent.state.clone(), agent.store.clone(), agent.stopping.clone());
    let expiry = tokio::spawn(expiry);
    let daemons = tokio::spawn(mps::run(agent.mps.clone()));
    let of = Arc::clone(&agent);
    let has_daemon = move |uuid: &str| of.mps.has(uuid);
    let turns = tokio::spawn(timeslice::run(agent.timeslice.clone(), has_daemon));
    let of = Arc::clone(&agent);
    let needs = move |uuid: &str| of.mps.needs_compute_mode(uuid);
    let leftover = tokio::spawn(shared_gpus::run(agent.shared_gpus.clone(), needs, agent.stopping.clone()));
    let strays = tokio::spawn(processes::run(agent.strays.clone()));

    let ended = loop {
        tokio::select! {
            asked = signals.next() => match asked {
                Asked::Reload => drop(reload(&agent, Wish::signal(), &socket_file, level).await),
                Asked::Stop => break None,
            },
            (wish, reply) = inbox.next() => {
                // Whoever asked may have gone.
                let _ = reply.send(reload(&agent, wish, &socket_file, level).await);
            }
            ended = &mut server => break Some(ended),
        }
    };
    notify::send(Notification::Stopping);
    agent.stopping.cancel();
    drop(inbox);
    let unfinished = agent.operations.unfinished();
    if unfinished > 0 {
        tracing::info!("stopping once {unfinished} operations have ended; a second SIGTERM breaks them off");
        notify::send(Notification::Status("finishing operations".to_owned()));
    }
    // It begins nothing more, and what it began is among the tasks.
    let _ = queue.await;
    agent.tasks.close();
    agent.tasks.wait().await;
    if unfinished > 0 {
        tokio::time::sleep(LAST_WORD).await;
    }
    let _ = tokio::join!(startup, expiry, daemons, turns, leftover, strays);
    first_look.abort();
    following.abort();
    let _ = fed.map(|fed| fed.abort());
    // Those who listen hear how the operations ended, and that this is the end.
    agent.state.events().close();
    monitoring.abort();
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

/// Looks at the hardware so that the first caller finds it read, and notes what it is.
async fn look(agent: Arc<Agent>) {
    match agent.readings.recent().await {
        Ok(observed) => {
            let driver = agent.hardware.status().driver;
            let (version, simulated) = driver.map_or_else(
                || ("?".to_owned(), ""),
                |driver| (driver.version, if driver.simulated { ", simulated" } else { "" }),
            );
            tracing::info!("driver {version}{simulated}: {} GPUs", observed.host.gpus.len());
            let gpus = observed.gpus(Viewer::Agent);
            for finding in gpush_core::desired::findings(&agent.settings.config(), &gpus) {
                tracing::warn!("{finding}");
            }
        }
        Err(error) => tracing::warn!("no driver yet: {error}"),
    }
}

async fn reload(
    agent: &Shared,
    wish: Wish,
    socket_file: &SocketFile,
    level: Option<&Log>,
) -> Result<Reloaded, ApiError> {
    let in_force = Mutex::new(agent.settings.config().as_ref().clone());
    let live = |wanted: &Config| {
        let mut before = in_force.lock().unwrap_or_else(PoisonError::into_inner);
        let access = access(wanted);
        if self::access(&before) != access {
            socket_file.set_access(&access).map_err(|error| to_api(&error))?;
        }
        if let Some(log) = level.filter(|_| before.log != wanted.log) {
            log.set_level(wanted.log.level);
        }
        before.clone_from(wanted);
        Ok(())
    };
    let reloaded = reload::carry_out(agent, wish, live).await;
    match &reloaded {
        Ok(reloaded) => {
            tracing::info!("the config was read again");
            for one in &reloaded.ended {
                tracing::info!(gpu = one.uuid, "the override of {} has ended with it", words::actor(&one.by));
            }
            for PendingRestart { key, in_force, in_file } in agent.settings.pending_restart() {
                let [in_force, in_file] =
                    [in_force, in_file].map(|value| value.unwrap_or_else(|| "not set".to_owned()));
                tracing::warn!("{key} stays {in_force} until gpushd is started anew: the file has {in_file}");
            }
            let pending_restart = agent.settings.pending_restart().into_iter().map(|one| one.key).collect();
            agent.state.events().publish(Happening::Config(ConfigChange { taken: true, error: None, pending_restart }));
            notify::send(Notification::Status("the config was read again".to_owned()));
        }
        Err(error) => {
            tracing::error!("{}", words::in_full(error));
            let change = ConfigChange { taken: false, error: Some(error.clone()), pending_restart: Vec::new() };
            agent.state.events().publish(Happening::Config(change));
            notify::send(Notification::Status("the config is wrong and was not taken".to_owned()));
        }
    }
    reloaded
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
