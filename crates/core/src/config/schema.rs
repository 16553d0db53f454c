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
pub const TOP: Section = Section { header: "", keys: &["auto_reconcile", "enforce"] };
/// `[log]`
pub const LOG: Section = Section { header: "[log]", keys: &["level"] };
/// `[driver]`
pub const DRIVER: Section = Section { header: "[driver]", keys: &["library"] };
/// `[api]`
pub const API: Section = Section { header: "[api]", keys: &["admin_socket"] };
/// `[access]`
pub const ACCESS: Section = Section { header: "[access]", keys: &["admin_groups"] };
/// `[limits]`
pub const LIMITS: Section = Section { header: "[limits]", keys: &["changes_burst", "changes_per_second"] };
/// `[health]`
pub const HEALTH: Section = Section { header: "[health]", keys: &["cordon_xids", "poll"] };
/// `[mode_change]`
pub const MODE_CHANGE: Section = Section {
    header: "[mode_change]",
    keys: &["services", "before", "after", "timeout", "nvidia_smi", "reset_together"],
};
/// `[mps]`
pub const MPS: Section =
    Section { header: "[mps]", keys: &["control", "log_directory", "health", "restart_hung_with_clients"] };
/// `[processes]`
pub const PROCESSES: Section = Section { header: "[processes]", keys: &["unleased", "grace", "allow"] };
/// An entry of `processes.allow`, which is an inline table in the file, not a section.
pub const ALLOW: Section = Section { header: "[[processes.allow]]", keys: &["exe", "uid"] };
/// `[leases]`
pub const LEASES: Section = Section { header: "[leases]", keys: &["placement", "user_limits"] };
/// `[history]`
pub const HISTORY: Section = Section { header: "[history]", keys: &["days"] };
/// `[metrics]`
pub const METRICS: Section = Section { header: "[metrics]", keys: &["readers", "job_files"] };
/// `[notify]`
pub const NOTIFY: Section = Section { header: "[notify]", keys: &["before", "command", "user", "job_comment"] };
/// `[idle]`
pub const IDLE: Section = Section {
    header: "[idle]",
    keys: &["action", "start_grace", "after", "empty_after", "warn_before", "max_keep", "slurm_jobs"],
};
/// `[idle.exempt]`: leases that the idle policy leaves alone.
pub const IDLE_EXEMPT: Section = Section { header: "[idle.exempt]", keys: &["users", "groups", "jobs", "rules"] };
/// `[slurm]`
pub const SLURM: Section = Section {
    header: "[slurm]",
    keys: &["agent_down", "deadline", "busy", "leftovers", "unattributed", "admin_comment"],
};
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
        "mps_percentage",
        "longest",
        "gpus",
        "default",
    ],
};
/// `[[price]]`
pub const PRICE: Section =
    Section { header: "[[price]]", keys: &["kind", "model", "per_slice_hour", "per_lease", "currency"] };
/// `[layouts]`. The administrator chooses its keys: they are names of layouts.
pub const LAYOUTS: Section = Section { header: "[layouts]", keys: &[] };
/// `[defaults]`: keys of all rules that do not set them.
pub const DEFAULTS: Section = Section { header: "[defaults]", keys: &["lease", "enforce_missing", "at_end", "owner"] };
/// `[[gpu]]`
pub const RULE: Section = Section {
    header: "[[gpu]]",
    keys: &[
        "name",
        "match",
        "mode",
        "layout",
        "lease",
        "enforce_missing",
        "at_end",
        "over_limit",
        "over_limit_grace",
        "owner",
        "job_default",
        "users",
        "groups",
        "isolation",
        "workload",
    ],
};
/// `[gpu.mps]`, which belongs to the rule above it.
pub const RULE_MPS: Section = Section {
    header: "[gpu.mps]",
    keys: &["percentage", "memory", "priority", "max_clients", "total_percentage", "users", "compute_mode"],
};
/// `[gpu.timeslice]`, which belongs to the rule above it.
pub const RULE_TIMESLICE: Section = Section { header: "[gpu.timeslice]", keys: &["replicas", "level", "compute_mode"] };
/// `[gpu.idle]`, which belongs to the rule above it.
pub const RULE_IDLE: Section = Section {
    header: "[gpu.idle]",
    keys: &["action", "start_grace", "after", "empty_after", "warn_before", "max_keep", "by_memory"],
};

/// Keys that the config no longer has and that are not similar to their successors: table, key, and what to do.
pub(super) const FORMER_KEYS: &[(&str, &[&str], &str)] = &[
    ("[driver]", &["start_s", "read_ms", "change_s"], "remove the line: the time limits of driver calls are fixed"),
    (
        "[api]",
        &["socket_group", "socket_mode"],
        "remove the line: the unit gpushd.socket sets the group and the mode of the socket (`systemctl edit \
         gpushd.socket`)",
    ),
    ("[mode_change]", &["hook_s", "service_s"], "write timeout = \"1m\", the limit for hooks and for services"),
    ("[mode_change]", &["reset_s"], "remove the line: the time limit of a reset is fixed"),
    ("[mode_change]", &["systemctl"], "remove the line: gpushd runs /usr/bin/systemctl"),
    ("[mps]", &["server"], "remove the line: gpushd uses the server in the directory of `control`"),
    (
        "[mps]",
        &["log_mib", "start_s", "pause_s", "longest_pause_s", "failures", "within_s", "stop_s"],
        "remove the line: the time limits of MPS daemons, their restarts and the size of their logs are fixed",
    ),
    ("[slurm]", &["directory"], "remove the line: the option --dir of the hooks sets another directory"),
    ("[gpu.mps]", &["memory_limit"], "write memory = \"8G\""),
    ("[gpu.mps]", &["shares_percent"], "write total_percentage = 100"),
];

/// Words that people write for a key and that are not similar to it: table, words, and the key.
pub(super) const OTHER_WORDS: &[(&str, &[&str], &str)] = &[
    ("[[gpu]]", &["gpu", "gpus", "index", "indexes", "device", "devices", "select", "selectors", "uuid"], "match"),
    ("[gpu.mps]", &["active_thread_percentage", "default_active_thread_percentage", "thread_percentage"], "percentage"),
    ("[gpu.mps]", &["pinned_device_memory_limit", "default_pinned_device_memory_limit", "pinned_memory"], "memory"),
];

/// Unknown keys whose setting is in another table or does not exist: table, keys, and what to do.
pub(super) const MISPLACED_WORDS: &[(&str, &[&str], &str)] = &[
    ("", &["log_level", "loglevel"], "write [log] on a line of its own, and `level` below it"),
    ("", &["gpus", "rule", "rules"], "write [[gpu]] above each rule"),
    ("", &["quotas"], "write [[quota]] above each quota"),
    ("", &["prices"], "write [[price]] above each price"),
    ("", &["version"], "remove the line: the config has no version"),
    ("", &["sharing"], "write [[gpu]] above each rule, with mode = \"mps\" or mode = \"timeslice\""),
    (
        "[leases]",
        &["max_duration", "max_time", "duration", "longest"],
        "write [[quota]] with everybody = true, and `longest` below it",
    ),
];

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
    HISTORY,
    METRICS,
    NOTIFY,
    IDLE,
    IDLE_EXEMPT,
    SLURM,
    QUOTA,
    PRICE,
    LAYOUTS,
    DEFAULTS,
    RULE,
    RULE_MPS,
    RULE_TIMESLICE,
    RULE_IDLE,
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
