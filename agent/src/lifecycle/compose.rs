//! Creates the handles of gpushd, and passes to each module the handles that it uses.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use gpush_api::ApiError;
use gpush_host::{identity::Users, kernel_log::KernelLog, process_facts::LeaseNames};
use gpush_mps::daemon::Launcher;
use gpush_nvml::{Hardware, Options};
use gpush_store::{OperationId, UnfinishedOperation};
use tokio_util::sync::CancellationToken;

use super::{UNKNOWN_BOOT, identities};
use crate::{
    enforcement::Enforcement,
    lease_policies::LeasePolicies,
    leases::{self, Leases, Scopes},
    lifecycle::stored_state::{self, StoredState},
    metrics::Metrics,
    modes::{
        driver::Driver,
        mig::MigMode,
        mps::{self, Mps},
        shared_gpus::SharedGpus,
        timeslice::Timeslice,
    },
    notices::Notices,
    operations::{
        apply::{self, Engine, EngineHandles, Executor, Planner, Recovery, Services},
        maintenance::MaintenanceControl,
        operation::Operations,
        recover::LossAcceptance,
        scheduler::{Scheduler, SchedulerHandles},
    },
    processes::{self, Unleased},
    reconcile::{
        monitor::Monitor,
        reload::{self, Differences, Reload, ReloadReceiver},
        startup::{self, Startup, StartupWork},
        xid_processes::XidProcesses,
    },
    requests::idempotency::Idempotency,
    serve::{
        authorization::Authorization,
        health::{Check, Health, Sources},
        http::{
            self, change_limiter::ChangeLimiter, gpu_list_cache::GpuListCache, requests::Requests,
            response_limiter::ResponseLimiter,
        },
    },
    slurm::Slurm,
    state::{
        Commits, Conditions, Events, Initial, Overrides, State, context::HostContext, lanes::Lanes, readings::Readings,
        refused_requests::RefusedRequests, request_counts::RequestCounts,
    },
    system::{
        host_services::HostServices,
        options::MPS_DIRECTORY,
        settings::Settings,
        tasks::{TaskName, Tasks},
    },
    usage::Usage,
};

/// What gpushd knows about the host before it creates the handles.
pub(super) struct HostEnvironment {
    /// The boot id; an error if it cannot be read.
    pub(super) boot: Result<String, ApiError>,
    /// Root of the host's file system.
    pub(super) host_root: PathBuf,
    /// Access to helper units and other processes of the host.
    pub(super) host_services: Arc<HostServices>,
    /// Looks up users and groups.
    pub(super) users: Users,
    /// Directory that contains one subdirectory for each MPS daemon.
    pub(super) mps_dir: PathBuf,
    /// Directory of the files with notices to the holders of leases.
    pub(super) notice_dir: PathBuf,
    /// Starts and ends MPS daemons.
    pub(super) mps_launcher: Launcher,
    /// Directory of NVIDIA's MPS programs. Used if the config does not set the paths of these
    /// programs.
    pub(super) mps_programs: Option<PathBuf>,
    /// The kernel log; `None` if gpushd cannot read it.
    pub(super) kernel_log: Option<KernelLog>,
}

/// The components that `lifecycle` starts.
pub(super) struct Parts {
    pub(super) engine: Engine,
    /// Calls the driver, through a worker process.
    pub(super) hardware: Hardware,
    pub(super) monitor: Monitor,
    pub(super) timeslice: Timeslice,
    /// Settings that gpushd applies to whole GPUs while they are shared, such as the compute mode.
    pub(super) shared_gpus: SharedGpus,
    pub(super) recovery: Recovery,
    pub(super) handles: http::ApiHandles,
    pub(super) startup: startup::StartupHandles,
    pub(super) reload: Reload,
    /// Receives requests to reload the config.
    pub(super) inbox: ReloadReceiver,
    /// Operations that a previous gpushd left unfinished, oldest first.
    pub(super) unfinished: Vec<UnfinishedOperation>,
    /// For each operation without a recorded end, a later operation that has begun on one of its
    /// GPUs. So the earlier operation must have ended.
    pub(super) superseded: BTreeMap<OperationId, OperationId>,
    /// The boot id, or a placeholder if it cannot be read.
    pub(super) boot_id: String,
    /// What gpushd must do at this start, such as to apply layouts.
    pub(super) due: StartupWork,
}

/// Creates all handles. Starts only one thread: the supervisor of the driver.
pub(super) fn compose(settings: Settings, origin: HostEnvironment, remembered: StoredState, options: Options) -> Parts {
    let HostEnvironment {
        boot,
        host_root,
        host_services,
        users,
        mps_dir,
        notice_dir,
        mps_launcher,
        mps_programs,
        kernel_log,
    } = origin;
    let StoredState {
        store,
        notes,
        last_boot,
        unfinished,
        superseded,
        conditions,
        overrides,
        leases,
        are_leases_known,
        notices,
        created,
        mps_targets,
        shared_gpus,
        generation,
        noticed,
        lost,
        known_since,
    } = remembered;
    let stopping = CancellationToken::new();
    let tasks = Tasks::new(stopping.clone());
    let (hardware, driver_supervisor) = Hardware::with_task(options);
    tasks.spawn_final(TaskName::DriverSupervisor, async {
        driver_supervisor.await;
        Ok(())
    });
    let startup = Startup::default();
    let boot_id = boot.clone().unwrap_or_else(|_| UNKNOWN_BOOT.to_owned());
    let (reloads, inbox) = reload::channel();
    let read_only = stored_state::read_only(&notes);
    let are_leases_known = are_leases_known && read_only.is_none();
    let unknown = lost.as_ref().is_some_and(|lost| lost.holds) || read_only.is_some();
    let due = startup.due(&settings.config(), boot, last_boot, unknown);
    let initial = Initial {
        config: settings.config(),
        rules_are_known: settings.rules_are_known(),
        conditions: Conditions::new(conditions, noticed),
        overrides: Overrides::new(generation, overrides),
        lost,
        known_since,
        mps_records: mps_targets,
        leases,
        created,
    };
    let state = State::new(store.clone(), Events::new(store.instance()), initial);
    state.change_leases(|table| leases::restore_notices(table, notices));
    let readings = Readings::new(hardware.clone(), users.clone(), state.clone(), tasks.clone());
    let lanes = Lanes::new(state.clone());
    let context = Arc::new(HostContext {
        settings,
        state: state.clone(),
        readings: readings.clone(),
        lanes: lanes.clone(),
        store: store.clone(),
        requests: RequestCounts::default(),
        refused: RefusedRequests::default(),
        read_only,
        users: users.clone(),
        hardware: hardware.clone(),
        host_services: Arc::clone(&host_services),
        tasks: tasks.clone(),
        stopping: stopping.clone(),
    });
    let context = || Arc::clone(&context);
    let shared_gpus = SharedGpus::new(context(), shared_gpus);
    let timeslice = Timeslice::new(context(), shared_gpus.clone());
    let own_uid = nix::unistd::geteuid().as_raw();
    let idempotency = Idempotency::new(store.clone());
    let mps_base = mps_dir.clone();
    let lease_names = Arc::new(LeaseNames::new(move |pid| mps::is_of_another_agent(pid, &mps_base)));
    let mps_handles = mps::MpsHandles {
        context: context(),
        shared_gpus: shared_gpus.clone(),
        timeslice: timeslice.clone(),
        lease_names: Arc::clone(&lease_names),
        own_uid,
    };
    let scopes = match &context().host_services.systemd {
        Some(systemd) => Scopes::of(Arc::clone(systemd)),
        None => Scopes::new(mps_dir == Path::new(MPS_DIRECTORY)),
    };
    let mps = Mps::new(mps_dir, mps_programs, mps_launcher, mps_handles);
    let unleased = Unleased::new(context(), mps.clone(), Arc::clone(&lease_names));
    let monitor = Monitor {
        state: state.clone(),
        readings: readings.clone(),
        hardware: hardware.clone(),
        xid_processes: Arc::new(XidProcesses::new(kernel_log, Arc::clone(&lease_names), state.clone())),
    };
    let usage = Usage::new(context(), mps.clone(), Arc::clone(&lease_names), &boot_id);
    let metrics = Metrics::new(context(), usage.clone());
    let commits = Commits::new(store.clone(), state.clone());
    let operations = Operations::new(store.clone(), state.events().clone(), lanes.clone(), tasks.clone());
    let mig = MigMode {
        context: context(),
        driver: Driver { hardware: hardware.clone(), readings: readings.clone() },
        mps: mps.clone(),
    };
    let planner =
        Planner { mig: mig.clone(), mps: mps.clone(), operations: operations.clone(), host_root: host_root.clone() };
    let executor = Executor {
        mig,
        mps: mps.clone(),
        timeslice: timeslice.clone(),
        services: Services { context: context() },
        operations: operations.clone(),
        tasks: tasks.clone(),
    };
    let recovery = Recovery { executor: executor.clone(), planner: planner.clone(), stopping: stopping.clone() };
    let scheduler = Scheduler::new(SchedulerHandles { context: context(), mps: mps.clone() });
    let engine = Arc::new(EngineHandles {
        context: context(),
        idempotency: idempotency.clone(),
        operations: operations.clone(),
        planner: planner.clone(),
        executor,
        scheduler: scheduler.clone(),
    });
    let enforcement = Enforcement::new(context(), scopes.manager());
    let leases = Leases::new(leases::LeaseHandles {
        context: context(),
        scheduler,
        engine: Arc::clone(&engine),
        mps: mps.clone(),
        scopes,
        enforcement: enforcement.clone(),
        lease_names,
        notices: Notices::new(state.clone(), store.clone(), notice_dir),
        idempotency: idempotency.clone(),
        are_leases_known,
    });
    let health = Health::new(Sources {
        context: context(),
        startup: startup.clone(),
        host_root,
        config: check(&context().settings, |settings| settings.trouble().into_iter().collect()),
        config_file_changed: {
            let settings = context().settings.clone();
            Box::new(move || settings.is_file_changed())
        },
        checks: vec![
            check(&tasks, Tasks::health),
            check(&engine, |engine| {
                engine.operations.not_stopping(&engine.context.stopping).err().into_iter().collect()
            }),
            check(&host_services, |host_services| apply::services_health(host_services)),
            check(&timeslice, Timeslice::health),
            check(&shared_gpus, SharedGpus::health),
            check(&mps, mps::health),
            check(&unleased, processes::health),
            check(&leases, leases::health),
            check(&enforcement, Enforcement::health),
            check(&notes, |notes| stored_state::health(notes).collect()),
            check(&users, identities::health),
            check(&store, |store| store.refusal().map(ApiError::from).into_iter().collect()),
        ],
    });
    let policies = LeasePolicies::new(context(), usage.clone(), leases.clone());
    let authorization = Authorization::new(state.clone(), users, store.clone(), own_uid);
    let requests = Requests { context: context(), idempotency, operations: operations.clone() };
    let slurm = Slurm::new(context(), leases.clone());
    let host_lock = Arc::default();
    let maintenance = MaintenanceControl {
        context: context(),
        commits: commits.clone(),
        operations: operations.clone(),
        host_lock: Arc::clone(&host_lock),
    };
    let acceptance =
        LossAcceptance { context: context(), mps: mps.clone(), shared_gpus: shared_gpus.clone(), host_lock };
    let differences = Differences { context: context() };
    let reload = Reload { context: context(), mps: mps.clone(), timeslice: timeslice.clone() };
    let startup = startup::StartupHandles {
        context: context(),
        startup,
        engine: Arc::clone(&engine),
        planner: planner.clone(),
        operations: operations.clone(),
    };
    let handles = http::ApiHandles {
        context: context(),
        authorization,
        requests,
        limiter: ResponseLimiter::new(tasks.clone()),
        gpu_lists: GpuListCache::default(),
        changes: ChangeLimiter::default(),
        commits,
        maintenance,
        recovery: acceptance,
        reloads,
        differences,
        health,
        operations,
        engine: Arc::clone(&engine),
        planner,
        mps,
        leases,
        enforcement,
        policies,
        unleased,
        slurm,
        usage,
        metrics,
    };
    Parts {
        engine,
        handles,
        hardware,
        monitor,
        timeslice,
        shared_gpus,
        recovery,
        startup,
        reload,
        inbox,
        unfinished,
        superseded,
        boot_id,
        due,
    }
}

/// Creates a health check that calls `check` with a clone of the handle `of`.
fn check<T: Clone + Send + Sync + 'static>(
    of: &T,
    check: impl Fn(&T) -> Vec<ApiError> + Send + Sync + 'static,
) -> Check {
    let of = of.clone();
    Box::new(move || check(&of))
}
