//! Names of targets: short names for directories and systemd units, and names for users.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu, GpuIndex, Mode, MpsDaemon, PendingAim, TargetUuid};

use crate::{nearest::nearest, quote::Quoted};

/// Minimum number of hexadecimal digits in a short name. A name has more digits if it would
/// otherwise not be unique.
const DIGITS: usize = 8;

/// Maximum length of a short name, which is part of the path of a socket. The length of such a path
/// is limited.
const LONGEST: usize = 20;

/// Returns a short name for a target: `g` for a GPU or `m` for a MIG device, followed by the first
/// eight hexadecimal digits of its UUID. If `taken` already contains that name, the name has more
/// digits. The name consists of at most 20 letters and digits.
#[must_use]
pub fn short_name(uuid: &TargetUuid, taken: &BTreeSet<String>) -> String {
    let upper = uuid.as_str().to_ascii_uppercase();
    let (kind, rest) = match upper.strip_prefix("MIG-") {
        Some(rest) => ('m', rest),
        None => ('g', upper.as_str()),
    };
    // Old drivers derive the UUID of a MIG device from the UUID of its GPU: `MIG-GPU-…/1/0`. Remove
    // both prefixes.
    let rest = rest.strip_prefix("GPU-").unwrap_or(rest);
    let digits: String = rest.chars().filter(char::is_ascii_hexdigit).map(|c| c.to_ascii_lowercase()).collect();
    let name = |length: usize| format!("{kind}{}", &digits[..length.min(digits.len())]);
    let free =
        (DIGITS..LONGEST).take_while(|length| *length <= digits.len()).map(name).find(|name| !taken.contains(name));
    // If even the longest name is taken, a number is added after `x`, which is not a hexadecimal
    // digit.
    let numbered = || (2_u32..=u32::MAX).map(|n| format!("{}x{n}", name(DIGITS))).find(|name| !taken.contains(name));
    free.or_else(numbered).unwrap_or_else(|| name(DIGITS))
}

/// Returns a target's name for users: `0` or `0:2g.20gb@2`. If the driver does not report the
/// target, returns the short name.
#[must_use]
pub fn name_of(daemon: &MpsDaemon) -> String {
    match (daemon.gpu, &daemon.device) {
        (Some(gpu), None) => gpu.to_string(),
        (Some(gpu), Some(device)) => format!("{gpu}:{device}"),
        (None, _) => daemon.target.clone(),
    }
}

/// Returns the UUID of the target that a text names, if the target gets an MPS daemon only after a pending change. The
/// text may be a UUID, or a name such as `0` or `0:2g.20gb@2`. Case is ignored.
#[must_use]
pub fn pending_target(text: &str, gpus: &[Gpu]) -> Option<TargetUuid> {
    let typed = text.trim();
    let aims = gpus.iter().flat_map(|gpu| gpu.pending.iter().map(move |change| (gpu, &change.aim)));
    let mut targets = aims.filter_map(|(gpu, aim)| match aim {
        PendingAim::Mode { mode: Mode::Mps, .. } => Some((gpu.uuid.as_target(), gpu.index.to_string())),
        PendingAim::ShareDevice { uuid, device } => Some((uuid, format!("{}:{device}", gpu.index))),
        PendingAim::Mode { .. } | PendingAim::Timeslice { .. } | PendingAim::UnshareDevice { .. } => None,
    });
    let found =
        targets.find(|(uuid, name)| uuid.as_str().eq_ignore_ascii_case(typed) || name.eq_ignore_ascii_case(typed));
    found.map(|(uuid, _)| uuid.clone())
}

/// Returns the position of the daemon that a text names. The text may be the short name of a
/// target, a name such as `0:2g.20gb@2`, a UUID, or a prefix of a UUID. For a GPU that is shared as
/// a whole, the text may also be the index of this GPU. Case is ignored.
///
/// # Errors
/// No daemon matches, or several daemons match. The error lists the daemons.
pub fn resolve(text: &str, daemons: &[MpsDaemon]) -> Result<usize, ApiError> {
    let typed = text.trim();
    if typed.is_empty() {
        return Err(ApiError::new(Code::BadRequest, "the command names no MPS target")
            .hint("name an MPS target: `gpushctl mps list` shows all MPS targets"));
    }
    if daemons.is_empty() {
        let error = ApiError::new(Code::NotFound, format!("there is no MPS target {}", Quoted(typed)));
        return Err(error.cause("nothing is shared through MPS on this host").hint(
            "run `gpushctl config show` to see the rules; a rule with mode = \"mps\", or a layout entry such as \
            2g.20gb:mps, shares a GPU through MPS",
        ));
    }
    let is = |name: &str| name.eq_ignore_ascii_case(typed);
    if let Some(at) =
        daemons.iter().position(|daemon| is(&daemon.target) || is(&name_of(daemon)) || is(daemon.uuid.as_str()))
    {
        return Ok(at);
    }
    let meant: Vec<usize> = (0..daemons.len()).filter(|at| is_uuid_prefix(&daemons[*at].uuid, typed)).collect();
    match meant.as_slice() {
        [at] => Ok(*at),
        [] => Err(no_such_target(typed, daemons)),
        several => {
            let error = ApiError::new(Code::BadRequest, format!("{} is the beginning of several UUIDs", Quoted(typed)));
            let named: Vec<String> = several.iter().map(|at| listed(&daemons[*at])).collect();
            Err(error
                .cause(format!("the matching MPS targets are: {}", named.join(", ")))
                .hint("write more characters of the UUID, or the short name of the target"))
        }
    }
}

/// Returns whether a UUID begins with the text. The text must contain `GPU-` or `MIG-` and at least
/// one digit.
fn is_uuid_prefix(uuid: &TargetUuid, typed: &str) -> bool {
    let kind = |text: &str| text.split_once('-').is_some_and(|(kind, rest)| !kind.is_empty() && !rest.is_empty());
    kind(typed) && uuid.as_str().get(..typed.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(typed))
}

fn no_such_target(typed: &str, daemons: &[MpsDaemon]) -> ApiError {
    let listed: Vec<String> = daemons.iter().map(listed).collect();
    let error = ApiError::new(Code::NotFound, format!("there is no MPS target {}", Quoted(typed)))
        .cause(format!("the targets are: {}", listed.join(", ")));
    // If the text is the index of a GPU whose MIG devices are shared, the user must name one of
    // these devices.
    if let Ok(gpu) = typed.parse::<GpuIndex>() {
        let on_it = daemons.iter().filter(|daemon| daemon.gpu == Some(gpu)).map(name_of);
        let devices: Vec<String> = on_it.filter(|name| name.contains(':')).collect();
        if !devices.is_empty() {
            let names = devices.join(", ");
            return error.hint(format!("GPU {gpu} is not shared as a whole; name one of its MIG devices: {names}"));
        }
    }
    // If the text begins with the index of a GPU, a device of another GPU is never suggested.
    let index = |name: &str| name.split_once(':').map(|(gpu, _)| gpu.to_owned());
    let names = daemons.iter().flat_map(|daemon| [name_of(daemon), daemon.target.clone()]);
    let names: Vec<String> = names.filter(|name| index(typed).is_none() || index(name) == index(typed)).collect();
    // Suggest nothing for one or two letters, because any name would be similar. Also suggest
    // nothing for a number.
    let telling = typed.len() > 2 && typed.parse::<u32>().is_err();
    let near = nearest(typed, names.iter().map(String::as_str)).filter(|_| telling);
    match near {
        Some(meant) => error.hint(format!("did you mean `{meant}`?")),
        None => error.hint("name one of these targets; `gpushctl mps list` shows more details"),
    }
}

/// Formats a daemon for lists: `0:2g.20gb@2 (m5d1b03a2)`.
fn listed(daemon: &MpsDaemon) -> String {
    let name = name_of(daemon);
    if name == daemon.target { name } else { format!("{name} ({})", daemon.target) }
}
