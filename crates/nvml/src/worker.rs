//! The worker process, `gpushd driver-worker`.
//!
//! There is one thread for the host, and one thread for each GPU. A thread is started with its first call. Each thread
//! executes its calls in order, so a hanging call does not delay other threads. The main thread only reads frames and
//! distributes them.
//!
//! ```text
//!                    ┌► host thread:  init, list ─┐
//! socket ─► main ────┼► GPU-a thread: read, create┼─► socket (one frame at a time)
//!                    ├► GPU-b thread: …          ─┤
//!                    └► event thread (if wanted) ─┘
//! ```
//!
//! The worker never outlives its parent. When the socket closes, the worker exits without waiting
//! for calls that hang. The kernel kills the worker when the parent dies. The worker ignores
//! signals from terminals and service managers, because they are meant for the parent: a worker
//! that exits during a mutation would leave the mutation half done.
#![allow(unsafe_code)] // For the inherited descriptor, signals, and an exit without cleanup.

use gpush_api::{GpuIndex, GpuUuid};
use std::{
    collections::HashMap,
    fs::File,
    net::Shutdown,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    process::ExitCode,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use gpush_locked::Locked;
use nix::sys::{
    prctl,
    signal::{SigHandler, Signal, signal},
};

use crate::{
    driver::{Driver, EventSet, ProfileCache, Sampling},
    error::{DriverError, ErrorKind},
    proto::{self, Answer, Request, ToParent, ToWorker},
};

/// Duration of one wait for events. The next wait begins immediately afterwards.
const EVENT_WAIT: Duration = Duration::from_secs(60);

/// Runs the worker on the socket that is its standard input, until the parent closes it.
#[must_use]
pub fn main() -> ExitCode {
    match take_over_stdin() {
        Ok(socket) => run(socket),
        Err(error) => {
            eprintln!("driver-worker: standard input is not a socket of gpushd: {error}");
            eprintln!("driver-worker: only gpushd can start this command");
            ExitCode::from(2)
        }
    }
}

/// Runs the worker on a socket, until the other side closes it.
#[must_use]
pub fn run(socket: UnixStream) -> ExitCode {
    follow_parent();
    let result = serve(socket);
    if let Err(error) = &result {
        eprintln!("driver-worker: {error}");
    }
    // Threads may hang in the driver, and exit handlers would hang with them. So the process exits directly. SAFETY:
    // nothing here needs cleanup.
    unsafe { libc::_exit(i32::from(result.is_err())) }
}

/// Moves the socket to another descriptor. Standard input becomes empty, in case the library reads it.
fn take_over_stdin() -> std::io::Result<UnixStream> {
    let stdin = std::io::stdin();
    let socket = UnixStream::from(nix::unistd::dup(&stdin)?);
    nix::sys::socket::getsockname::<nix::sys::socket::UnixAddr>(socket.as_raw_fd())?;
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    Ok(socket)
}

fn follow_parent() {
    // If this call fails, the worker still notices the end of the parent, because the socket
    // closes.
    let _ = prctl::set_pdeathsig(Signal::SIGKILL);
    let _ = prctl::set_name(c"gpushd-driver");
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        // SAFETY: ignoring a signal installs no handler code.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
    }
}

/// Sends replies, one frame at a time.
#[derive(Clone)]
struct ReplySender(Arc<Locked<UnixStream>>);

impl ReplySender {
    fn send(&self, frame: &ToParent) {
        let mut stream = self.0.lock();
        // Ignore the error: if the parent has ended, the other direction of the socket is closed too, and the main
        // thread exits.
        let _ = proto::write(&mut *stream, frame);
    }
}

fn serve(mut socket: UnixStream) -> std::io::Result<()> {
    let replies = ReplySender(Arc::new(Locked::new(socket.try_clone()?)));
    let Some(ToWorker::Init { library, events }) = proto::read(&mut socket)? else {
        return Err(std::io::Error::other("the first frame is not init"));
    };
    let (driver, info) = match open(library.as_deref()) {
        Ok(open) => open,
        Err(error) => {
            replies.send(&ToParent::Ready(Err(error)));
            return Ok(());
        }
    };
    // Register for events before the worker reports that it is ready, so that no event after the report is missed.
    let set = if events { listen(driver) } else { None };
    replies.send(&ToParent::Ready(Ok(info)));
    if let Some(set) = set {
        let replies = replies.clone();
        thread::Builder::new().name("events".to_owned()).spawn(move || report_events(&set, &replies))?;
    }
    distribute(&mut socket, &replies, || {
        let (mut cache, mut sampling) = (ProfileCache::default(), Sampling::default());
        move |request: &Request| carry_out(driver, request, &mut cache, &mut sampling)
    })
}

/// Reads calls until the other side closes the socket, and gives each of them to the thread of its GPU. `executor` returns
/// the function with which a new thread executes its calls.
fn distribute<E>(socket: &mut UnixStream, replies: &ReplySender, executor: impl Fn() -> E) -> std::io::Result<()>
where
    E: FnMut(&Request) -> Result<Answer, DriverError> + Send + 'static,
{
    let mut threads: HashMap<Option<GpuUuid>, mpsc::Sender<(u64, Request)>> = HashMap::new();
    while let Some(frame) = proto::read(socket)? {
        let ToWorker::Call { id, request } = frame else {
            return Err(std::io::Error::other("a second init"));
        };
        let key = request.gpu().map(|gpu| gpu.uuid.clone());
        let sender = match threads.get(&key) {
            Some(sender) => sender,
            None => {
                let (sender, calls) = mpsc::channel();
                let (replies, execute) = (replies.clone(), executor());
                let name = key.as_ref().map_or("host", GpuUuid::as_str).chars().take(15).collect();
                thread::Builder::new().name(name).spawn(move || answer_calls(execute, &calls, &replies))?;
                threads.entry(key).or_insert(sender)
            }
        };
        if sender.send((id, request)).is_err() {
            return Err(std::io::Error::other("a driver thread has ended"));
        }
    }
    Ok(())
}

/// Loads the library. The session lasts as long as the process, because the threads of the process need the session.
fn open(library: Option<&Path>) -> Result<(&'static Driver, gpush_api::Driver), DriverError> {
    let driver = Driver::load(library)?;
    let info = driver.info()?;
    Ok((Box::leak(Box::new(driver)), info))
}

fn answer_calls(
    mut execute: impl FnMut(&Request) -> Result<Answer, DriverError>,
    calls: &mpsc::Receiver<(u64, Request)>,
    replies: &ReplySender,
) {
    while let Ok((id, request)) = calls.recv() {
        let result = execute(&request);
        replies.send(&ToParent::Reply { id, result });
    }
}

/// A driver without a library, for tests of programs that use [`Hardware`](crate::Hardware). It answers in threads of the
/// same process, through the same protocol and the same supervisor as a worker process.
pub trait ScriptedDriver: std::fmt::Debug + Send + Sync {
    /// Returns the driver, or why the worker cannot start.
    ///
    /// # Errors
    /// As scripted.
    fn info(&self) -> Result<gpush_api::Driver, DriverError>;

    /// Executes a call. Calls for one GPU arrive one after the other. A call may block.
    ///
    /// # Errors
    /// As scripted. After [`ErrorKind::WorkerDied`], the worker ends without a reply, as a worker process that crashes.
    fn call(&self, request: &Request) -> Result<Answer, DriverError>;
}

/// Answers on a socket with a scripted driver, until the other side closes the socket.
pub(crate) fn serve_scripted(mut socket: UnixStream, driver: &Arc<dyn ScriptedDriver>) -> std::io::Result<()> {
    let replies = ReplySender(Arc::new(Locked::new(socket.try_clone()?)));
    let Some(ToWorker::Init { .. }) = proto::read(&mut socket)? else {
        return Err(std::io::Error::other("the first frame is not init"));
    };
    let info = driver.info();
    let is_ready = info.is_ok();
    replies.send(&ToParent::Ready(info));
    if !is_ready {
        return Ok(());
    }
    let crashing = Arc::new(socket.try_clone()?);
    distribute(&mut socket, &replies, || {
        let (driver, crashing) = (Arc::clone(driver), Arc::clone(&crashing));
        move |request: &Request| {
            let result = driver.call(request);
            if let Err(DriverError { kind: ErrorKind::WorkerDied { .. }, .. }) = &result {
                // Ignore the error: the other side may have closed the socket.
                let _ = crashing.shutdown(Shutdown::Both);
            }
            result
        }
    })
}

fn carry_out(
    driver: &'static Driver,
    request: &Request,
    cache: &mut ProfileCache,
    sampling: &mut Sampling<'static>,
) -> Result<Answer, DriverError> {
    match request {
        Request::List { skip } => driver.list(skip).map(Answer::Listed),
        Request::Read { gpu } => driver.find(gpu)?.read(cache).map(|reading| Answer::Reading(Box::new(reading))),
        Request::Sample { gpu, instances, wanted } => {
            let sample = sampling.sample(driver, gpu, instances.as_deref(), *wanted)?;
            Ok(Answer::Sample(Box::new(sample)))
        }
        Request::CreateGpuInstance { gpu, profile_id, placement } => {
            driver.find(gpu)?.make_gpu_instance(*profile_id, *placement, cache).map(Answer::GpuInstance)
        }
        Request::CreateComputeInstance { gpu, gi, profile_id, placement } => {
            driver.find(gpu)?.make_compute_instance(*gi, *profile_id, *placement, cache).map(Answer::ComputeInstance)
        }
        Request::DestroyComputeInstance { gpu, gi, ci } => {
            driver.find(gpu)?.destroy_compute_instance(*gi, *ci).map(|()| Answer::Destroyed)
        }
        Request::DestroyGpuInstance { gpu, gi } => {
            driver.find(gpu)?.destroy_gpu_instance(*gi).map(|()| Answer::Destroyed)
        }
        Request::SetMigMode { gpu, enabled } => driver.find(gpu)?.set_mig_mode(*enabled).map(Answer::Mode),
        Request::SetComputeMode { gpu, mode } => {
            driver.find(gpu)?.set_compute_mode(*mode).map(|()| Answer::ComputeModeSet)
        }
    }
}

/// Registers for the events of every GPU that supports events.
fn listen(driver: &'static Driver) -> Option<EventSet<'static>> {
    let mut registered = 0_u32;
    let set = driver.event_set().and_then(|mut set| {
        for index in (0..driver.count()?).map(GpuIndex) {
            match driver.gpu_by_index(index).and_then(|gpu| set.register(&gpu)) {
                Ok(true) => registered += 1,
                Ok(false) => {}
                Err(error) => eprintln!("driver-worker: cannot receive events of a GPU: {error}"),
            }
        }
        Ok(set)
    });
    match set {
        Ok(set) => Some(set).filter(|_| registered > 0),
        Err(error) => {
            eprintln!("driver-worker: cannot receive events from the driver: {error}");
            None
        }
    }
}

fn report_events(set: &EventSet<'_>, replies: &ReplySender) {
    loop {
        match set.wait(EVENT_WAIT) {
            Ok(Some(event)) => replies.send(&ToParent::Event(event)),
            Ok(None) => {}
            Err(error) => {
                eprintln!("driver-worker: cannot receive more events from the driver: {error}");
                return;
            }
        }
    }
}
