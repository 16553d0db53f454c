//! The config file: the desired state of a host, and the errors that the file can have.
//!
//! Parsing has three passes, each in its own module. Every pass reports all errors that it finds,
//! so that users see all of them at once:
//!
//! ```text
//! bytes ──► UTF-8, TOML ──► settings (parse) ──► all rules together (rules) ────────► Config
//!              │                 │                          │
//!              └─────────────────┴──────────────────────────┴──► ConfigErrors (diagnostic)
//! ```
//!
//! `schema` lists the keys. Any other key is an error. Tests compare `config.example.toml` and
//! `docs/config.md` with that list. A file with an error has no effect at all. A missing file at
//! the default path is not an error: without a file, every GPU is unmanaged.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{LeaseAccess, LeaseShare, LeaseTerms, Mode, MpsPolicy, TimeslicePolicy};

use crate::{layout::Layout, selector::Selector};

mod account_name;
mod accounts;
mod bounded_syntax;
mod defaults;
mod effective;
mod fix;
mod history;
mod idle;
mod job_default;
mod layouts;
mod leasing;
mod limits;
mod metrics;
mod mode_change;
mod mps;
mod notify;
mod over_limit;
mod parse;
mod prices;
mod processes;
mod quota_default;
mod quotas;
mod reader;
mod requirements;
mod rule_lines;
mod rules;
pub mod schema;
mod settings;
mod sharing;
mod slurm;
mod starter;
mod syntax_error;
mod timeslice;
mod toml_text;
mod unknown_keys;
mod warning_times;

pub use accounts::{NamedAccount, accounts_in};
pub use defaults::RuleDefaults;
pub use history::History;
pub use idle::{Idle, IdleExempt, IdleJobs, IdleTerms, RuleIdle};
pub use limits::RequestLimits;
pub use metrics::Metrics;
pub use mps::Mps;
pub use notify::Notify;
pub use over_limit::OverLimitTerms;
pub use prices::{PriceAmount, PriceRule, names_model};
pub use processes::{Allowed, Processes};
pub use quotas::{Leases, QuotaMemory, QuotaRule};
pub use requirements::{Isolation, Workload};
pub use rule_lines::rule_lines;
pub use slurm::{AgentDown, Busy, DEFAULT_FILE, Leftovers, SLURM_DIRECTORY, Slurm, Unattributed};
pub use starter::{Site, Starter};

pub use crate::diagnostic::{FileErrors as ConfigErrors, Located, Problem};

/// Maximum size of a config file in bytes.
pub const MOST_BYTES: usize = 1 << 20;

/// The whole config. `Config::default()` is the config without a file: every GPU is unmanaged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Config {
    /// Whether gpushd repairs drift whenever it finds any. If false, gpushd repairs drift only
    /// after a boot or on request.
    pub auto_reconcile: bool,
    /// Whether all rules enforce leases, if they and `[defaults]` do not say otherwise. The rules contain this already.
    pub enforce: bool,
    /// `[log]`
    pub log: Log,
    /// `[driver]`
    pub driver: Driver,
    /// `[api]`
    pub api: Api,
    /// `[access]`
    pub access: Access,
    /// `[limits]`
    pub limits: RequestLimits,
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
    /// `[history]`
    pub history: History,
    /// `[metrics]`
    pub metrics: Metrics,
    /// `[notify]`
    pub notify: Notify,
    /// `[idle]` and `[idle.exempt]`
    pub idle: Idle,
    /// `[slurm]`
    pub slurm: Slurm,
    /// `[[quota]]` tables, in order. For a user, only the first table that matches applies.
    pub quotas: Vec<QuotaRule>,
    /// `[[price]]` tables, in order. For a lease, only the first table that fits applies.
    pub prices: Vec<PriceRule>,
    /// `[layouts]`, without the reserved layout `none`.
    pub layouts: BTreeMap<String, Layout>,
    /// `[defaults]`. The rules contain these values already.
    pub defaults: RuleDefaults,
    /// `[[gpu]]` rules, in order. The first rule that matches a GPU claims that GPU.
    pub rules: Vec<Rule>,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Log {
    /// The least severe level that gpushd writes to the log.
    pub level: LogLevel,
}

/// Severity of log records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// Failures only.
    Error,
    /// Also warnings about possible problems.
    Warn,
    /// Also gpushd's actions.
    #[default]
    Info,
    /// Also details of the actions.
    Debug,
    /// Also every driver call.
    Trace,
}

impl LogLevel {
    /// All levels, most severe first.
    pub const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];

    /// Returns the name in the config.
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

/// `[driver]`: the library to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// An absolute path, or a file name that the dynamic linker searches for.
    pub library: String,
}

impl Default for Driver {
    fn default() -> Self {
        Self { library: "libnvidia-ml.so.1".to_owned() }
    }
}

/// `[api]`: the sockets.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Api {
    /// Path of the second socket, for root; `None` for a path in the directory of the first socket.
    pub admin_socket: Option<String>,
}

/// `[access]`: who may make changes, in addition to root and gpushd's own user.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// Groups whose members are administrators.
    pub admin_groups: Vec<String>,
}

/// `[health]`: the faults that make gpushd cordon a GPU, and how often gpushd checks for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Numbers of the Xid errors for which gpushd cordons the GPU, in order.
    pub cordon_xids: Vec<u32>,
    /// Interval between gpushd's own readings of a GPU while no caller requests the GPU; zero
    /// disables these readings.
    pub poll: Duration,
}

/// Xid errors after which NVIDIA recommends to drain and reset the GPU, or to replace it:
///
/// - 46: the GPU stopped;
/// - 48: an uncorrectable memory error;
/// - 62: the GPU's microcontroller halted;
/// - 64: a bad row could not be recorded;
/// - 74: NVLink;
/// - 79: off the bus;
/// - 95: an uncontained memory error;
/// - 119, 120: the firmware processor;
/// - 140: unrecovered memory errors.
///
/// The list does not include errors caused by applications (13, 31, 43, 45, 68, 109). It also omits
/// a contained memory error (94), which ends only the affected program. Errors about memory rows
/// that wait for a replacement are not in the list either, because gpushd reads these rows from the
/// driver.
pub const CORDON_XIDS: [u32; 10] = [46, 48, 62, 64, 74, 79, 95, 119, 120, 140];

impl Default for Health {
    fn default() -> Self {
        Self { cordon_xids: CORDON_XIDS.to_vec(), poll: Duration::from_secs(60) }
    }
}

/// `[mode_change]`: actions before and after a change that the driver refuses while a program has the GPU open. These are
/// changes of MIG mode, and on Hopper and later also the creation of the first instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModeChange {
    /// systemd services to stop before the change. gpushd stops only services that are running, and starts the same
    /// services again after the change.
    pub services: Vec<String>,
    /// Absolute path of a program to run before the change.
    pub before: Option<String>,
    /// Absolute path of a program to run after the change.
    pub after: Option<String>,
    /// Maximum time for the program in `before` or `after`, and for stopping or starting a service.
    pub timeout: Duration,
    /// Absolute path of `nvidia-smi`.
    pub nvidia_smi: String,
    /// Groups of GPUs that can only be reset together.
    pub reset_together: Vec<Selector>,
}

impl Default for ModeChange {
    fn default() -> Self {
        Self {
            services: Vec::new(),
            before: None,
            after: None,
            timeout: Duration::from_secs(60),
            nvidia_smi: "/usr/bin/nvidia-smi".to_owned(),
            reset_together: Vec::new(),
        }
    }
}

/// A `[[gpu]]` rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Name of the rule, if the file has one.
    pub name: Option<String>,
    /// GPUs that the rule claims, except GPUs that an earlier rule claims.
    pub matches: Vec<Selector>,
    /// How the GPUs are shared.
    pub mode: Mode,
    /// Layout; set if and only if the mode is `mig`.
    pub layout: Option<RuleLayout>,
    /// How MPS clients share the GPUs. Always set in mode `mps`. In mode `mig`, set only if the
    /// rule has the key `mps`. The policy then applies to the MIG devices of the layout entries
    /// that end in `:mps`.
    pub mps: Option<MpsPolicy>,
    /// How lease holders share the time of the GPUs; set if and only if the mode is `timeslice`.
    pub timeslice: Option<TimeslicePolicy>,
    /// How the GPUs are leased; `None` only in mode `unmanaged`.
    pub lease: Option<LeaseTerms>,
    /// The share of a Slurm job that requests none; `None` if such a job is refused, unless it gets whole GPUs.
    pub job_default: Option<LeaseShare>,
    /// Users who may lease the GPUs; `None` for all users.
    pub access: Option<LeaseAccess>,
    /// Isolation that the users need; `None` if the file does not say. Only the lints use it.
    pub isolation: Option<Isolation>,
    /// What the programs do; `None` if the file does not say. Only the lints use it.
    pub workload: Option<Workload>,
    /// What gpushd does with unused leases, as far as it differs from `[idle]`.
    pub idle: Option<RuleIdle>,
    /// What gpushd does with leases that use more memory than their share has.
    pub over_limit: OverLimitTerms,
}

/// The layout of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleLayout {
    /// A name in `[layouts]`, or `none`.
    Named(String),
    /// Entries in the rule.
    Inline(Layout),
    /// `dynamic`: leases create the instances on demand.
    Dynamic,
}

impl Rule {
    /// Returns whether leases create the instances of the rule's GPUs on demand.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        self.mode == Mode::Mig && self.layout == Some(RuleLayout::Dynamic)
    }

    /// Returns the name of the rule, or a label such as `rule 2` if the rule has no name.
    /// `position` starts at 0.
    #[must_use]
    pub fn label(&self, position: usize) -> String {
        self.name.clone().unwrap_or_else(|| format!("rule {}", position + 1))
    }

    /// Returns how MPS clients share the rule's GPUs: the settings of the rule, or the defaults of
    /// its mode.
    #[must_use]
    pub fn mps_policy(&self) -> MpsPolicy {
        self.mps.clone().unwrap_or_else(|| sharing::default_of(self.mode))
    }
}

impl Config {
    /// Parses a config file. Errors refer to the file as `path`.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, ConfigErrors> {
        parse::bytes(bytes, path)
    }

    /// Parses the text of a config file, like [`Config::from_bytes`].
    ///
    /// # Errors
    /// All errors in the file.
    pub fn parse(text: &str, path: &str) -> Result<Self, ConfigErrors> {
        parse::bytes(text.as_bytes(), path)
    }

    /// Returns the layout with this name. The name may be the reserved `none`.
    #[must_use]
    pub fn layout(&self, name: &str) -> Option<Layout> {
        if name.eq_ignore_ascii_case(crate::layout::NONE) {
            return Some(Layout::none());
        }
        self.layouts.get(name).cloned()
    }

    /// Returns the desired instances of a rule; `None` if the mode is not `mig` or the layout is
    /// dynamic.
    #[must_use]
    pub fn layout_of(&self, rule: &Rule) -> Option<Layout> {
        match rule.layout.as_ref()? {
            RuleLayout::Named(name) => self.layout(name),
            RuleLayout::Inline(layout) => Some(layout.clone()),
            RuleLayout::Dynamic => None,
        }
    }
}

#[cfg(test)]
mod tests;
