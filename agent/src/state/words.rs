//! Conditions of GPUs as text, for reasons, errors and the log.

use gpush_api::{Actor, ApiError, Code, Cordon, GpuIndex, GpuUuid, Maintenance, text::local_time};

use super::holder::Holder;

/// Returns the name of a user; the uid if the user has no name.
pub(crate) fn actor(actor: &Actor) -> String {
    actor.user.clone().unwrap_or_else(|| format!("uid {}", actor.uid))
}

/// Describes a cordon, as a part of a sentence.
pub(crate) fn cordon(cordon: &Cordon) -> String {
    match (&cordon.by, cordon.reason.is_empty()) {
        (Some(by), true) => format!("cordoned by {}", actor(by)),
        (Some(by), false) => format!("cordoned by {}: {}", actor(by), cordon.reason),
        (None, _) => format!("cordoned by gpushd: {}", cordon.reason),
    }
}

/// Describes a maintenance as a noun phrase, with its user, time and reason.
pub(crate) fn maintenance(maintenance: &Maintenance) -> String {
    let by = maintenance.by.as_ref().map_or_else(|| "an unknown user".to_owned(), actor);
    let since = local_time(maintenance.since);
    let reason = maintenance.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
    format!("maintenance, which {by} entered at {since}{reason}")
}

/// Returns a sentence that says that the host is in maintenance.
pub(crate) fn in_maintenance(maintenance: &Maintenance) -> String {
    format!("the host is in {}", self::maintenance(maintenance))
}

/// Returns the error for a request that is not possible during maintenance, because it would change
/// a GPU or call the driver.
pub(crate) fn refusal(maintenance: &Maintenance) -> ApiError {
    ApiError::new(Code::Conflict, in_maintenance(maintenance))
        .cause("gpushd has no driver handle open, and changes nothing")
        .hint("when the work on the host is done, end maintenance with `gpushctl maintenance leave` (administrator)")
}

/// Returns the error for a request that needs readings, if gpushd was started in maintenance and
/// has no readings.
pub(crate) fn not_read_error(maintenance: &Maintenance) -> ApiError {
    let causes = vec!["gpushd was started during maintenance, and has not read the GPUs".to_owned()];
    ApiError { causes, ..refusal(maintenance) }.retryable()
}

/// Returns the beginning of a sentence about `count` leases: subject and verb.
pub(crate) fn leases_clause(count: usize) -> String {
    if count == 1 { "1 lease is".to_owned() } else { format!("{count} leases are") }
}

/// Returns an error and its causes in one line, for the log.
pub(crate) fn one_line(error: &ApiError) -> String {
    error.causes.iter().fold(error.to_string(), |text, cause| text + "; " + cause)
}

/// Returns an error in one line of limited length: its first cause, the number of its other causes, its outcome and its
/// hint.
pub(crate) fn short_line(error: &ApiError) -> String {
    let cause = first_cause(error).map_or_else(String::new, |cause| format!("; {cause}"));
    with_hint(format!("{error}{cause}"), error)
}

/// Returns the first cause of an error, with the number of its other causes.
pub(crate) fn first_cause(error: &ApiError) -> Option<String> {
    match &error.causes[..] {
        [] => None,
        [only] => Some(only.clone()),
        [first, others @ ..] => Some(format!("{first} (and {} more)", others.len())),
    }
}

/// Adds the outcome and the hint of an error to a line about the error.
pub(crate) fn with_hint(line: String, error: &ApiError) -> String {
    error.outcome.iter().chain(&error.hint).fold(line, |text, more| text + "; " + more)
}

/// Returns the error about a GPU that an operation changes.
pub(crate) fn changed_by(index: GpuIndex, uuid: &GpuUuid, holder: &Holder) -> ApiError {
    let hint = match holder {
        Holder::Operation(id) => format!("wait for it with `gpushctl operation wait {id}`, then try again"),
        Holder::Planning => "try again in a moment".to_owned(),
    };
    ApiError::new(Code::Conflict, format!("GPU {index} ({uuid}) is being changed by {holder}")).hint(hint).retryable()
}

/// Returns the meaning of an Xid, from the Xid catalog of NVIDIA's documentation.
pub(crate) fn xid(xid: u64) -> Option<&'static str> {
    Some(match xid {
        13 => "graphics engine exception caused by a program",
        31 => "memory page fault caused by a program",
        43 => "a program made the GPU stop processing",
        45 => "preemptive cleanup, after an earlier error",
        46 => "the GPU stopped processing",
        48 => "double-bit ECC error",
        62 => "internal microcontroller halt",
        63 => "row remapping event",
        64 => "row remapping failure",
        74 => "NVLink error",
        79 => "the GPU has fallen off the bus",
        92 => "high rate of single-bit ECC errors",
        94 => "contained memory error",
        95 => "uncontained memory error",
        119 => "the GPU's system processor did not answer",
        120 => "error of the GPU's system processor",
        140 => "unrecovered ECC error",
        _ => return None,
    })
}
