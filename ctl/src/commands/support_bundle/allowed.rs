//! Which values of a document the bundle contains.
//!
//! A document is an answer of gpushd, a document of gpushctl, or an entry of gpushd's log. Numbers, truth values and the
//! names of fields are always in the bundle. A text is in the bundle only if its field is in [`TEXTS`]. Texts of users
//! and processes, such as user names, reasons, command lines and environments, are in other fields. Messages of gpushd
//! can repeat such texts, so the bundle contains only messages about the driver and about gpushd itself.

use gpush_api::Code;
use serde::Deserialize;
use serde_json::{Map, Value};

/// The text that replaces a text which is not in the bundle.
pub(super) const LEFT_OUT: &str = "(left out)";

/// Fields whose texts the bundle contains: identifiers, states, versions, times, layouts, and the settings of the config
/// that name no user, group, hook or service.
#[rustfmt::skip]
const TEXTS: &[&str] = &[
    "action", "admin_socket", "agent", "agent_down", "api", "architecture", "area", "at", "at_end", "before", "bind_to",
    "cause", "change", "changed", "clients_end_at", "code", "collected_at", "compute_mode", "compute_profile",
    "control", "created_at", "ctl", "cuda", "deadline", "desired_level", "destroyed_device_uuids", "device",
    "device_uuids", "do", "ended_at", "enforcement", "engine", "entries", "expires_at", "failed_at",
    "from", "gpu_uuid", "gpu_uuids", "gpus", "grace", "granted_at", "health", "id", "instance", "key", "kind", "kinds",
    "layout", "layout_source", "lease", "lease_id", "lease_ids", "lease_kind", "leftovers", "level", "library",
    "log_directory", "longest", "match", "memory", "mig_uuids", "mode", "mps_daemons", "name",
    "next_start_at", "nvidia_smi", "nvml", "object", "observed_at", "operation_id", "owner", "path", "pci", "pci_id",
    "pci_subsystem", "peers", "pending_keys", "pipe_directory", "placement", "policy", "poll", "priority",
    "processes_end_at", "profile", "protocol", "read_at", "requirement", "result", "rule", "selector", "selectors",
    "server", "settled", "severity", "since", "state", "status", "step", "target", "targets", "timeout", "unattributed",
    "unleased", "unleased_step", "until", "user_limits", "uuid", "version", "waiting",
];

/// Errors whose messages never repeat texts of users.
const FAULTS: [Code; 4] = [Code::DriverUnavailable, Code::DriverError, Code::DriverTimeout, Code::GpuLost];

/// Areas of the doctor whose findings repeat errors of gpushd or the text of the config.
const REPEATING_AREAS: [&str; 2] = ["agent", "config"];

/// Fields of a log entry that the bundle contains: when and where gpushd wrote it, and its objects.
const OF_ENTRY: [&str; 12] = [
    "__REALTIME_TIMESTAMP",
    "_PID",
    "PRIORITY",
    "TARGET",
    "CODE_FILE",
    "CODE_LINE",
    "GPUSH_GPU",
    "GPUSH_MIG",
    "GPUSH_LEASE",
    "GPUSH_OPERATION",
    "GPUSH_UID",
    "GPUSH_MPS",
];

/// An area of the doctor whose causes name processes, and texts of their environments.
const AREA_OF_PROCESSES: &str = "managers";

/// The table of the config whose texts name hooks. Its key `before` is also a field of the API.
const HOOKS: &str = "mode_change";

/// Modules inside [`OWN_MESSAGES`] whose log messages repeat other texts: names of hooks and services with their output,
/// and names of cgroups that users create.
const REPEATING_MODULES: [&str; 2] = ["gpush_host::helper", "gpush_host::cgroup"];

/// Modules, with the modules inside them, whose log messages never repeat texts of users, except
/// [`REPEATING_MODULES`].
const OWN_MESSAGES: [&str; 16] = [
    "gpush_host",
    "gpush_mps::daemon::launcher",
    "gpush_mps::daemon::leftovers",
    "gpush_mps::daemon::log",
    "gpush_mps::daemon::stop",
    "gpush_mps::daemon::target_dir",
    "gpush_mps::daemon::task",
    "gpush_nvml",
    "gpush_store",
    "gpushd::lifecycle::stored_state",
    "gpushd::modes::timeslice",
    "gpushd::reconcile::monitor",
    "gpushd::serve::listen",
    "gpushd::system::late_driver",
    "gpushd::system::tasks",
    "gpushd::system::watchdog",
];

/// Leaves out the texts of a document that are not allowed.
pub(super) fn document(value: &mut Value) {
    filter("", value);
}

fn filter(name: &str, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let own = own_texts(fields);
            let is_of_hooks = name == HOOKS;
            for (name, value) in fields.iter_mut().filter(|(name, _)| !own.contains(&name.as_str())) {
                filter(if is_of_hooks { "" } else { name }, value);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| filter(name, value)),
        Value::String(text) if !TEXTS.contains(&name) => LEFT_OUT.clone_into(text),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns the fields of an error or of a finding of the doctor whose texts gpush has written.
fn own_texts(fields: &Map<String, Value>) -> &'static [&'static str] {
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let code = fields.get("code").and_then(|code| Code::deserialize(code).ok());
    if code.is_some_and(|code| FAULTS.contains(&code)) {
        &["message"]
    } else if text("severity").is_some() && text("area") == Some(AREA_OF_PROCESSES) {
        &["message", "hint"]
    } else if text("severity").is_some() && text("area").is_some_and(|area| !REPEATING_AREAS.contains(&area)) {
        &["message", "causes", "hint"]
    } else {
        &[]
    }
}

/// Returns the entries that gpushd wrote to the journal, each without the texts that are not allowed. Leaves out the
/// entries of other programs about gpushd. `printed` has one entry as JSON on each line.
pub(super) fn log(printed: &str) -> Vec<Value> {
    let entries = printed.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
    entries.filter_map(own_entry).collect()
}

fn own_entry(mut entry: Map<String, Value>) -> Option<Value> {
    let module = entry.get("TARGET")?.as_str()?.to_owned();
    let is_in =
        |parent: &str| module.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
    let has_own_message = OWN_MESSAGES.into_iter().any(is_in) && !REPEATING_MODULES.into_iter().any(is_in);
    entry.retain(|name, _| OF_ENTRY.contains(&name.as_str()) || name == "MESSAGE" && has_own_message);
    module.starts_with("gpush").then_some(Value::Object(entry))
}

#[cfg(test)]
mod tests {
    use gpush_core::config::schema::SECTIONS;
    use serde_json::json;

    use super::*;

    /// A module that moves must move in the list too. Otherwise its lines are missing from the support bundle.
    #[test]
    fn modules_whose_messages_are_allowed_exist() {
        let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        for module in OWN_MESSAGES.iter().chain(&REPEATING_MODULES) {
            let (name, path) = module
                .split_once("::")
                .map_or((*module, String::new()), |(name, path)| (name, format!("/{}", path.replace("::", "/"))));
            let folder = match name.strip_prefix("gpush_") {
                Some(library) => format!("crates/{library}"),
                None => "agent".to_owned(),
            };
            let source = root.join(format!("{folder}/src{path}"));
            assert!(source.is_dir() || source.with_extension("rs").is_file(), "{module}: no {}", source.display());
        }
    }

    #[test]
    fn texts_of_users_and_processes_are_left_out() {
        let mut gpu = json!({
            "uuid": "GPU-1", "index": 0, "state": "cordoned", "reasons": ["cordoned: hunter2"],
            "cordon": { "reason": "hunter2", "since": "2026-01-01T00:00:00Z", "by": { "uid": 1000, "user": "bob" } },
            "processes": [{ "pid": 7, "command": "python --key=hunter2", "kind": "compute" }],
            "environment": { "TOKEN": "hunter2" }, "new_field": "hunter2", "layout": ["1g.10gb*7"],
        });
        document(&mut gpu);
        assert_eq!(
            gpu,
            json!({
                "uuid": "GPU-1", "index": 0, "state": "cordoned", "reasons": [LEFT_OUT],
                "cordon": { "reason": LEFT_OUT, "since": "2026-01-01T00:00:00Z", "by": { "uid": 1000, "user": LEFT_OUT } },
                "processes": [{ "pid": 7, "command": LEFT_OUT, "kind": "compute" }],
                "environment": { "TOKEN": LEFT_OUT }, "new_field": LEFT_OUT, "layout": ["1g.10gb*7"],
            })
        );
    }

    #[test]
    fn messages_about_the_driver_and_the_host_are_kept() {
        let mut errors = json!([
            { "code": "driver_error", "message": "cannot read GPU 0", "causes": ["bob"] },
            { "code": "blocked", "message": "python (pid 7, bob) uses GPU 0" },
            { "area": "driver", "severity": "problem", "message": "no driver", "causes": ["not loaded"], "hint": "load it" },
            { "area": "agent", "severity": "problem", "message": "bob uses GPU 0" },
        ]);
        document(&mut errors);
        assert_eq!(
            errors,
            json!([
                { "code": "driver_error", "message": "cannot read GPU 0", "causes": [LEFT_OUT] },
                { "code": "blocked", "message": LEFT_OUT },
                { "area": "driver", "severity": "problem", "message": "no driver", "causes": ["not loaded"], "hint": "load it" },
                { "area": "agent", "severity": "problem", "message": LEFT_OUT },
            ])
        );
    }

    #[test]
    fn log_has_only_entries_of_gpushd_and_own_messages() {
        let entry = |target: Option<&str>, message: &str| {
            json!({ "TARGET": target, "MESSAGE": message, "CODE_LINE": "7", "_CMDLINE": "hunter2" }).to_string()
        };
        let printed = [
            entry(None, "Started gpushd.service"),
            entry(Some("curl"), "hunter2"),
            entry(Some("gpush_store::engine"), "the store failed"),
            entry(Some("gpush_storehouse"), "hunter2"),
            entry(Some("gpush_host::helper::keeper"), "the hook hunter2 has failed"),
            entry(Some("gpushd::cordon"), "cordoned: hunter2"),
            "not JSON".to_owned(),
        ];
        assert_eq!(
            log(&printed.join("\n")),
            [
                json!({ "TARGET": "gpush_store::engine", "MESSAGE": "the store failed", "CODE_LINE": "7" }),
                json!({ "TARGET": "gpush_storehouse", "CODE_LINE": "7" }),
                json!({ "TARGET": "gpush_host::helper::keeper", "CODE_LINE": "7" }),
                json!({ "TARGET": "gpushd::cordon", "CODE_LINE": "7" }),
            ]
        );
    }

    #[test]
    fn allowed_fields_exist_in_the_api_or_the_config() {
        let api = include_str!("../../../../docs/openapi.json");
        let of_gpushctl = ["area", "collected_at", "ctl", "severity"];
        let exists = |name: &&&str| {
            SECTIONS.iter().any(|section| section.keys.contains(*name))
                || of_gpushctl.contains(*name)
                || api.contains(&format!("\"{name}\":"))
        };
        let absent: Vec<_> = TEXTS.iter().filter(|name| !exists(name)).collect();
        assert!(absent.is_empty(), "{absent:?}");
        assert!(TEXTS.is_sorted());
    }
}
