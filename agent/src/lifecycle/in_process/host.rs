//! The host of an in-process gpushd: its files, its boot id and its GPUs.

use std::{
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use axum::Router;
use gpush_api::{ApiError, Code, Gpu, GpuUuid};
use gpush_core::preset;
use gpush_host::{
    helper::Helpers,
    identity::Users,
    systemd::ScriptedSystemd,
    users::{Lookups, NameService},
};
use gpush_locked::Locked;
use gpush_mps::daemon::Launcher;
use gpush_nvml::Options;

use super::{
    InProcess, PATIENCE,
    daemons::ScriptedMps,
    gpus::ScriptedGpus,
    scripted_services::{ScriptedHelpers, ScriptedServices},
    smi::ScriptedSmi,
};
use crate::{
    leases,
    lifecycle::{
        UNKNOWN_BOOT,
        compose::{HostEnvironment, Parts, compose},
        stored_state::{self, StoredState},
        take_over::take_over,
    },
    modes::{mps, shared_gpus, timeslice},
    operations::{apply::Engine, overrides},
    processes::Unleased,
    reconcile::{reload::Reload, startup},
    serve::http,
    system::{constants::Constants, host_services::HostServices, options::Trust, settings::Settings, tasks::TaskName},
};

/// A host. It survives its gpushd.
pub(super) struct ScriptedHost {
    pub(super) gpus: Arc<ScriptedGpus>,
    pub(super) daemons: Arc<ScriptedMps>,
    pub(super) smi: Arc<ScriptedSmi>,
    pub(super) services: Arc<ScriptedServices>,
    /// systemd, as far as it limits which devices units may open; `None` if this gpushd is not the system service.
    pub(super) systemd: Locked<Option<ScriptedSystemd>>,
    /// Interval at which gpushd reads the time-slice levels.
    pub(super) level_interval: Locked<Duration>,
    /// The boot id; `None` if it cannot be read.
    boot: Locked<Option<String>>,
    boots: AtomicU32,
    /// Contains the config, the state directory and the root of the host's file system.
    directory: tempfile::TempDir,
}

impl ScriptedHost {
    /// Creates a host with the first `count` GPUs of a preset.
    pub(super) fn new(preset: &str, count: usize) -> Arc<Self> {
        let mut gpus = preset::gpus(preset).expect("a preset");
        gpus.truncate(count);
        Self::with(&gpus)
    }

    /// Creates a host with all GPUs of a preset.
    pub(super) fn of(preset: &str) -> Arc<Self> {
        Self::new(preset, usize::MAX)
    }

    /// Creates a host with these GPUs.
    pub(super) fn with(gpus: &[Gpu]) -> Arc<Self> {
        let host = Self {
            gpus: ScriptedGpus::new(gpus),
            daemons: ScriptedMps::new(),
            smi: ScriptedSmi::new(gpus.iter().map(|gpu| gpu.uuid.to_string())),
            services: Arc::default(),
            systemd: Locked::default(),
            level_interval: Locked::new(timeslice::INTERVAL),
            boot: Locked::new(Some("boot-0".to_owned())),
            boots: AtomicU32::new(0),
            directory: tempfile::tempdir().expect("a directory"),
        };
        host.create_state_directory();
        let programs = host.path("programs");
        std::fs::create_dir(&programs).expect("a directory");
        for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
            std::os::unix::fs::symlink("/bin/true", programs.join(name)).expect("a link");
        }
        // As in the directory of a real gpushd. It separates the leases of programs in concurrent tests.
        let mps = host.path("mps");
        std::fs::create_dir(&mps).and_then(|()| std::fs::write(mps.join("agent.lock"), "")).expect("a directory");
        Arc::new(host)
    }

    /// Creates the state directory of gpushd.
    pub(super) fn create_state_directory(&self) {
        std::fs::DirBuilder::new().mode(0o700).create(self.state_directory()).expect("a directory");
    }

    /// Returns the path of a file of the host.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the state directory of gpushd.
    pub(super) fn state_directory(&self) -> PathBuf {
        self.path("state")
    }

    /// Replaces the config file, without a reload.
    pub(super) fn write_config(&self, text: &str) {
        std::fs::write(self.path("config.toml"), text).expect("the config can be written");
    }

    /// Reboots. No gpushd may run.
    pub(super) fn reboot(&self) {
        self.gpus.reboot();
        let boot = self.boots.fetch_add(1, Ordering::Relaxed) + 1;
        *self.boot.lock() = Some(format!("boot-{boot}"));
        // Its directory is cleared by a reboot.
        let _may_be_absent = std::fs::remove_file(self.path("marker"));
    }

    /// Makes the boot id unreadable.
    pub(super) fn hide_boot(&self) {
        *self.boot.lock() = None;
    }

    /// Runs a gpushd with this config until the end of `test`. gpushd then ends as if it was killed: what it has not
    /// recorded is lost.
    pub(super) fn run_until(self: &Arc<Self>, config: &str, test: impl AsyncFnOnce(&InProcess)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("threads for the test").block_on(async {
            let running = self.start(config).await;
            test(&running).await;
            running.kill();
        });
    }

    /// Starts gpushd with this config. It does not apply layouts by itself.
    pub(super) async fn start(self: &Arc<Self>, config: &str) -> InProcess {
        self.start_with(config, false).await
    }

    /// Starts gpushd with this config. It applies the layouts of a new boot, and repairs drift if the config says so.
    pub(super) async fn start_with_layouts(self: &Arc<Self>, config: &str) -> InProcess {
        self.start_with(config, true).await
    }

    async fn start_with(self: &Arc<Self>, config: &str, layouts: bool) -> InProcess {
        self.write_config(config);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("threads for gpushd");
        let host = Arc::clone(self);
        let started = runtime.spawn(async move { host.run(layouts).await });
        let (router, engine, unleased) = started.await.expect("gpushd starts");
        let (stopping, tasks) = (engine.context.stopping.clone(), engine.context.tasks.clone());
        let (runtime, engine, gpus) = (Some(runtime), Some(engine), Arc::clone(&self.gpus));
        InProcess { runtime, router, engine, gpus, unleased, stopping, tasks, host: Arc::clone(self) }
    }

    async fn run(&self, layouts: bool) -> (Router, Engine, Unleased) {
        let copy = self.path("config.last-valid.toml");
        let settings = Settings::load_as_service(&self.path("config.toml"), true, Trust::Logged, &copy, false);
        let constants = constants_of(&std::fs::read_to_string(self.path("config.toml")).expect("a config"));
        let users = self.users();
        let boot = self.boot.lock().clone();
        let remembered = tokio::task::block_in_place(|| self.open(boot.as_deref(), &users));
        let helpers = Arc::new(ScriptedHelpers { smi: Arc::clone(&self.smi), services: Arc::clone(&self.services) });
        let environment = HostEnvironment {
            boot: boot.ok_or_else(|| ApiError::new(Code::Internal, "cannot read the boot id")),
            host_root: self.directory.path().to_owned(),
            host_services: Arc::new(HostServices {
                helpers: Helpers::new(&self.state_directory()).with_script(helpers),
                proc: "/proc".into(),
                nvidia_smi: Some("/bin/true".into()),
                systemd: self.systemd.lock().as_ref().map(|systemd| Arc::new(systemd.manager())),
                level_interval: *self.level_interval.lock(),
                constants: constants.clone(),
                driverless: Default::default(),
                services: Default::default(),
                not_started: Default::default(),
            }),
            users,
            mps_dir: self.path("mps"),
            notice_dir: self.path("notices"),
            mps_launcher: Launcher::scripted(Arc::clone(&self.daemons) as Arc<_>),
            mps_programs: Some(self.path("programs")),
            kernel_log: None,
        };
        let mut options = Options::scripted(Arc::clone(&self.gpus) as Arc<_>);
        options.deadlines = constants.driver;
        let parts = compose(settings, environment, remembered, options);
        let router = http::router(parts.handles.clone());
        let running = (router, Engine::clone(&parts.engine), parts.handles.unleased.clone());
        serve(parts, layouts).await;
        running
    }

    fn users(&self) -> Users {
        // The host has the users 0 to 65535.
        let name = |uid: &u32| match uid {
            0 => Some("root".to_owned()),
            65_536.. => None,
            other => Some(format!("user{other}")),
        };
        let uid = |name: &String| match name.as_str() {
            "root" => Some(0),
            other => other.strip_prefix("user")?.parse().ok(),
        };
        let known = Lookups {
            user: Box::new(move |uid| Some(name(uid))),
            uid: Box::new(move |name| Some(uid(name))),
            // `group3` has gid 3, and each user whose uid ends in 03 as its member.
            group: Box::new(|name| Some(name.strip_prefix("group").and_then(|gid| gid.parse().ok()))),
            memberships: Box::new(|uid| Some(Some(vec![uid % 100]))),
            primary_group: Box::new(|uid| Some(Some(format!("group{}", uid % 100)))),
        };
        let names = NameService::with(known).expect("the threads of the name service");
        Users::new(names, nix::unistd::geteuid().as_raw(), self.directory.path())
    }

    /// Opens the store. Waits until the previous gpushd has closed it.
    fn open(&self, boot: Option<&str>, users: &Users) -> StoredState {
        let (directory, marker) = (self.state_directory(), self.path("marker"));
        let until = Instant::now() + PATIENCE;
        loop {
            let opened = stored_state::open(&stored_state::Origin {
                directory: &directory,
                boot_id: boot.unwrap_or(UNKNOWN_BOOT),
                marker: &marker,
                host_root: self.directory.path(),
                accounts: users.accounts(),
            });
            match opened {
                Ok(opened) => return opened,
                Err(error) if Instant::now() > until => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

/// Returns the constants that the config of a test names, in comment lines `# --constants KEY=VALUE,…`.
fn constants_of(config: &str) -> Constants {
    let lines: Vec<&str> = config.lines().filter_map(|line| line.strip_prefix("# --constants ")).collect();
    lines.join(",").parse().expect("constants")
}

impl Drop for ScriptedHost {
    fn drop(&mut self) {
        self.daemons.end(&self.path("mps"));
    }
}

/// Starts the tasks that requests need, the reconcilers of MPS daemons, compute modes and time-slice levels, and the task
/// that applies layouts if `layouts` is true.
async fn serve(parts: Parts, layouts: bool) {
    let Parts { engine, handles, recovery, unfinished, superseded, boot_id, startup, due, reload, mut inbox, .. } =
        parts;
    let (levels, shared_gpus) = (parts.timeslice, parts.shared_gpus);
    let changed = take_over(&engine, &handles, &recovery, unfinished, &superseded, &boot_id).await;
    startup.startup.mark_changed(changed.into_iter());
    drop((leases::spawn(&handles.leases), engine.scheduler.spawn(), handles.policies.spawn()));
    drop(engine.context.tasks.spawn(TaskName::OverrideExpiry, {
        let (state, store, stopping) =
            (handles.context.state.clone(), handles.context.store.clone(), engine.context.stopping.clone());
        move || overrides::expire(state.clone(), store.clone(), stopping.clone())
    }));
    let (tasks, mps) = (&engine.context.tasks, &handles.mps);
    drop(tasks.spawn(TaskName::UsageSampler, {
        let usage = handles.usage.clone();
        move || usage.clone().run()
    }));
    drop(tasks.spawn(TaskName::MpsReconciler, {
        let mps = mps.clone();
        move || mps::run(mps.clone())
    }));
    drop(tasks.spawn(TaskName::TimesliceReconciler, {
        let mps = mps.clone();
        move || {
            let mps = mps.clone();
            timeslice::run(levels.clone(), move |uuid: &GpuUuid| mps.has(uuid.as_target()))
        }
    }));
    drop(tasks.spawn(TaskName::ComputeModes, {
        let (mps, stopping) = (mps.clone(), engine.context.stopping.clone());
        move || {
            let mps = mps.clone();
            let needs = move |uuid: &GpuUuid| mps.needs_compute_mode(uuid);
            shared_gpus::run(shared_gpus.clone(), needs, stopping.clone())
        }
    }));
    if layouts {
        drop(engine.context.tasks.spawn(TaskName::StartupLayouts, move || startup::run(startup.clone(), due.clone())));
    }
    tokio::spawn(async move {
        loop {
            let (command, reply) = inbox.next().await;
            // Ignore a failed send: the caller has disconnected.
            let _ = reply.send(Reload::carry_out(&reload, command).await);
        }
    });
}
