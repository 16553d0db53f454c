//! The config file: what the administrator of a host wants, and everything that can be wrong
//! with saying so.
//!
//! A file is read in three passes, each in its own module, and every pass reports all that it
//! finds, so that one look at the output mends the file:
//!
//! ```text
//! bytes ──► UTF-8, TOML ──► settings (parse) ──► rules against each other (rules) ──► Config
//!              │                 │                          │
//!              └─────────────────┴──────────────────────────┴──► ConfigErrors (diagnostic)
//! ```
//!
//! `schema` lists the keys there are; a key that is not there is refused, and
//! `config.example.toml` and `docs/config.md` are tested against it. A file is taken whole or not
//! at all. No file at the default path is no error: then every GPU is unmanaged.

use std::collections::BTreeMap;

use gpush_api::{LeaseTerms, Mode, MpsPolicy, TimeslicePolicy};

use crate::{layout::Layout, selector::Selector};

mod effective;
mod leasing;
mod mode_change;
mod mps;
mod parse;
mod processes;
mod quotas;
mod reader;
mod rules;
pub mod schema;
mod settings;
mod sharing;
mod slurm;
mod timeslice;

pub use mps::Mps;
pub use processes::{Allowed, Processes};
pub use quotas::{Leases, QuotaMemory, QuotaRule};
pub use slurm::{AgentDown, Leftovers, Slurm};

pub use crate::diagnostic::{FileErrors as ConfigErrors, Located, Problem};

/// Largest config file that is read, in bytes.
pub const MOST_BYTES: usize = 1 << 20;

/// The whole config. `Config::default()` is what holds without a file: every GPU unmanaged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// Whether drift is put right whenever it is seen, rather than at a new boot or on request only.
    pub auto_reconcile: bool,
    /// `[log]`
    pub log: Log,
    /// `[driver]`
    pub driver: Driver,
    /// `[api]`
    pub api: Api,
    /// `[access]`
    pub access: Access,
    /// `[health]`
    pub health: Health,
    /// `[mode_change]`
    pub mode_change: ModeChange,
    /// `[mps]`
    pub mps: Mps,
    /// `[processes]`
    pub processes: Processes,
    /// `[leases]`
    pub leases: Leases,
    /// `[slurm]`
    pub slurm: Slurm,
    /// `[[quota]]` tables in order: the first for a user applies alone.
    pub quotas: Vec<QuotaRule>,
    /// `[layouts]`, without the reserved `none`.
    pub layouts: BTreeMap<String, Layout>,
    /// `[[gpu]]` rules in order: the first that matches a GPU claims it.
    pub rules: Vec<Rule>,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Log {
    /// The least severe records that are written.
    pub level: LogLevel,
}

/// Severity of log records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// What failed.
    Error,
    /// And what may fail.
    Warn,
    /// And what was done.
    #[default]
    Info,
    /// And how.
    Debug,
    /// And every driver call.
    Trace,
}

impl LogLevel {
    /// All, most severe first.
    pub const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];

    /// As the config writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// `[driver]`: which library is loaded, and how long its calls may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// Soname, looked up as the dynamic linker does, or an absolute path.
    pub library: String,
    /// Seconds for loading and initialising the library.
    pub start_s: u32,
    /// Milliseconds for listing the GPUs or reading one.
    pub read_ms: u32,
    /// Seconds for one change.
    pub change_s: u32,
}

impl Default for Driver {
    fn default() -> Self {
        // Without persistence mode the first call brings up every GPU, seconds each.
        Self { library: "libnvidia-ml.so.1".to_owned(), start_s: 60, read_ms: 10_000, change_s: 60 }
    }
}

/// `[api]`: the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Api {
    /// Group that owns the socket; the agent's own when absent.
    pub socket_group: Option<String>,
    /// Permission bits of the socket.
    pub socket_mode: u32,
    /// Path of the second socket, for root; beside the first when absent.
    pub admin_socket: Option<String>,
}

impl Default for Api {
    fn default() -> Self {
        // Anybody may connect: what they see and do is decided by who the kernel says they are.
        Self { socket_group: None, socket_mode: 0o666, admin_socket: None }
    }
}

/// `[access]`: who may change things besides root and the agent's own user.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// Groups whose members may.
    pub admin_groups: Vec<String>,
}

/// `[health]`: which faults keep new work off a GPU, and how often they are looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Xid errors that cordon the GPU that reports them, in order.
    pub cordon_xids: Vec<u32>,
    /// Seconds between two looks at GPUs that nobody asks about; 0 for none.
    pub poll_s: u32,
}

/// Xid errors after which NVIDIA's own guidance is to drain the GPU and reset it, or to replace it:
/// the GPU stopped (46), an uncorrectable memory error (48), its microcontroller halted (62), a bad
/// row could not be recorded (64), NVLink (74), off the bus (79), an uncontained memory error (95),
/// its firmware processor (119, 120), unrecovered memory errors (140). Those of applications (13, 31,
/// 43, 45, 68, 109) are not among them, nor is a contained memory error (94), of which only the
/// program dies that met it: a row that waits for its replacement is seen by itself.
pub const CORDON_XIDS: [u32; 10] = [46, 48, 62, 64, 74, 79, 95, 119, 120, 140];

impl Default for Health {
    fn default() -> Self {
        Self { cordon_xids: CORDON_XIDS.to_vec(), poll_s: 60 }
    }
}

/// `[mode_change]`: what is done around a reset, which a change of MIG mode needs on Ampere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModeChange {
    /// Systemd services that are stopped before and started after, if they run.
    pub services: Vec<String>,
    /// Program that is run before, absolute.
    pub before: Option<String>,
    /// Program that is run after, absolute.
    pub after: Option<String>,
    /// Seconds that a hook may take.
    pub hook_s: u32,
    /// Seconds that stopping or starting a service may take.
    pub service_s: u32,
    /// Seconds that a reset may take.
    pub reset_s: u32,
    /// `nvidia-smi`, absolute.
    pub nvidia_smi: String,
    /// `systemctl`, absolute.
    pub systemctl: String,
    /// Groups of GPUs that can only be reset together.
    pub reset_together: Vec<Selector>,
}

impl Default for ModeChange {
    fn default() -> Self {
        Self {
            services: Vec::new(),
            before: None,
            after: None,
            hook_s: 60,
            service_s: 60,
            reset_s: 120,
            nvidia_smi: "/usr/bin/nvidia-smi".to_owned(),
            systemctl: "/usr/bin/systemctl".to_owned(),
            reset_together: Vec::new(),
        }
    }
}

/// A `[[gpu]]` rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Name, when it has one.
    pub name: Option<String>,
    /// GPUs that it claims unless an earlier rule does.
    pub matches: Vec<Selector>,
    /// How they are shared.
    pub mode: Mode,
    /// Layout, in mode `mig` only and always.
    pub layout: Option<WantedLayout>,
    /// How clients of MPS share what it claims: always in mode `mps`; in mode `mig`, where it is for MIG
    /// devices that the layout shares, only when the file says it.
    pub mps: Option<MpsPolicy>,
    /// How holders of what it claims take turns, in mode `timeslice` only and always.
    pub timeslice: Option<TimeslicePolicy>,
    /// How its GPUs are leased; `None` in mode `unmanaged` only.
    pub lease: Option<LeaseTerms>,
}

/// The layout of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WantedLayout {
    /// One of `[layouts]`, or `none`.
    Named(String),
    /// Entries in the rule itself.
    Inline(Layout),
    /// `dynamic`: leases create the instances on demand.
    Dynamic,
}

impl Rule {
    /// Whether leases create the instances of its GPUs on demand.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        self.mode == Mode::Mig && self.layout == Some(WantedLayout::Dynamic)
    }

    /// Its name, or `rule 2` by position from 0.
    #[must_use]
    pub fn label(&self, position: usize) -> String {
        self.name.clone().unwrap_or_else(|| format!("rule {}", position + 1))
    }

    /// How clients of MPS share what it claims, where they do.
    #[must_use]
    pub fn mps_policy(&self) -> MpsPolicy {
        self.mps.clone().unwrap_or_else(|| sharing::default_of(self.mode))
    }
}

impl Config {
    /// Reads a config file. `path` is its name, for errors.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, ConfigErrors> {
        parse::bytes(bytes, path)
    }

    /// As [`Config::from_bytes`], from text.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(text: &str, path: &str) -> Result<Self, ConfigErrors> {
        parse::bytes(text.as_bytes(), path)
    }

    /// The layout of that name, the reserved `none` among them.
    #[must_use]
    pub fn layout(&self, name: &str) -> Option<Layout> {
        if name.eq_ignore_ascii_case(crate::layout::NONE) {
            return Some(Layout::none());
        }
        self.layouts.get(name).cloned()
    }

    /// The instances that a rule wants; `None` for rules of other modes, and for a dynamic layout.
    #[must_use]
    pub fn layout_of(&self, rule: &Rule) -> Option<Layout> {
        match rule.layout.as_ref()? {
            WantedLayout::Named(name) => self.layout(name),
            WantedLayout::Inline(layout) => Some(layout.clone()),
            WantedLayout::Dynamic => None,
        }
    }
}

#[cfg(test)]
mod tests;
