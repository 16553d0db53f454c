//! Candidates for the values of arguments. The name of a value in the help, such as `GPU`,
//! determines its candidates.
//!
//! gpushctl requests values from gpushd if only gpushd knows them, but waits at most [`LIMIT`]. If
//! gpushd does not answer, there are no such candidates.

use std::{ffi::OsStr, time::Duration};

use clap::Arg;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use gpush_api::{EventKind, Gpu, LeaseState, MigDevice, MpsDaemon};
use gpush_client::{Client, Error, Origin, Socket};
use gpush_core::{lint::Lint, preset, selector::Selector};

use super::{is_one_of, typed};
use crate::{args::topic::Page, commands, render::mps, socket};

/// Maximum time for the answers of gpushd.
const LIMIT: Duration = Duration::from_millis(400);

/// Number of operations to offer.
const OPERATIONS: usize = 50;

/// A candidate, and a description that some shells show.
type Candidate = (String, String);

/// Returns the function that completes the values of an argument. Returns `None` for free text, and
/// for values that clap itself completes.
pub(super) fn of(arg: &Arg) -> Option<ArgValueCompleter> {
    let name = arg.get_value_names()?.first()?.as_str();
    let list: fn(&str) -> Vec<Candidate> = match name {
        "GPU" => gpus,
        "PROFILE" => profiles,
        "ENTRY" => entries,
        "LAYOUT" => layouts,
        "TARGET" => targets,
        "LEASE" => leases,
        "ID" => operations,
        "OBJECT" => objects,
        "KIND" => |_| named(EventKind::ALL.iter().map(|kind| kind.name())),
        "AREA" => |_| named(gpush_doctor::Area::ALL.map(gpush_doctor::Area::name)),
        "TOPIC" => |_| {
            let lints = Lint::ALL.map(Lint::number);
            named(std::iter::once("isolation").chain(Page::ALL.map(Page::name)).chain(lints))
        },
        "PRIORITY" => |_| named(["normal", "below-normal"]),
        "FORMAT" => |_| formats(),
        "PRESET|FILE" => return Some(ArgValueCompleter::new(preset_or_file)),
        "FILE" | "PATH" => return Some(ArgValueCompleter::new(PathCompleter::any())),
        "DIR" => return Some(ArgValueCompleter::new(PathCompleter::dir())),
        "COMMAND" => return Some(ArgValueCompleter::new(PathCompleter::file())),
        _ => return None,
    };
    Some(ArgValueCompleter::new(move |current: &OsStr| matching(list, current)))
}

/// Returns the candidates that begin with the typed text.
fn matching(list: fn(&str) -> Vec<Candidate>, current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let is_safe = |value: &str| !value.contains(|c: char| c.is_control() || c.is_whitespace());
    let found = list(current).into_iter().filter(|(value, _)| value.starts_with(current) && is_safe(value));
    let candidate = |(value, help): Candidate| {
        CompletionCandidate::new(value).help((!help.is_empty()).then(|| help.replace('\n', " ").into()))
    };
    found.map(candidate).collect()
}

fn named(names: impl IntoIterator<Item = &'static str>) -> Vec<Candidate> {
    names.into_iter().map(|name| (name.to_owned(), String::new())).collect()
}

/// Sends a request to gpushd. Returns an empty result if gpushd does not answer in time.
fn ask<T: Default>(what: impl AsyncFnOnce(&mut Client) -> Result<T, Error>) -> T {
    let Ok(runtime) = commands::runtime() else { return T::default() };
    let mut client = Client::new(socket()).deadline(LIMIT).without_waiting_for_start();
    let answer = runtime.block_on(async { tokio::time::timeout(LIMIT, what(&mut client)).await });
    answer.ok().and_then(Result::ok).unwrap_or_default()
}

/// Returns the socket that the command line to complete names.
fn socket() -> Socket {
    let given = values(&["--socket"]).pop().map(|path| Socket::given(path, Origin::Option));
    given.unwrap_or_else(socket::default)
}

/// Returns the values of an option in the command line to complete.
fn values(names: &[&str]) -> Vec<String> {
    let words: Vec<String> = typed().into_iter().filter_map(|word| word.into_string().ok()).collect();
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        match word.split_once('=') {
            Some((name, value)) if names.contains(&name) => found.push(value.to_owned()),
            _ if names.contains(&word.as_str()) => found.extend(words.get(at + 1).cloned()),
            _ => {}
        }
    }
    found
}

/// Returns whether the command line to complete contains one of these words.
fn has_word(names: &[&str]) -> bool {
    typed().iter().any(|word| is_one_of(word, names))
}

/// Returns whether the command line to complete selects the GPU with `-g`, or has no `-g`.
fn is_selected(gpu: &Gpu) -> bool {
    let selectors = values(&["-g", "--gpu", "-i"]);
    Selector::resolve(&selectors, &[gpu]).is_ok_and(|found| !found.is_empty())
        || selectors.iter().all(|text| text.parse::<Selector>().is_err())
}

fn gpus(current: &str) -> Vec<Candidate> {
    let found = ask(async |client| client.gpus(false).await);
    if current.to_ascii_lowercase().starts_with('g') {
        return found
            .into_iter()
            .map(|gpu| (gpu.uuid.to_string(), format!("GPU {}, {}", gpu.index, gpu.name)))
            .collect();
    }
    let all = (found.len() > 1).then(|| ("all".to_owned(), "all GPUs".to_owned()));
    found.into_iter().map(|gpu| (gpu.index.to_string(), gpu.name)).chain(all).collect()
}

/// A profile: how many of its instances exist, and how many more can be created.
struct Room {
    profile: String,
    devices: usize,
    free: usize,
    remaining: usize,
}

/// Returns the profiles of the selected GPUs, smallest first.
fn rooms() -> Vec<Room> {
    let (gpus, devices) = ask(async |client| Ok((client.gpus(true).await?, client.mig_devices().await?)));
    let gpus: Vec<Gpu> = gpus.into_iter().filter(is_selected).collect();
    let mut rooms: Vec<Room> = Vec::new();
    for gpu in &gpus {
        for profile in gpu.mig.iter().flat_map(|mig| mig.profiles.iter()) {
            let remaining = usize::from(profile.remaining.unwrap_or_default());
            match rooms.iter_mut().find(|room| room.profile == profile.name) {
                Some(room) => room.remaining += remaining,
                None => rooms.push(Room { profile: profile.name.clone(), devices: 0, free: 0, remaining }),
            }
        }
    }
    for device in devices.iter().filter(|device| gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid)) {
        if let Some(room) = rooms.iter_mut().find(|room| room.profile == device.profile) {
            room.devices += 1;
            room.free += usize::from(device.available);
        }
    }
    rooms
}

/// Lists profiles: for `mig list`, those of existing devices; otherwise, those with free capacity.
fn profiles(_current: &str) -> Vec<Candidate> {
    let is_list = has_word(&["mig"]);
    let is_offered = |room: &Room| if is_list { room.devices > 0 } else { room.free + room.remaining > 0 };
    rooms().into_iter().filter(is_offered).map(described).collect()
}

fn described(room: Room) -> Candidate {
    (room.profile, format!("{} free, {} more can be created", room.free, room.remaining))
}

/// Lists layout entries: for `mig remove`, the existing instances; for `mig add`, profiles with
/// free capacity.
fn entries(_current: &str) -> Vec<Candidate> {
    if !has_word(&["remove"]) {
        return rooms().into_iter().filter(|room| room.remaining > 0).map(described).collect();
    }
    let devices = ask(async |client| client.mig_devices().await);
    let gpus = ask(async |client| client.gpus(false).await);
    let is_here = |device: &MigDevice| gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid && is_selected(gpu));
    let mut found: Vec<Candidate> = Vec::new();
    for device in devices.into_iter().filter(is_here) {
        if found.iter().all(|(instance, _)| *instance != device.instance) {
            found.push((device.instance, format!("GPU {}", device.gpu)));
        }
    }
    found
}

/// Lists the layouts in the config; after a comma, lists profiles.
fn layouts(current: &str) -> Vec<Candidate> {
    let before = current.rfind(',').map_or("", |at| &current[..=at]);
    let entries = rooms().into_iter().map(|room| (format!("{before}{}", room.profile), "profile".to_owned()));
    if !before.is_empty() {
        return entries.collect();
    }
    let named = ask(async |client| client.config().await.map(|config| config.layouts));
    let named = named.into_iter().map(|layout| (layout.name, layout.entries.join(",")));
    named.chain([("none".to_owned(), "no instances".to_owned())]).chain(entries).collect()
}

/// Lists MPS targets. If the command requests a lease, also lists MIG devices.
fn targets(_current: &str) -> Vec<Candidate> {
    let daemons = ask(async |client| client.mps().await);
    let daemon = |daemon: &MpsDaemon| (mps::argument(daemon), format!("MPS, {}", mps::state(daemon.state).0));
    let mut found: Vec<Candidate> = daemons.iter().map(daemon).collect();
    if !has_word(&["mps"]) {
        let devices = ask(async |client| client.mig_devices().await);
        for device in devices.into_iter().filter(|device| device.available) {
            let name = format!("{}:{}", device.gpu, device.device.unwrap_or(device.instance));
            if found.iter().all(|(other, _)| *other != name) {
                found.push((name, "free".to_owned()));
            }
        }
    }
    found
}

/// Lists leases. If the command accepts only the caller's leases, lists only those.
fn leases(_current: &str) -> Vec<Candidate> {
    let uid = nix::unistd::getuid().as_raw();
    let is_any = uid == 0 || has_word(&["show", "revoke"]);
    let found = ask(async |client| client.leases(0).await);
    let open =
        found.into_iter().filter(|lease| lease.state != LeaseState::Ended && (is_any || lease.holder.uid == uid));
    open.map(|lease| {
        let holder = lease.holder.user.unwrap_or_else(|| format!("uid {}", lease.holder.uid));
        (lease.id.to_string(), format!("{holder}, {}", lease.kind))
    })
    .collect()
}

/// Lists operations, latest first. If the command accepts only operations that have not ended,
/// lists only those.
fn operations(_current: &str) -> Vec<Candidate> {
    let is_unfinished = has_word(&["wait", "cancel"]);
    let found = ask(async |client| client.last_operations(OPERATIONS, None).await);
    let found = found.into_iter().filter(|one| !is_unfinished || !one.state.is_final());
    found.map(|one| (one.id, format!("{}, {}", one.kind, one.state))).collect()
}

/// Lists what can be the object of audit records.
fn objects(current: &str) -> Vec<Candidate> {
    [gpus(current), targets(current), leases(current), operations(current)].concat()
}

/// Lists output formats. `lease env` has other formats than the other commands.
fn formats() -> Vec<Candidate> {
    if has_word(&["lease"]) && has_word(&["env"]) {
        return named(["sh", "fish", "csh", "json", "docker"]);
    }
    named(["table", "wide", "json", "name", "uuid", "csv"])
}

/// Lists presets and files.
fn preset_or_file(current: &OsStr) -> Vec<CompletionCandidate> {
    let presets =
        matching(|_| preset::names().map(|(name, text)| (name.to_owned(), text.to_owned())).collect(), current);
    presets.into_iter().chain(PathCompleter::any().complete(current)).collect()
}
