//! Plans and checks without gpushd, on a preset or on a saved host, with `gpush-core`.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code, Gpu, LayoutSource, PlanRequest, Plans, Remedy};
use gpush_core::{config::Config, desired, layout::Layout, preset};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::exit;

/// Default path of gpushd's config.
pub(crate) const DEFAULT_CONFIG: &str = gpush_core::config::DEFAULT_FILE;

/// Maximum size of a file that describes a host, in bytes.
const LARGEST: u64 = 64 << 20;

/// Returns the GPUs of an offline host: a preset, a file written by `gpu list --json`, or stdin for `-`.
pub(crate) fn host(text: &str) -> Result<Vec<Gpu>, ApiError> {
    if text != "-" && preset::names().any(|(name, _)| name == text) {
        return preset::gpus(text);
    }
    let path = Path::new(text);
    // Treat the text as a path if it looks like one or if the file exists. Otherwise, it is a misspelt preset.
    if text == "-" || path.exists() || text.contains('/') || path.extension().is_some() {
        return preset::saved(&read(path)?, &name(path));
    }
    preset::gpus(text)
}

/// Plans a request on the GPUs of the offline host `host`.
pub(crate) fn plan(host: &str, gpus: &[Gpu], config: Option<&Path>, request: &PlanRequest) -> Result<Plans, ApiError> {
    let mut plans = planned(gpus, config, request).map_err(|error| about(host, error))?;
    about_all(host, &mut plans);
    Ok(plans)
}

/// Changes the commands in hints so that they use the offline host, because commands that contact gpushd would not
/// help.
pub(crate) fn about_all(host: &str, plans: &mut Plans) {
    for plan in &mut plans.plans {
        plan.error = plan.error.take().map(|error| about(host, error));
    }
}

/// Changes the commands in the hint of one error so that they use the offline host.
pub(crate) fn about(host: &str, mut error: ApiError) -> ApiError {
    // Keep the hint if the host came from stdin, which cannot be read again.
    if host != "-"
        && let Some(hint) = &mut error.hint
    {
        let plain = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
        let host = if plain { host.to_owned() } else { format!("'{}'", host.replace('\'', r"'\''")) };
        let profiles = format!("gpushctl mig profiles --offline {host}");
        *hint = match error.remedy {
            Some(Remedy::ChooseGpus) => format!("choose GPUs that `{profiles}` lists"),
            Some(Remedy::ChooseMigGpus) => format!("choose GPUs that support MIG; `{profiles}` shows them"),
            Some(Remedy::CorrectDevices) => "correct `devices` in the file, or name another host".to_owned(),
            None => hint
                .replace("gpushctl mig profiles", &profiles)
                .replace("gpushctl mig apply --dry-run ", &format!("gpushctl mig apply --dry-run --offline {host} ")),
        };
    }
    error
}

/// Returns the GPUs with the modes and rules that the config gives them.
pub(crate) fn described(
    host: &str,
    mut gpus: Vec<Gpu>,
    config: Option<&Path>,
    request: &PlanRequest,
) -> Result<Vec<Gpu>, ApiError> {
    let config = config_of(&gpus, config, request).map_err(|error| about(host, error))?;
    desired::describe_all(&config, &mut gpus);
    Ok(gpus)
}

/// Returns the config of an offline plan.
fn config_of(gpus: &[Gpu], config: Option<&Path>, request: &PlanRequest) -> Result<Config, ApiError> {
    match (config, &request.layout) {
        (Some(path), _) => load(path),
        (None, LayoutSource::Entries(_) | LayoutSource::PerGpu(_)) => Ok(Config::default()),
        (None, LayoutSource::Named(name)) if name == "none" => Ok(Config::default()),
        (None, LayoutSource::Named(_) | LayoutSource::Config | LayoutSource::Wanted) => match environment() {
            Some(path) => load(&path),
            None => {
                let what = "an offline plan that uses a rule or a layout name needs a config";
                let layout = match selectable(gpus, &request.gpus) {
                    Some(selected) => format!("; or give GPUs and a layout: {selected}"),
                    None => String::new(),
                };
                Err(ApiError::new(Code::BadRequest, what)
                    .hint(format!("add --config FILE, such as --config {DEFAULT_CONFIG}{layout}")))
            }
        },
    }
}

fn planned(gpus: &[Gpu], config: Option<&Path>, request: &PlanRequest) -> Result<Plans, ApiError> {
    let config = config_of(gpus, config, request)?;
    // If there are no rules, return an error. The planner would select no GPU, and its hint would name gpushd's config,
    // which is not used here.
    let (by_rules, has_layout) = match &request.layout {
        LayoutSource::PerGpu(_) => (false, true),
        LayoutSource::Config | LayoutSource::Wanted => (true, false),
        LayoutSource::Named(name) => (config.layout(name.trim()).is_some(), true),
        LayoutSource::Entries(entries) => (Layout::parse_list(entries).is_ok(), true),
    };
    if by_rules && request.gpus.is_empty() && config.rules.is_empty() {
        let error = ApiError::new(Code::BadRequest, "the command does not select a GPU of the offline host");
        return Err(match (indexes(gpus), selectable(gpus, &request.gpus)) {
            (Some(indexes), _) if has_layout => error.hint(format!("select GPUs: --gpu {indexes}")),
            (_, Some(selected)) => error.hint(format!("give GPUs and a layout: {selected}")),
            (_, None) => error
                .cause("no GPU of the offline host supports MIG")
                .hint("name another host; `gpushctl mig apply --dry-run --help` shows how"),
        });
    }
    desired::plan_host(&config, gpus, request)
}

/// Returns the indexes of the GPUs with MIG, such as `0-3,5`. `None` if no GPU has MIG.
fn indexes(gpus: &[Gpu]) -> Option<String> {
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for gpu in gpus.iter().filter(|gpu| gpu.mig.is_some()) {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(gpu.index.0) => *last = gpu.index.0,
            Some(_) | None => spans.push((gpu.index.0, gpu.index.0)),
        }
    }
    let text = |(from, to): &(u32, u32)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    let texts: Vec<String> = spans.iter().map(text).collect();
    (!texts.is_empty()).then(|| texts.join(","))
}

/// Returns the flags that the command lacks: `--layout` with a layout for the first GPU with MIG and, if the command
/// selects no GPU, `--gpu` with this GPU. Returns `None` if no GPU has MIG.
fn selectable(gpus: &[Gpu], selected: &[String]) -> Option<String> {
    let (gpu, mig) = gpus.iter().find_map(|gpu| Some((gpu, gpu.mig.as_ref()?)))?;
    let profile = mig.profiles.iter().filter(|profile| profile.max > 1).max_by_key(|profile| profile.slices);
    let profile = &profile.or(mig.profiles.first())?.name;
    Some(if selected.is_empty() {
        format!("--gpu {} --layout {profile}", gpu.index)
    } else {
        format!("--layout {profile}")
    })
}

/// Returns the path in the environment variable `GPUSH_CONFIG`.
pub(crate) fn environment() -> Option<PathBuf> {
    std::env::var_os("GPUSH_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Reads a config file in the same way as gpushd.
fn load(path: &Path) -> Result<Config, ApiError> {
    Config::from_bytes(&read(path)?, &name(path)).map_err(|errors| ApiError::from(&errors))
}

/// Returns the name of a file for messages.
pub(crate) fn name(path: &Path) -> String {
    if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() }
}

/// Reads a file, or stdin for `-`.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ApiError> {
    read_up_to(path, LARGEST)
}

/// Reads at most `most` bytes of a file, or of stdin for `-`.
pub(crate) fn read_up_to(path: &Path, most: u64) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    let result = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        file(path, most, &mut bytes)
    };
    result.map_err(|e| {
        let error = exit::io(format!("can't read {}", name(path)), &e);
        error.hint("give the path of a file that you can read, or - for stdin")
    })?;
    Ok(bytes)
}

/// Reads a file to its end. Opens the file without blocking, because a normal open would block on a pipe without a
/// writer. Refuses such a pipe, unless it contains data: the command in `<(command)` may have written its output and
/// exited.
fn file(path: &Path, most: u64, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let mut file: File = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        let mut first = [0];
        match file.read(&mut first) {
            Ok(0) => return Err(io::Error::other("it is a pipe without a writer")),
            Ok(_) => bytes.extend(first),
            // The pipe has a writer, but contains no data yet.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    // From here on, a read blocks until there is data.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty()))?;
    file.take(most).read_to_end(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offline_hint_names_no_command_that_needs_gpushd() {
        let gpus = host("dgx-a100").unwrap();
        let request =
            PlanRequest { gpus: vec!["9".to_owned()], layout: LayoutSource::Entries(vec!["1g.10gb".to_owned()]) };
        let error = plan("dgx-a100", &gpus, None, &request).unwrap_err();
        assert_eq!(
            error.hint.as_deref(),
            Some("choose GPUs that `gpushctl mig profiles --offline dgx-a100` lists"),
            "{error}"
        );
        let lost = ApiError::new(Code::NotFound, "there is no GPU 9")
            .remedy(Remedy::CorrectDevices, "correct `devices` in the file");
        assert_eq!(about("h", lost).hint.as_deref(), Some("correct `devices` in the file, or name another host"));
    }
}
