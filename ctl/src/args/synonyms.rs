//! Words of other tools and of other versions, and the commands that gpushctl has instead.

/// Returns gpushctl's verb for a verb of another tool.
pub(super) fn verb(verb: &str) -> &str {
    match verb {
        "get" | "describe" | "info" | "details" => "show",
        "ls" | "status" => "list",
        "enable" => "on",
        "disable" => "off",
        "create" | "new" => "add",
        "delete" | "del" | "destroy" | "rm" => "remove",
        "validate" | "test" | "verify" => "check",
        "release" | "revoke" => "end",
        "extend" => "renew",
        "log" => "logs",
        "abort" => "cancel",
        "limits" | "limit" => "set",
        other => other,
    }
}

/// Returns the commands that a single word may mean, the best first. The rest of the command line follows the command.
pub(super) fn of_word(word: &str) -> &'static [&'static [&'static str]] {
    match word {
        "info" | "list" | "ls" | "smi" | "show" => &[&["status"]],
        "process" | "processes" | "procs" | "holders" => &[&["ps"]],
        "undo" | "rollback" | "revert" => &[&["apply", "--undo"]],
        "overrides" | "override" => &[&["config", "overrides"]],
        "init" => &[&["config", "init"]],
        "log" | "logs" => &[&["events"], &["mps", "logs"]],
        "timeslice" | "timeslices" => &[&["gpu", "show"]],
        "bundle" => &[&["support-bundle"]],
        _ => &[],
    }
}

/// Returns the commands that two words may mean, the best first.
pub(super) fn of_words(first: &str, second: &str) -> &'static [&'static [&'static str]] {
    match (first, second) {
        ("ps" | "process" | "processes", "list" | "ls" | "show") => &[&["ps"]],
        ("gpu" | "gpus", "status") => &[&["status"]],
        ("gpu" | "gpus", "release" | "enable" | "resume") => &[&["gpu", "uncordon"]],
        ("gpu" | "gpus", "disable") => &[&["gpu", "cordon"]],
        ("mig", "status" | "devices" | "instances" | "ps") => &[&["mig", "list"]],
        ("mig", "set" | "layout" | "change") => &[&["mig", "apply"]],
        ("mig", "plan") => &[&["mig", "apply", "--dry-run"]],
        ("mig", "check" | "diff" | "assert" | "verify") => &[&["mig", "apply", "--check"]],
        ("mps", "status" | "daemons") => &[&["mps", "list"]],
        ("mps", "on" | "enable") => &[&["mps", "start"]],
        ("mps", "off" | "disable" | "kill" | "quit") => &[&["mps", "stop"]],
        ("mps", "drain") => &[&["mps", "stop", "--wait"]],
        ("lease" | "leases", "get") => &[&["lease", "show"], &["lease", "list"]],
        ("lease" | "leases", "new" | "create" | "add" | "grant" | "acquire") => &[&["lease", "request"]],
        (
            "lease" | "leases",
            "release" | "revoke" | "cancel" | "stop" | "delete" | "rm" | "remove" | "free" | "return" | "kill",
        ) => &[&["lease", "end"]],
        ("lease" | "leases", "status" | "queue") => &[&["lease", "list"], &["lease", "show"]],
        ("op" | "ops" | "operation" | "operations", "status") => &[&["operation", "show"], &["operation", "list"]],
        ("maintenance", "on" | "start" | "begin" | "enable") => &[&["maintenance", "enter"]],
        ("maintenance", "off" | "stop" | "end" | "exit" | "disable") => &[&["maintenance", "leave"]],
        ("maintenance", "show" | "list" | "status") => &[&["status"]],
        ("config", "apply") => &[&["apply"]],
        ("config", "clear") => &[&["config", "overrides", "clear"]],
        ("config", "list" | "get" | "print") => &[&["config", "show"]],
        ("config", "new" | "create" | "generate") => &[&["config", "init"]],
        ("timeslice" | "timeslices", "list" | "ls" | "status") => &[&["gpu", "list"]],
        ("timeslice" | "timeslices", "show") => &[&["gpu", "show"]],
        _ => &[],
    }
}

/// Options of other tools, each with the options of gpushctl that are tried instead. An empty text means that the option
/// is removed.
pub(super) const OPTIONS: [(&str, &[&str]); 43] = [
    ("--id", &["--gpu"]),
    ("--device", &["--gpu"]),
    ("--devices", &["--gpu"]),
    ("--index", &["--gpu"]),
    ("--profile", &["--mig"]),
    ("--mem", &["--memory"]),
    ("--percent", &["--percentage", "--mps"]),
    ("--percentage", &["--mps"]),
    ("--time", &["--for", "--timeout", "--since"]),
    ("--duration", &["--for"]),
    ("--until", &["--expires"]),
    ("--number", &["--count", "-n"]),
    ("-n", &["--count", "--dry-run"]),
    ("--message", &["--reason"]),
    ("-m", &["--reason"]),
    ("-r", &["--reason"]),
    ("--selected-config", &["--label"]),
    ("-v", &[""]),
    ("--verbose", &[""]),
    ("--debug", &[""]),
    ("--format", &["--output"]),
    ("--all", &["", "all"]),
    ("--shell", &[""]),
    ("--exclusive", &["--whole"]),
    ("--tail", &["-n", "--follow"]),
    ("--last", &["-n"]),
    ("--limit", &["-n"]),
    ("--head", &["-n"]),
    ("--lines", &["-n"]),
    ("--plan", &["--dry-run"]),
    ("--end", &["--kill", ""]),
    ("--now", &[""]),
    ("--force", &["--kill", "--yes", "--end-after=1h", ""]),
    ("--kill", &["--end-after=1h"]),
    ("--grace", &["--end-after"]),
    ("--grace-period", &["--end-after"]),
    ("--wait", &[""]),
    ("--type", &["--kind"]),
    ("-w", &["--follow"]),
    ("--preset", &["--offline"]),
    ("--drain", &["--wait"]),
    ("--no-color", &["--color=never"]),
    ("--no-colour", &["--color=never"]),
];
