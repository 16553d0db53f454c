//! Starts gpushd, serves requests, and stops. Creates and runs all other modules.
//!
//! ```text
//! socket taken over ─► config ─► log ─► store opened ─► socket ─► serving ─► READY
//!                                                                              │ SIGHUP: config again
//!                                                                              ▼ SIGTERM
//!                          no new operation begins ─► operations end ─► connections end ─► exit
//! ```
//!
//! If a background task fails for good, gpushd stops like after SIGTERM, but waits only a few seconds for operations, and
//! exits with an error ([`crate::system::tasks`]).
//!
//! READY means that the API is served, not that the driver works: without a driver, gpushd keeps running and reports
//! the error. The first reading of the hardware runs while requests are already served. A second SIGTERM ends gpushd at
//! once.
//!
//! | file | subject |
//! |---|---|
//! | `config` | loads the config at start, logs its errors, and checks the driver library |
//! | `compose` | creates the handles and passes them to the modules |
//! | `identities` | keeps the users and groups of the config resolved |
//! | `reloading` | a reload of the config, with the log |

mod compose;
mod config;
mod identities;
#[cfg(test)]
mod in_process;
mod reloading;
mod stored_state;
mod take_over;

use std::{path::PathBuf, pin::pin, sync::Arc, time::Duration};

use anyhow::Context;
use gpush_api::{ApiError, GpuUuid};
use gpush_core::{
    config::Config,
    desired::{self, ConfigFinding, KnownHost},
};
use gpush_host::{
    boot,
    helper::Helpers,
    identity::Users,
    kernel_log::KernelLog,
    machine,
    notify::{self, Notification},
    proc,
};
use gpush_mps::daemon::Launcher;
use gpush_nvml::{Hardware, Options};
use tokio::{
    runtime::{Handle, Runtime},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

use self::{
    compose::{HostEnvironment, Parts},
    reloading::Reloading,
    take_over::take_over,
};
use crate::{
    leases,
    lifecycle::stored_state::StoredState,
    metrics::job_files,
    modes::{mps, shared_gpus, timeslice},
    operations::{operation::Operations, overrides},
    processes,
    reconcile::{reload::ReloadCommand, startup},
    requests::caller::Viewer,
    serve::{
        http::{self, ApiHandles},
        listen::{
            accept::{self, Identities, Serving, SocketKind},
            socket::{Listening, PassedSockets, SocketError, SocketUsers},
        },
    },
    state::{State, readings::Readings, words},
    system::{
        host_services::HostServices,
        late_driver::LateDriver,
        logging::{self, Log},
        options::{Arguments, Paths, ProcessEnvironment},
        settings::Settings,
        signals::{self, SignalRequest, Signals},
        tasks::TaskName,
        watchdog,
    },
};

/// Placeholder for the boot id if gpushd cannot read the boot id.
const UNKNOWN_BOOT: &str = "unknown";

/// Maximum time that gpushd waits for the driver worker to end.
const WORKER_END: Duration = Duration::from_millis(500);

/// How long gpushd still serves clients after the last operation has ended. Clients poll the operation, and must be
/// able to read its result.
const LAST_POLLS: Duration = Duration::from_millis(250);

/// Maximum time that gpushd waits for operations and connections after a fatal failure.
const FATAL_STOP: Duration = Duration::from_secs(5);

/// Maximum time that gpushd waits for the last tasks of the runtime to end.
const RUNTIME_END: Duration = Duration::from_millis(200);

/// Runs gpushd until it receives SIGTERM.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // Call this before any thread starts, because it changes the environment variables.
    let handed_over = Listening::take_passed()?;
    let early = signals::register().context("cannot install the signal handlers")?;
    let paths = Paths::resolve(arguments, &ProcessEnvironment::of_this_process())?;
    let settings = config::load(&paths)?;
    let config = settings.config();
    // An empty filter, such as GPUSH_LOG= in a unit, counts as none.
    let own_filter = arguments.log.as_deref().filter(|filter| !filter.trim().is_empty());
    let log = logging::start(own_filter.unwrap_or_else(|| config.log.level.name())).map_err(anyhow::Error::msg)?;
    let boot = boot::id(&paths.boot_id_file);
    let users = Users::start(&arguments.host_root).context("the threads that look up users can't be started")?;
    proc::count_hanging_reads_by_account(users.accounts().clone());
    // Open the store before the socket: a gpushd that cannot use its state directory must not receive requests.
    let remembered = stored_state::open(&stored_state::Origin {
        directory: &paths.state_dir,
        boot_id: boot.as_deref().unwrap_or(UNKNOWN_BOOT),
        marker: &paths.store_marker,
        host_root: &arguments.host_root,
        accounts: users.accounts(),
    })?;
    settings.keep_copy();
    // Keep one handle of the store outside the runtime, and drop it last: the drop waits until all writes are on disk.
    let store = remembered.store.clone();
    let sockets = sockets(handed_over, &paths, &config)?;
    // Lock the MPS directory before anything in it is read.
    let _mps_lock = mps::lock_base(&paths.mps_dir)?;
    let runtime = runtime("gpushd").context("gpushd's async runtime can't be started")?;
    // Users' requests have their own threads. So they do not delay the admin socket, the hooks of Slurm and the watchdog.
    let users_runtime = self::runtime("gpushd-users").context("the runtime for users' requests can't be started")?;
    let options = driver(arguments, &config);
    config::check_trust(&paths, arguments.library.as_deref(), options.library.as_deref())?;
    let host_services = HostServices {
        helpers: Helpers::new(&paths.state_dir),
        proc: arguments.proc.clone(),
        nvidia_smi: arguments.nvidia_smi.clone(),
        systemd: None,
        level_interval: timeslice::INTERVAL,
        constants: arguments.constants.clone(),
        driverless: Default::default(),
        services: Default::default(),
        not_started: Default::default(),
    };
    let record = paths.socket.with_file_name("driver-majors");
    let late_driver = LateDriver::new(arguments.proc.clone(), record);
    // If the command line sets a log filter, a reload must not change the level.
    let level = own_filter.is_none().then_some(&log);
    let (mps_dir, mps_programs) = (paths.mps_dir.clone(), arguments.mps_programs.clone());
    let (notice_dir, job_dir) = (paths.notice_dir(), paths.job_dir());
    let host_root = arguments.host_root.clone();
    let for_users = users_runtime.handle().clone();
    let here = StartupContext {
        boot,
        host_root,
        host_services,
        users,
        early,
        mps_dir,
        notice_dir,
        job_dir,
        mps_programs,
        late_driver,
        for_users,
    };
    let result = runtime.block_on(serve(settings, here, remembered, sockets, options, level));
    users_runtime.shutdown_timeout(RUNTIME_END);
    runtime.shutdown_timeout(RUNTIME_END);
    drop(store);
    result
}

/// Creates an async runtime whose threads have this name.
fn runtime(name: &str) -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name(name).enable_all().build()
}

/// What gpushd knows about the host before it starts the runtime.
struct StartupContext {
    /// The boot id; an error if it cannot be read.
    boot: Result<String, ApiError>,
    /// Root of the host's file system.
    host_root: PathBuf,
    /// Access to helper units and other processes of the host.
    host_services: HostServices,
    /// Looks up users and groups.
    users: Users,
    /// Records signals that arrive before the runtime starts.
    early: signals::EarlyStop,
    /// Directory that contains one subdirectory for each MPS daemon.
    mps_dir: PathBuf,
    /// Directory of the files with notices.
    notice_dir: PathBuf,
    /// Directory of the files with the jobs on each GPU.
    job_dir: PathBuf,
    /// Directory of NVIDIA's MPS programs. Used if the config does not set the paths of these programs.
    mps_programs: Option<PathBuf>,
    /// Restarts gpushd if the driver was loaded after gpushd started.
    late_driver: LateDriver,
    /// The runtime that serves the socket for all users.
    for_users: Handle,
}

/// The sockets to serve.
struct Sockets {
    public: Listening,
    admin: Option<Listening>,
}

/// Returns the sockets that systemd passed, or creates them.
fn sockets(handed_over: Option<PassedSockets>, paths: &Paths, config: &Config) -> Result<Sockets, SocketError> {
    let named = paths.admin_socket.clone().or_else(|| config.api.admin_socket.as_ref().map(PathBuf::from));
    let (public, admin, default_admin) = match handed_over {
        // If systemd passed the first socket, create the second socket only at a configured path: the sandbox may
        // forbid the default path.
        Some(PassedSockets { public, admin }) => (public, admin, None),
        None => {
            let default_admin = Some(paths.socket.with_file_name("admin.sock")).filter(|path| *path != paths.socket);
            (Listening::bind(&paths.socket, SocketUsers::All, "--socket")?, None, default_admin)
        }
    };
    let admin = match (admin, named.or(default_admin)) {
        (Some(admin), _) => Some(admin),
        (None, Some(path)) => Some(Listening::bind(&path, SocketUsers::Own, "--admin-socket")?),
        (None, None) => None,
    };
    Ok(Sockets { public, admin })
}

/// Returns the options of the driver worker. The library on the command line has priority over the config.
fn driver(arguments: &Arguments, config: &Config) -> Options {
    // Start the worker from the running program file. After an upgrade, the program's path has another version, whose
    // protocol may differ.
    let mut options = Options::new("/proc/self/exe");
    let configured =
        (config.driver != gpush_core::config::Driver::default()).then(|| PathBuf::from(&config.driver.library));
    options.library = arguments.library.clone().or(configured);
    options.events = true;
    options.deadlines = arguments.constants.driver;
    options
}

/// Opens the kernel log, which names the processes that cause Xid errors.
fn kernel_log() -> Option<KernelLog> {
    let open = KernelLog::open();
    open.inspect_err(|error| tracing::info!("cannot read the kernel log, so Xid events name no process: {error}")).ok()
}

async fn serve(
    settings: Settings,
    here: StartupContext,
    remembered: StoredState,
    sockets: Sockets,
    options: Options,
    level: Option<&Log>,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen(here.early).context("cannot install the signal handlers")?;
    let job_dir = here.job_dir;
    let origin = HostEnvironment {
        boot: here.boot,
        host_root: here.host_root,
        host_services: Arc::new(here.host_services),
        users: here.users.clone(),
        mps_launcher: Launcher::of(&here.mps_dir),
        mps_dir: here.mps_dir,
        notice_dir: here.notice_dir,
        mps_programs: here.mps_programs,
        kernel_log: kernel_log(),
    };
    let Parts {
        engine,
        handles,
        hardware,
        monitor,
        timeslice,
        shared_gpus,
        recovery,
        startup,
        reload,
        mut inbox,
        unfinished,
        superseded,
        boot_id,
        due,
    } = compose::compose(settings, origin, remembered, options);
    let ApiHandles { context, operations, mps, leases, enforcement, policies, unleased, usage, .. } = handles.clone();
    let (state, readings) = (context.state.clone(), context.readings.clone());
    let (stopping, tasks) = (context.stopping.clone(), context.tasks.clone());
    let changed = take_over(&engine, &handles, &recovery, unfinished, &superseded, &boot_id).await;
    startup.startup.mark_changed(changed.into_iter());
    // Subscribe to events before a worker exists, so that the monitor misses none.
    tasks.spawn(TaskName::Monitor, {
        let stopping = stopping.clone();
        move || monitor.clone().run(monitor.hardware.events(), stopping.clone())
    });
    let name = sockets.public.name.clone();
    let (listener, socket_file) = sockets.public.split();
    let closing = CancellationToken::new();
    let (names, access) = (here.users.names().clone(), context.settings.clone());
    let has_admin_group = Arc::new(move |gids: &[u32]| {
        let is_one = |name: &String| names.last_group(name).ok().flatten().is_some_and(|gid| gids.contains(&gid));
        access.config().access.admin_groups.iter().any(is_one)
    });
    let identities = Identities { accounts: here.users.accounts().clone(), has_admin_group };
    tasks.spawn(TaskName::UserLookup, {
        let (state, users, stopping) = (state.clone(), here.users, stopping.clone());
        move || identities::keep_resolved(state.clone(), users.clone(), stopping.clone())
    });
    let open = |listener, socket_kind, runtime: Handle| {
        let (ping, pings) = mpsc::channel(1);
        let router = http::router(handles.clone());
        let serving =
            Serving { identities: identities.clone(), router, tasks: tasks.clone(), closing: closing.clone() };
        let serving = accept::serve(listener, socket_kind, serving, pings);
        let serving = async { serving.await.map_err(|error| format!("cannot serve the socket: {error}")) };
        let name = match socket_kind {
            SocketKind::Public => TaskName::PublicSocket,
            SocketKind::Admin => TaskName::AdminSocket,
        };
        // Accept connections on a separate thread. Otherwise other tasks could delay the loop until the backlog is
        // full.
        (tasks.spawn_final_thread(name, runtime, serving), ping)
    };
    let (public, ping) = open(listener, SocketKind::Public, here.for_users);
    let store = context.store.clone();
    if let Some(period) = notify::watchdog_period() {
        let (store, tasks, closing) = (store.clone(), tasks.clone(), closing.clone());
        tasks.clone().spawn(TaskName::Watchdog, move || {
            watchdog::notify_periodically(period, ping.clone(), store.clone(), tasks.clone(), closing.clone())
        });
    }
    let (admin, admin_file) = sockets.admin.map(Listening::split).unzip();
    let admin = admin.map(|listener| open(listener, SocketKind::Admin, Handle::current()).0);
    let trouble = context.settings.trouble();
    if let Some(trouble) = &trouble {
        config::log(trouble);
    }
    let trouble = trouble.map(|trouble| words::short_line(&trouble));
    // The status comes first, so that `systemctl status` shows it as soon as gpushd is ready.
    notify::send(Notification::Status(trouble.unwrap_or_else(|| format!("serving on {name}"))));
    notify::send(Notification::Ready);
    tracing::info!("host {}", machine::describe());
    tracing::info!("ready: gpushd {} serves on {name}", env!("CARGO_PKG_VERSION"));
    let first_reading = tasks.once(TaskName::GpuReading, read_first(readings, hardware.clone(), state.clone()));
    let first_reading = first_reading.abort_on_drop();
    let mut services = vec![engine.scheduler.spawn()];
    services.push(enforcement.spawn());
    services.extend(leases::spawn(&leases));
    services.push(policies.spawn());
    services.extend([
        tasks.spawn(TaskName::StartupLayouts, move || startup::run(startup.clone(), due.clone())),
        tasks.spawn(TaskName::OverrideExpiry, {
            let (state, stopping) = (state.clone(), stopping.clone());
            move || overrides::expire(state.clone(), store.clone(), stopping.clone())
        }),
        tasks.spawn(TaskName::MpsReconciler, {
            let mps = mps.clone();
            move || mps::run(mps.clone())
        }),
        tasks.spawn(TaskName::TimesliceReconciler, {
            let mps = mps.clone();
            move || {
                let mps = mps.clone();
                timeslice::run(timeslice.clone(), move |uuid: &GpuUuid| mps.has(uuid.as_target()))
            }
        }),
        tasks.spawn(TaskName::ComputeModes, {
            let stopping = stopping.clone();
            move || {
                let mps = mps.clone();
                shared_gpus::run(
                    shared_gpus.clone(),
                    move |uuid: &GpuUuid| mps.needs_compute_mode(uuid),
                    stopping.clone(),
                )
            }
        }),
        tasks.spawn(TaskName::UnleasedProcesses, move || processes::run(unleased.clone())),
        tasks.spawn(TaskName::UsageSampler, move || usage.clone().run()),
        tasks.spawn(TaskName::JobFiles, {
            let context = Arc::clone(&context);
            move || job_files::run(Arc::clone(&context), job_dir.clone())
        }),
    ]);

    let reloading = Reloading { reload: &reload, level };
    let mut needs_restart = pin!(here.late_driver.needs_restart(hardware.watch()));
    let mut fatal = pin!(tasks.fatal());
    let fatal_reason = loop {
        tokio::select! {
            asked = signals.next() => match asked {
                SignalRequest::Reload => drop(reloading.carry_out(ReloadCommand::signal()).await),
                SignalRequest::Stop => break None,
            },
            (wish, reply) = inbox.next() => {
                // Ignore a failed send: the caller has disconnected.
                let _ = reply.send(reloading.carry_out(wish).await);
            }
            () = &mut needs_restart => {
                tracing::warn!("the driver was loaded after gpushd started: gpushd restarts, so that systemd allows the driver's devices");
                break None;
            }
            reason = &mut fatal => break Some(reason),
        }
    };
    notify::send(Notification::Stopping);
    stopping.cancel();
    drop(inbox);
    let stop = async {
        // `tasks` contains the operations and requests that have already begun. Queued operations leave the queue now.
        if finish_operations(tasks.finish(), &operations).await {
            tokio::time::sleep(LAST_POLLS).await;
        }
        for service in services {
            let _ = service.await;
        }
        drop(first_reading);
        // Event streams still send the events about the ended operations, and then close.
        state.events().close();
        closing.cancel();
        for socket in std::iter::once(public).chain(admin) {
            let _ = socket.await;
        }
    };
    // After a fatal failure, an operation may never end. The next gpushd recovers it.
    let limit = if fatal_reason.is_some() { FATAL_STOP } else { Duration::MAX };
    let _ = tokio::time::timeout(limit, stop).await;
    // Remove the socket files before their locks are released, so that the next gpushd never finds a stale file.
    drop((socket_file, admin_file));
    let _ = tokio::time::timeout(WORKER_END, hardware.stop()).await;
    tracing::info!("stopped");
    fatal_reason.map_or(Ok(()), |reason| Err(anyhow::Error::msg(reason)))
}

/// Waits until the tasks of all operations have ended. Returns whether an operation was running.
async fn finish_operations(ended_tasks: impl Future<Output = ()>, operations: &Operations) -> bool {
    let mut ended_tasks = pin!(ended_tasks);
    let unfinished = tokio::select! {
        biased;
        () = &mut ended_tasks => return false,
        unfinished = operations.wait_for_unfinished() => unfinished,
    };
    tracing::info!("gpushd waits for {unfinished} running operations, then stops; a second SIGTERM stops it at once");
    notify::send(Notification::Status("finishing operations".to_owned()));
    ended_tasks.await;
    true
}

/// Reads the GPUs for the first time, and logs the result.
async fn read_first(readings: Readings, hardware: Hardware, state: State) {
    match readings.recent().await {
        Ok(observed) => {
            let driver = hardware.status().driver;
            let (version, simulated) = driver.as_ref().map_or(("?", ""), |driver| {
                (driver.version.as_str(), if driver.simulated { ", simulated" } else { "" })
            });
            tracing::info!("driver {version}{simulated}, number of GPUs: {}", observed.host.gpus.len());
            let gpus = observed.gpus(Viewer::Agent);
            for finding in desired::findings(&state.config(), Some(KnownHost { gpus: &gpus, driver: driver.as_ref() }))
            {
                // `config check` and `doctor` report the lints: they do not depend on this start.
                if let ConfigFinding::Remark(remark) = finding {
                    tracing::warn!("{remark}");
                }
            }
        }
        Err(error) => tracing::warn!("the driver does not answer yet: {error}"),
    }
}
