//! Findings, their areas and their severity.

use std::{fmt, str::FromStr};

use gpush_core::lint::Lint;
use serde::Serialize;

/// An examined part of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// Kernel and systemd.
    System,
    /// Kernel module and library of the NVIDIA driver.
    Driver,
    /// Device nodes.
    Devices,
    /// NVIDIA's MPS programs.
    Mps,
    /// Other programs that manage or hold the GPUs.
    Managers,
    /// gpushd itself.
    Agent,
    /// The config file.
    Config,
    /// The state directory and its free space.
    Disk,
    /// SELinux and AppArmor.
    Security,
    /// Slurm.
    Slurm,
}

impl Area {
    /// All areas, in the order in which to solve their problems.
    pub const ALL: [Self; 10] = [
        Self::System,
        Self::Driver,
        Self::Devices,
        Self::Mps,
        Self::Managers,
        Self::Agent,
        Self::Config,
        Self::Disk,
        Self::Security,
        Self::Slurm,
    ];

    /// Returns the area's name, as `--only` takes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Driver => "driver",
            Self::Devices => "devices",
            Self::Mps => "mps",
            Self::Managers => "managers",
            Self::Agent => "agent",
            Self::Config => "config",
            Self::Disk => "disk",
            Self::Security => "security",
            Self::Slurm => "slurm",
        }
    }
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Area {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|area| area.name() == name);
        found.ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|area| area.name()).collect();
            format!("the areas are {}", names.join(", "))
        })
    }
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The host is as gpush needs it.
    Ok,
    /// gpush works, but another program or a job may not.
    Warning,
    /// A feature of gpush does not work.
    Problem,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        })
    }
}

/// One result of the examination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Part of the host.
    pub area: Area,
    /// Severity.
    pub severity: Severity,
    /// Number of the mistake, if it has one: `gpushctl explain G001` explains it.
    pub lint: Option<Lint>,
    /// The finding, in one clause.
    pub message: String,
    /// Facts that explain the finding.
    pub causes: Vec<String>,
    /// The solution, with a command; `None` when there is no problem.
    pub hint: Option<String>,
}

impl Finding {
    /// Creates a finding without a problem.
    pub(crate) fn ok(area: Area, message: impl Into<String>) -> Self {
        Self { area, severity: Severity::Ok, lint: None, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// Creates a finding that does not prevent gpush from working.
    pub(crate) fn warning(area: Area, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, hint: Some(hint.into()), ..Self::ok(area, message) }
    }

    /// Creates a finding that prevents gpush from working.
    pub(crate) fn problem(area: Area, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { severity: Severity::Problem, hint: Some(hint.into()), ..Self::ok(area, message) }
    }

    /// Sets the number of the mistake.
    #[must_use]
    pub(crate) fn lint(self, lint: Lint) -> Self {
        Self { lint: Some(lint), ..self }
    }

    /// Adds a fact that explains the finding.
    #[must_use]
    pub(crate) fn cause(mut self, cause: impl Into<String>) -> Self {
        self.causes.push(cause.into());
        self
    }
}
