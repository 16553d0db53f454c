//! Kills clients of the simulated driver at random moments, and checks the host after each kill.
//!
//! `nvml-churn --kills N --seed S` uses the host that `$NVML_SIM_STATE` names. It starts a few
//! clients that create and destroy instances in a loop. It kills each client with SIGKILL at a
//! random moment within 2 ms. After each kill, the state must be readable, changeable and valid: no
//! lock remains locked, and no partly written state is visible.
//!
//! Most clients are forks of nvml-churn, which has loaded the library. Every twentieth client is a
//! separate program. nvml-churn prints its counts, and fails at the first error.

#![allow(unsafe_code)] // calls C functions of the library, forks, kills and reaps

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitCode};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{NvmlLib, nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t};
use silicon::Machine;
use silicon::machine::Placement;

/// Number of concurrent clients.
const CLIENTS: usize = 6;
/// Maximum time until a client is killed, in µs from the start of its round.
const LIFE_US: u64 = 2_000;
/// One of this many clients is a separate program. The others are forks.
const OWN_PROGRAM: u64 = 20;
/// Return codes that a client may get: SUCCESS, INVALID_ARGUMENT (if another client has destroyed
/// the instance), NOT_FOUND, IN_USE, INSUFFICIENT_RESOURCES.
const EXPECTED: [u32; 5] = [0, 2, 6, 19, 23];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| -> Option<u64> {
        let at = arguments.iter().position(|word| word == name)?;
        arguments.get(at + 1)?.parse().ok()
    };
    let (kills, seed) = (value("--kills"), value("--seed").unwrap_or(1));
    let done = match (kills, arguments.iter().any(|word| word == "--client")) {
        (_, true) => load().and_then(|library| churn(&library, seed, &Signals { ready: 1, go: 0 })),
        (Some(kills), false) => supervise(kills, seed),
        (None, false) => Err("usage: nvml-churn --kills N [--seed S]".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvml-churn: {error}");
            ExitCode::FAILURE
        }
    }
}

fn load() -> Result<NvmlLib, String> {
    // SAFETY: the library's initialisers do nothing.
    unsafe { NvmlLib::new("libnvidia-ml.so.1") }.map_err(|error| format!("libnvidia-ml.so.1: {error}"))
}

/// File descriptors with which a client and its parent start at the same moment.
struct Signals {
    /// The client writes a byte to this pipe after its first change.
    ready: i32,
    /// The parent closes the other end of this pipe to start all clients of a round.
    go: i32,
}

impl Signals {
    fn wait(&self) {
        let mut byte = [0_u8];
        // SAFETY: writes one byte from a local variable and reads one byte into it, on descriptors
        // that were passed to this function.
        unsafe {
            libc::write(self.ready, byte.as_ptr().cast(), 1);
            while libc::read(self.go, byte.as_mut_ptr().cast(), 1) > 0 {}
        }
    }
}

/// The work of a client. It makes one change, waits for the other clients of its round, and then
/// creates and destroys instances until it is killed. Returns only if a call gives an impossible
/// result.
fn churn(library: &NvmlLib, seed: u64, signals: &Signals) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let check = |what: &str, code: u32| {
        if EXPECTED.contains(&code) { Ok(code) } else { Err(format!("{what} returned {code}")) }
    };
    let mut gpus: u32 = 0;
    // SAFETY: in this call and in all calls below, the pointers are to locals of the types that the
    // bindings name.
    unsafe {
        check("nvmlInit_v2", library.nvmlInit_v2())?;
        check("nvmlDeviceGetCount_v2", library.nvmlDeviceGetCount_v2(&mut gpus))?;
    }
    let mut printed = false;
    let mut profiles: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    loop {
        let index = rng.u32(..gpus.max(1));
        let mut gpu: nvmlDevice_t = null_mut();
        // SAFETY: as for the first calls above.
        check("nvmlDeviceGetHandleByIndex_v2", unsafe { library.nvmlDeviceGetHandleByIndex_v2(index, &mut gpu) })?;
        let known = profiles.entry(index).or_insert_with(|| profiles_of(library, gpu));
        let profile = known.get(rng.usize(..known.len().max(1))).copied().unwrap_or(0);
        if rng.u64(..3) > 0 {
            let mut gi: nvmlGpuInstance_t = null_mut();
            // SAFETY: as for the first calls above.
            if check("create", unsafe { library.nvmlDeviceCreateGpuInstance(gpu, profile, &mut gi) })? == 0 {
                let mut ci: nvmlComputeInstance_t = null_mut();
                // SAFETY: as for the first calls above.
                check("create CI", unsafe { library.nvmlGpuInstanceCreateComputeInstance(gi, 0, &mut ci) })?;
            }
        } else {
            destroy_all(library, gpu, profile, &check)?;
        }
        if !printed {
            signals.wait();
            printed = true;
        }
    }
}

fn profiles_of(library: &NvmlLib, gpu: nvmlDevice_t) -> Vec<u32> {
    let id = |index: u32| {
        // SAFETY: all zeros are a valid value of this plain struct.
        let mut info = unsafe { std::mem::zeroed() };
        // SAFETY: a pointer to a local of the type that the bindings name.
        let code = unsafe { library.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, &mut info) };
        (code == 0).then_some(info.id)
    };
    (0..10).filter_map(id).collect()
}

/// Destroys all instances of a profile on a GPU, including those of other clients.
fn destroy_all(
    library: &NvmlLib,
    gpu: nvmlDevice_t,
    profile: u32,
    check: &impl Fn(&str, u32) -> Result<u32, String>,
) -> Result<(), String> {
    let (mut found, mut count) = ([null_mut(); 8], 0);
    // SAFETY: `found` has room for eight handles, and no profile has more than eight instances. The
    // other pointers are to locals.
    check("list", unsafe { library.nvmlDeviceGetGpuInstances(gpu, profile, found.as_mut_ptr(), &mut count) })?;
    for gi in found.into_iter().take(count as usize) {
        let mut ci = null_mut();
        // SAFETY: the library has just listed `gi`, and `ci` is a local.
        if check("find", unsafe { library.nvmlGpuInstanceGetComputeInstanceById(gi, 0, &mut ci) })? == 0 {
            // SAFETY: the library has just written `ci`.
            check("destroy CI", unsafe { library.nvmlComputeInstanceDestroy(ci) })?;
        }
        // SAFETY: the library has just listed `gi`.
        check("destroy", unsafe { library.nvmlGpuInstanceDestroy(gi) })?;
    }
    Ok(())
}

/// A running client.
struct Client {
    pid: i32,
    /// The child process, if the client is a separate program. Dropping it would close its
    /// descriptors.
    program: Option<Child>,
}

/// The counts of a run.
#[derive(Default)]
struct Tally {
    started: u64,
    killed: u64,
    programs: u64,
    /// Number of kills after which the host had instances.
    inhabited: u64,
    /// Number of instances that were ever created, as the state counts them. It must never
    /// decrease.
    created: u64,
}

fn supervise(kills: u64, seed: u64) -> Result<(), String> {
    let library = load()?;
    let host = silicon::Host::from_environment().map_err(|error| error.to_string())?;
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut tally = Tally::default();
    let began = Instant::now();
    while tally.killed < kills {
        round(&library, &host, &mut rng, &mut tally, seed, kills)
            .map_err(|error| format!("after kill {}: {error}", tally.killed))?;
    }
    let clients = host.read().map_err(|error| error.to_string())?.state().clients.len();
    if clients > 0 {
        return Err(format!("{clients} dead clients are still registered"));
    }
    println!(
        "{} SIGKILLs of clients ({} programs of their own), {} instances created, state valid after each ({} times \
         with instances), {:.1} s",
        tally.killed,
        tally.programs,
        tally.created,
        tally.inhabited,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Starts several clients at the same time, and kills each of them.
fn round(
    library: &NvmlLib,
    host: &silicon::Host,
    rng: &mut fastrand::Rng,
    tally: &mut Tally,
    seed: u64,
    kills: u64,
) -> Result<(), String> {
    let mut working = Vec::new();
    let (stop, go) = pipe()?;
    while working.len() < CLIENTS && tally.started < kills {
        tally.started += 1;
        let own = seed.wrapping_add(tally.started);
        let after = Duration::from_micros(rng.u64(..LIFE_US));
        working.push((
            after,
            if tally.started.is_multiple_of(OWN_PROGRAM) {
                spawn(own, &stop)?
            } else {
                fork(library, own, &stop, &go)?
            },
        ));
    }
    tally.programs += working.iter().filter(|(_, client)| client.program.is_some()).count() as u64;
    working.sort_by_key(|(after, _)| *after);
    drop(go);
    let base = Instant::now();
    for (after, mut client) in working {
        // This sleep does not wait for an event: it only lasts until the randomly chosen time of
        // the kill.
        std::thread::sleep(after.saturating_sub(base.elapsed()));
        client.kill()?;
        tally.killed += 1;
        let machine = host.read().map_err(|error| error.to_string())?;
        obeys(&machine)?;
        tally.inhabited += u64::from(machine.gpus().iter().any(|gpu| !gpu.instances.is_empty()));
        let created = machine.state().next_generation - 1;
        if created < tally.created {
            return Err(format!("the state went back from {} to {created}", tally.created));
        }
        tally.created = created;
        // An update takes the lock, and removes the clients that have ended.
        host.update(|_| Ok::<_, silicon::HostError>(())).map_err(|error| error.to_string())?;
    }
    Ok(())
}

impl Client {
    /// Kills the client, and checks that SIGKILL ended it.
    fn kill(&mut self) -> Result<(), String> {
        let mut status = 0;
        // SAFETY: `self.pid` is a child of this process that was not reaped yet.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            if libc::waitpid(self.pid, &mut status, 0) != self.pid {
                return Err(format!("client {} cannot be awaited", self.pid));
            }
        }
        drop(self.program.take());
        if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL {
            Ok(())
        } else {
            Err(format!("client {} ended by itself with status {status:#x}", self.pid))
        }
    }
}

/// Returns the read end and the write end of a pipe. A program that is executed later does not
/// inherit the pipe.
fn pipe() -> Result<(OwnedFd, OwnedFd), String> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors, which belong to this process if the call
    // succeeds.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err("no pipe".to_owned());
        }
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Waits until a client has made its first change.
fn await_ready(reader: impl Into<std::fs::File>) -> Result<(), String> {
    let mut byte = [0];
    match reader.into().read(&mut byte) {
        Ok(1) => Ok(()),
        Ok(_) | Err(_) => Err("a client ended before its first change".to_owned()),
    }
}

fn spawn(seed: u64, go: &OwnedFd) -> Result<Client, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let (ready, reported) = pipe()?;
    let child = Command::new(program)
        .args(["--client", "--seed", &seed.to_string()])
        .stdin(go.try_clone().map_err(|error| error.to_string())?)
        .stdout(reported)
        .spawn()
        .map_err(|error| error.to_string())?;
    await_ready(ready)?;
    let pid = i32::try_from(child.id()).map_err(|error| error.to_string())?;
    Ok(Client { pid, program: Some(child) })
}

fn fork(library: &NvmlLib, seed: u64, stop: &OwnedFd, go: &OwnedFd) -> Result<Client, String> {
    let (ready, reported) = pipe()?;
    // SAFETY: nvml-churn has only one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: closes only the child's copy of this end. The parent closes its own copy as the
        // start signal.
        unsafe { libc::close(go.as_raw_fd()) };
        let ended = churn(library, seed, &Signals { ready: reported.as_raw_fd(), go: stop.as_raw_fd() });
        eprintln!("nvml-churn: client: {ended:?}");
        // SAFETY: ends the child immediately, and does not drop values that it shares with its
        // parent.
        unsafe { libc::_exit(1) };
    }
    drop(reported);
    if pid < 0 {
        return Err("cannot fork".to_owned());
    }
    await_ready(ready)?;
    Ok(Client { pid, program: None })
}

/// Checks that the state obeys the rules of the hardware. Computes the capacities without the
/// simulator's own code.
fn obeys(machine: &Machine) -> Result<(), String> {
    for gpu in machine.gpus() {
        let part = machine.part(gpu.index).map_err(|code| code.to_string())?;
        let mut slices = 0;
        let mut spans: Vec<Placement> = Vec::new();
        for gi in &gpu.instances {
            let profile = part.profile(gi.profile_id).map_err(|code| format!("profile {}: {code}", gi.profile_id))?;
            slices += profile.data.slices;
            if !profile.placements().any(|(at, id)| at == gi.placement && id == gi.id) {
                return Err(format!(
                    "GPU {} GI {} is where its profile cannot be: {:?}",
                    gpu.index, gi.id, gi.placement
                ));
            }
            if spans.iter().any(|span| span.overlaps(gi.placement)) {
                return Err(format!("GPU {} GI {} overlaps another", gpu.index, gi.id));
            }
            spans.push(gi.placement);
            if gi.instances.iter().any(|ci| profile.compute(ci.profile_id).is_none()) {
                return Err(format!("GPU {} GI {} holds a compute instance of no profile of its", gpu.index, gi.id));
            }
        }
        if slices > part.model.compute_slices {
            return Err(format!("GPU {} has {slices} compute slices in use", gpu.index));
        }
    }
    Ok(())
}
