//! One simulated host, shared by all processes that use it.
//!
//! The directory of the host contains:
//! - `description.toml`: the description;
//! - `state`: the mapped state, see [`region`];
//! - `boot_id`;
//! - `faults.toml`: see [`crate::fault`];
//! - `proc`: processes that have GPUs open, and the driver's files, see [`driver_files`];
//! - `trace`, optionally.
//!
//! A read takes no lock. An update takes the lock, reads the state, changes it and publishes it. If
//! the change returns an error, the update publishes nothing. While a fault rule delays a call or
//! lets it hang, the call does not hold the lock.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::description::{Description, DescriptionError};
use crate::machine::{Clock, Event, Hardware, Machine, Pid, State, uuid};
use crate::returns::Return;
use crate::{fault, fingerprint};

mod driver_files;
mod faults;
mod living;
mod lock;
mod processes;
mod region;

pub use driver_files::DRIVER;
use faults::Rules;
use gpush_locked::Locked;
use living::Living;
use lock::{Lock, PerProcess};
pub use processes::PROC;
use region::Region;

/// Environment variable that names the directory of the simulated host.
pub const STATE_VARIABLE: &str = "NVML_SIM_STATE";

/// The reason why a simulated host cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The directory is not a simulated host.
    #[error("{dir} is not a simulated host: it has no {missing}; make one with `gpush-sim up PRESET {dir}`")]
    NotAHost {
        /// Directory.
        dir: String,
        /// The missing file.
        missing: &'static str,
    },
    /// The directory already contains a host.
    #[error("{dir} is a simulated host already; end it with `gpush-sim down {dir}`")]
    Exists {
        /// Directory.
        dir: String,
    },
    /// The file is not a state, has another layout, or belongs to another description.
    #[error("{path} cannot be used: {what}")]
    Mismatch {
        /// File.
        path: PathBuf,
        /// The difference.
        what: String,
    },
    /// The state cannot be decoded.
    #[error("the state in {dir} is damaged; end it with `gpush-sim down {dir}` and create it again")]
    Damaged {
        /// Directory.
        dir: String,
    },
    /// The state is too large for its slot in the file.
    #[error("the state needs {bytes} bytes and has room for {room}; detach processes or clear faults")]
    Full {
        /// Size of the new state in bytes.
        bytes: usize,
        /// Size of the slot in bytes.
        room: usize,
    },
    /// The description is invalid.
    #[error("{path}: {cause}")]
    Description {
        /// File.
        path: PathBuf,
        /// The error.
        cause: Box<DescriptionError>,
    },
    /// The fault rules are invalid.
    #[error(transparent)]
    Faults(Box<fault::RuleError>),
    /// The operating system reported an error.
    #[error("{action} {path}: {cause}")]
    Io {
        /// The failed action.
        action: &'static str,
        /// File.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
}

impl HostError {
    pub(crate) fn io(action: &'static str, path: &Path, cause: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), cause }
    }
}

impl From<fault::RuleError> for HostError {
    fn from(error: fault::RuleError) -> Self {
        Self::Faults(Box::new(error))
    }
}

impl From<HostError> for Return {
    /// Returns the return code that a client of the driver gets.
    fn from(error: HostError) -> Self {
        match error {
            HostError::NotAHost { .. } => Return::DriverNotLoaded,
            HostError::Mismatch { .. } => Return::LibRmVersionMismatch,
            HostError::Full { .. } => Return::Memory,
            HostError::Io { cause, .. } if cause.kind() == std::io::ErrorKind::PermissionDenied => Return::NoPermission,
            HostError::Exists { .. }
            | HostError::Damaged { .. }
            | HostError::Description { .. }
            | HostError::Faults(_)
            | HostError::Io { .. } => Return::Unknown,
        }
    }
}

/// Data of which each process has a separate copy.
#[derive(Debug)]
struct Local {
    lock: Lock,
    /// The state that was decoded last, and its generation.
    decoded: Locked<Option<(u64, Arc<Machine>)>>,
    rules: Rules,
    living: Living,
}

/// A simulated host.
#[derive(Debug)]
pub struct Host {
    dir: PathBuf,
    hardware: Arc<Hardware>,
    region: Region,
    owner: u32,
    local: PerProcess<Local>,
}

/// Returns the size of a slot in bytes for a host with `gpus` GPUs. The slot has room for all
/// possible instances, a hundred processes with changing loads per GPU, and the data of the host.
fn slot_bytes(gpus: usize) -> usize {
    256 * 1024 + gpus * 64 * 1024
}

fn encode(state: &State) -> Vec<u8> {
    // Serializing a struct of numbers, strings and lists cannot fail.
    serde_json::to_vec(state).unwrap_or_default()
}

impl Host {
    /// Creates a simulated host in a directory, and opens it. Creates the directory if necessary.
    ///
    /// # Errors
    /// If the directory already contains a host, the description is invalid, or the operating
    /// system reports an error.
    pub fn create(dir: &Path, description: &Description) -> Result<Self, HostError> {
        std::fs::create_dir_all(dir).map_err(|cause| HostError::io("cannot make", dir, cause))?;
        let path = dir.join("description.toml");
        if dir.join("state").exists() {
            return Err(HostError::Exists { dir: dir.display().to_string() });
        }
        let wrong = |cause| HostError::Description { path: path.clone(), cause: Box::new(cause) };
        let hardware = Arc::new(description.hardware().map_err(wrong)?);
        let text = toml::to_string(description)
            .map_err(|error| wrong(DescriptionError::new(format!("cannot be written: {error}"), "")))?;
        let mut first = Machine::first_boot(Arc::clone(&hardware));
        first.load_driver(real_ms());
        first.state.boot_id = fresh_boot_id(1);
        write_whole(&path, text.as_bytes())?;
        write_whole(&dir.join("boot_id"), format!("{}\n", first.state.boot_id).as_bytes())?;
        let faults = dir.join("faults.toml");
        if !faults.exists() {
            write_whole(&faults, fault::EMPTY.as_bytes())?;
        }
        // The state is written last, because a directory without a state is not a host.
        let slot = slot_bytes(hardware.slots.len());
        Region::create(&dir.join("state"), slot, fingerprint::of(&text), &encode(&first.state))?;
        Self::open(dir)
    }

    /// Opens the simulated host in a directory.
    ///
    /// # Errors
    /// If the directory is not a host, or its state has another layout.
    pub fn open(dir: &Path) -> Result<Self, HostError> {
        let path = dir.join("description.toml");
        let missing = |missing| HostError::NotAHost { dir: dir.display().to_string(), missing };
        let text = std::fs::read_to_string(&path).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => missing("description.toml"),
            _ => HostError::io("cannot read", &path, cause),
        })?;
        if !dir.join("state").exists() {
            return Err(missing("state"));
        }
        let wrong = |cause| HostError::Description { path: path.clone(), cause: Box::new(cause) };
        let hardware = Description::parse(&text).and_then(|description| description.hardware()).map_err(wrong)?;
        let region = Region::open(&dir.join("state"), fingerprint::of(&text))?;
        let owner = std::fs::metadata(dir).map_err(|cause| HostError::io("cannot look at", dir, cause))?.uid();
        // Use an absolute path, because a client may change its working directory.
        let dir = std::path::absolute(dir).map_err(|cause| HostError::io("cannot find", dir, cause))?;
        let local = PerProcess::new(Local::open(&dir)?);
        Ok(Self { dir, hardware: Arc::new(hardware), region, owner, local })
    }

    /// Opens the host that `$NVML_SIM_STATE` names.
    ///
    /// # Errors
    /// If the variable is not set, otherwise as [`Host::open`].
    pub fn from_environment() -> Result<Self, HostError> {
        match std::env::var_os(STATE_VARIABLE) {
            Some(dir) => Self::open(Path::new(&dir)),
            None => Err(HostError::NotAHost { dir: format!("${STATE_VARIABLE} (not set)"), missing: "value" }),
        }
    }

    /// Returns the absolute path of the host's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the fixed properties of the host.
    #[must_use]
    pub fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// Returns whether the calling process has root permissions on the host.
    #[must_use]
    pub fn privileged(&self) -> bool {
        let euid = nix::unistd::geteuid().as_raw();
        euid == 0 || (self.hardware.owner_is_root && euid == self.owner)
    }

    fn local(&self) -> Result<&Local, HostError> {
        self.local.get(|| Local::open(&self.dir))
    }

    fn rules(&self) -> Result<&Rules, HostError> {
        Ok(&self.local()?.rules)
    }

    fn decode(&self, generation: u64, bytes: &[u8]) -> Result<Arc<Machine>, HostError> {
        let damaged = || HostError::Damaged { dir: self.dir.display().to_string() };
        let state: State = serde_json::from_slice(bytes).map_err(|_| damaged())?;
        let machine = Arc::new(Machine::resume(Arc::clone(&self.hardware), state).ok_or_else(damaged)?);
        *self.local()?.decoded.lock() = Some((generation, Arc::clone(&machine)));
        Ok(machine)
    }

    fn cached(&self, generation: u64) -> Result<Option<Arc<Machine>>, HostError> {
        let decoded = self.local()?.decoded.lock();
        Ok(decoded.as_ref().filter(|(held, _)| *held == generation).map(|(_, machine)| Arc::clone(machine)))
    }

    fn published(&self) -> Result<Arc<Machine>, HostError> {
        if let Some(machine) = self.cached(self.region.published())? {
            return Ok(machine);
        }
        if let Some((generation, bytes)) = self.region.read() {
            return self.decode(generation, &bytes);
        }
        // In every attempt, writers overwrote the slot while this process copied it. So take the
        // lock and read again: no writer can publish while this process holds the lock.
        let _held = self.local()?.lock.hold()?;
        let (generation, bytes) =
            self.region.read().ok_or_else(|| HostError::Damaged { dir: self.dir.display().to_string() })?;
        self.decode(generation, &bytes)
    }

    /// Returns the current state, without processes that have ended.
    ///
    /// # Errors
    /// If the state is damaged or cannot be locked.
    pub fn read(&self) -> Result<Arc<Machine>, HostError> {
        let machine = self.published()?;
        let all = machine.gpus().iter().flat_map(|gpu| &gpu.processes).map(|process| process.pid);
        if self.local()?.living.are_all(all) {
            return Ok(machine);
        }
        self.update(|_| Ok::<_, HostError>(()))?;
        self.published()
    }

    /// Changes the state. The state that `change` gets does not contain processes that have ended.
    /// If `change` returns an error, nothing changes.
    ///
    /// # Errors
    /// If `change` returns an error, or the state is damaged, full or cannot be locked.
    pub fn update<T, E: From<HostError>>(&self, change: impl FnOnce(&mut Machine) -> Result<T, E>) -> Result<T, E> {
        let local = self.local()?;
        let _held = local.lock.hold()?;
        let generation = self.region.published();
        let before = match self.cached(generation)? {
            Some(machine) => machine,
            None => {
                let (generation, bytes) =
                    self.region.read().ok_or_else(|| HostError::Damaged { dir: self.dir.display().to_string() })?;
                self.decode(generation, &bytes)?
            }
        };
        let mut after = Machine::clone(&before);
        after.set_time(self.now_ms(&before));
        after.reap(Pid::is_alive);
        let result = change(&mut after)?;
        if after.state != before.state {
            let generation = self.region.write(&encode(&after.state))?;
            // The change is published, so the call must succeed even if a file cannot be written.
            let _best_effort = self.update_driver_files(&before, &after);
            self.hide_closed(&before, &after);
            let after = Arc::new(after);
            *local.decoded.lock() = Some((generation, after));
        }
        Ok(result)
    }

    /// Returns the time of the host's clock, in milliseconds since the epoch.
    #[must_use]
    pub fn now_ms(&self, machine: &Machine) -> u64 {
        machine.state.clock.at(real_ms())
    }

    /// Changes the clock of the host. `change` gets the clock and the real time in ms.
    ///
    /// # Errors
    /// As [`Host::update`].
    pub fn set_clock(&self, change: impl FnOnce(Clock, u64) -> Clock) -> Result<(), HostError> {
        self.update(|machine| {
            // If the clock is set back, the counters must keep what programs have seen.
            machine.settle_all();
            machine.state.clock = change(machine.state.clock, real_ms());
            Ok(())
        })
    }

    /// Advances the clock of the host. No process waits: all programs see that the time has passed.
    ///
    /// # Errors
    /// As [`Host::update`].
    pub fn advance(&self, by: Duration) -> Result<(), HostError> {
        self.set_clock(|clock, _| clock.advanced(by))
    }

    /// Registers this process as a client of the driver (`nvmlInit`).
    ///
    /// # Errors
    /// As [`Host::update`].
    pub fn connect(&self) -> Result<(), HostError> {
        self.update(|machine| {
            machine.open(Pid::own());
            Ok(())
        })
    }

    /// Removes this process from the clients (`nvmlShutdown`).
    ///
    /// # Errors
    /// As [`Host::update`].
    pub fn disconnect(&self) -> Result<(), HostError> {
        self.update(|machine| {
            machine.close(Pid::own());
            Ok(())
        })
    }

    /// Boots the host again. The new boot id is in the state and in the file `boot_id`.
    ///
    /// # Errors
    /// As [`Host::update`].
    pub fn reboot(&self) -> Result<(), HostError> {
        let boot_id = self.update(|machine| {
            let boot_id = fresh_boot_id(machine.state().boot + 1);
            machine.reboot(boot_id.clone());
            Ok::<_, HostError>(boot_id)
        })?;
        write_whole(&self.dir.join("boot_id"), format!("{boot_id}\n").as_bytes())
    }

    /// Waits at most `timeout` for the first event after `cursor` for which `wants` returns true.
    /// Returns `None` after `timeout`, or earlier if the state changes without such an event.
    ///
    /// # Errors
    /// As [`Host::read`].
    pub fn wait_event(
        &self,
        cursor: u64,
        timeout: Duration,
        wants: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>, HostError> {
        let until = Instant::now().checked_add(timeout);
        let generation = self.region.published();
        let event = || Ok(self.published()?.events().next(cursor, &wants).copied());
        let found = event()?;
        if found.is_some() {
            return Ok(found);
        }
        while self.region.published() == generation {
            // If the clock cannot represent the end of the timeout, there is no limit.
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(None);
            }
            self.region.wait_past(generation, left);
        }
        event()
    }
}

impl Local {
    fn open(dir: &Path) -> Result<Self, HostError> {
        Ok(Self {
            lock: Lock::open(&dir.join("state"))?,
            decoded: Locked::new(None),
            rules: Rules::new(dir.join("faults.toml")),
            living: Living::default(),
        })
    }
}

/// Returns the real time in milliseconds since the epoch.
fn real_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns a unique boot id.
fn fresh_boot_id(boot: u64) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    uuid::of_boot(&format!("{boot}/{}/{}", std::process::id(), now.as_nanos()))
}

/// Writes a file atomically: readers see the old or the new content, never a mixture.
fn write_whole(path: &Path, content: &[u8]) -> Result<(), HostError> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.new", std::process::id()));
    let draft = PathBuf::from(draft);
    std::fs::write(&draft, content)
        .and_then(|()| std::fs::rename(&draft, path))
        .map_err(|cause| HostError::io("cannot write", path, cause))
}
