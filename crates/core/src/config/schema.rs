//! The keys that a config may have. The parser refuses all other keys. Tests compare this list with
//! the example file and the reference, so that every key is documented.

/// A table of the config.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Header in the file; empty for the top of the file.
    pub header: &'static str,
    /// Keys of the table.
    pub keys: &'static [&'static str],
}

/// Top of the file.
pub const TOP: Section = Section { header: "", keys: &["auto_reconcile"] };
/// `[log]`
pub const LOG: Section = Section { header: "[log]", keys: &["level"] };
/// `[driver]`
pub const DRIVER: Section = Section { header: "[driver]", keys: &["library", "start_s", "read_ms", "change_s"] };
/// `[api]`
pub const API: Section = Section { header: "[api]", keys: &["socket_group", "socket_mode", "admin_socket"] };
/// `[access]`
pub const ACCESS: Section = Section { header: "[access]", keys: &["admin_groups"] };
/// `[limits]`
pub const LIMITS: Section = Section { header: "[limits]", keys: &["changes_burst", "changes_per_second"] };
/// `[health]`
pub const HEALTH: Section = Section { header: "[health]", keys: &["cordon_xids", "poll_s"] };
/// `[mode_change]`
pub const MODE_CHANGE: Section = Section {
    header: "[mode_change]",
    keys: &[
        "services",
        "before",
        "after",
        "hook_s",
        "service_s",
        "reset_s",
        "nvidia_smi",
        "systemctl",
        "reset_together",
    ],
};
/// `[mps]`
pub const MPS: Section = Section {
    header: "[mps]",
    keys: &[
        "control",
        "server",
        "log_directory",
        "log_mib",
        "health_s",
        "start_s",
        "pause_s",
        "longest_pause_s",
        "failures",
        "within_s",
        "stop_s",
        "restart_hung_with_clients",
    ],
};
/// `[processes]`
pub const PROCESSES: Section = Section { header: "[processes]", keys: &["unleased", "grace_s", "allow"] };
/// An entry of `processes.allow`, which is an inline table in the file, not a section.
pub const ALLOW: Section = Section { header: "[[processes.allow]]", keys: &["exe", "uid"] };
/// `[leases]`
pub const LEASES: Section = Section { header: "[leases]", keys: &["placement", "user_limits"] };
/// `[slurm]`
pub const SLURM: Section =
    Section { header: "[slurm]", keys: &["agent_down", "deadline_s", "leftovers", "unattributed", "directory"] };
/// `[[quota]]`
pub const QUOTA: Section = Section {
    header: "[[quota]]",
    keys: &[
        "users",
        "groups",
        "everybody",
        "kinds",
        "leases",
        "waiting",
        "memory",
        "mps_percent",
        "longest",
        "gpus",
        "default",
    ],
};
/// `[layouts]`. The administrator chooses its keys: they are names of layouts.
pub const LAYOUTS: Section = Section { header: "[layouts]", keys: &[] };
/// `[[gpu]]`
pub const RULE: Section = Section {
    header: "[[gpu]]",
    keys: &["name", "match", "mode", "layout", "lease", "at_end", "owner", "users", "groups"],
};
/// `[gpu.mps]`, which belongs to the rule above it.
pub const RULE_MPS: Section = Section {
    header: "[gpu.mps]",
    keys: &["percentage", "memory_limit", "priority", "max_clients", "shares_percent", "users", "compute_mode"],
};
/// `[gpu.timeslice]`, which belongs to the rule above it.
pub const RULE_TIMESLICE: Section = Section { header: "[gpu.timeslice]", keys: &["replicas", "level", "compute_mode"] };

/// All sections, in the order of the file.
pub const SECTIONS: &[Section] = &[
    TOP,
    LOG,
    DRIVER,
    API,
    ACCESS,
    LIMITS,
    HEALTH,
    MODE_CHANGE,
    MPS,
    PROCESSES,
    LEASES,
    SLURM,
    QUOTA,
    LAYOUTS,
    RULE,
    RULE_MPS,
    RULE_TIMESLICE,
];

impl Section {
    /// Returns the name of the table: `gpu` for `[[gpu]]`.
    #[must_use]
    pub fn table(&self) -> &'static str {
        self.header.trim_matches(['[', ']'])
    }

    /// Returns the key of the table in its parent table: `mps` for `[gpu.mps]`.
    #[must_use]
    pub fn key(&self) -> &'static str {
        self.table().rsplit('.').next().unwrap_or_default()
    }
}
