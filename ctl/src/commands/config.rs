//! `gpushctl config check|show|reload|diff|overrides`.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use gpush_api::{
    ApiError, Code, ConfigView, Gpu, GpuPlan, Override, Overrides, PlanRequest, Plans, Refusal, ReloadRequest,
};
use gpush_client::Client;
use gpush_core::{
    config::{Config, ConfigErrors, Located, accounts_in},
    desired,
};
use gpush_host::config_accounts::notes_blocking;
use nix::unistd::Group;
use serde::Serialize;

use crate::{
    args::{self, Global, SomeGpus},
    exit::{DIFFERS, Failure, Outcome},
    offline,
    output::Output,
    render, socket,
};

/// The output of `gpushctl config check --json` for a valid file.
#[derive(Serialize)]
pub(super) struct Checked {
    /// The config in the form in which gpushd shows it.
    pub(super) config: ConfigView,
    /// Remarks that are not errors.
    #[serde(rename = "remarks")]
    pub(super) findings: Vec<String>,
    /// The plans for the offline host. `None` if no host was given, or if no rule claims a GPU of this host for MIG.
    #[serde(flatten)]
    pub(super) plans: Option<Plans>,
}

/// The output of `gpushctl config check --json` for an invalid file.
#[derive(Serialize)]
pub(super) struct Wrong {
    pub(super) error: ApiError,
    pub(super) problems: Vec<Located>,
}

pub(super) fn run(global: &Global, command: args::Config, out: &Output) -> Outcome {
    match command {
        args::Config::Check { file, offline } => {
            let file = file.or_else(offline::environment).or_else(|| path_of_agent(global));
            check(file, offline.as_deref(), out)
        }
        args::Config::Show { effective } => super::with_agent(global, async |client| {
            let view = client.config().await?;
            if effective && !out.json {
                out.verbatim(view.effective.as_bytes())?;
                if let Some(trouble) = &view.trouble {
                    out.remark(&render::config::not_loaded(trouble, &out.look));
                }
            } else {
                out.show(&view, |look| render::config::config(&view, look))?;
            }
            Ok(0)
        }),
        args::Config::Reload { clear_overrides } => super::with_agent(global, async |client| {
            let reloaded = client.reload(&ReloadRequest { clear_overrides }).await?;
            out.show(&reloaded, |look| render::overrides::reloaded(&reloaded, look))?;
            Ok(0)
        }),
        args::Config::Diff => super::with_agent(global, async |client| {
            let diff = client.config_diff().await?;
            out.show(&diff, |look| render::overrides::diff(&diff, look))?;
            let unseen = diff.unseen.first().map_or(0, |error| error.code.exit_status());
            Ok(if render::overrides::differs(&diff) { DIFFERS } else { unseen })
        }),
        args::Config::Overrides { command } => {
            let selectors = match &command {
                Some(args::Overrides::List { which }) => which.selectors(),
                Some(args::Overrides::Clear { which }) => return clear(global, which, out),
                None => Vec::new(),
            };
            super::with_agent(global, async |client| {
                let all = overrides_of(client, &selectors).await?;
                out.list(&all, |look| {
                    let list = render::overrides::list(&all, look);
                    if selectors.is_empty() { list } else { list.or_empty("No selected GPU has an override.") }
                })?;
                Ok(0)
            })
        }
    }
}

/// Returns the overrides of the selected GPUs; all overrides if there are no selectors.
async fn overrides_of(client: &mut Client, selectors: &[String]) -> Result<Overrides, Failure> {
    let mut all = client.overrides().await?;
    // A GPU with an override may be missing in the driver's list. So request the list only for selectors that are not
    // the UUID of an override.
    let has_override = |selector: &&String| all.overrides.iter().any(|one| one.uuid == **selector);
    let others: Vec<String> = selectors.iter().filter(|selector| !has_override(selector)).cloned().collect();
    let gpus = match others.as_slice() {
        [] => Vec::new(),
        others => {
            let gpus = client.gpus(false).await?;
            super::select_of(client, gpus, others).await?
        }
    };
    let is_selected =
        |one: &Override| selectors.contains(&one.uuid) || gpus.iter().any(|gpu: &Gpu| gpu.uuid == one.uuid);
    all.overrides.retain(|one| selectors.is_empty() || is_selected(one));
    Ok(all)
}

/// Runs `gpushctl config overrides clear`. If a selected GPU has no override, clears none.
fn clear(global: &Global, which: &SomeGpus, out: &Output) -> Outcome {
    super::with_agent(global, async |client| {
        let gpus = client.gpus(false).await;
        let overrides: Vec<String> = client.overrides().await?.overrides.into_iter().map(|one| one.uuid).collect();
        let mut selected = Vec::new();
        for selector in which.selectors() {
            // If the driver no longer lists the GPU, its UUID is enough for gpushd to find the override.
            let named = match &gpus {
                Ok(gpus) => super::select(gpus.clone(), std::slice::from_ref(&selector)).unwrap_or_default(),
                Err(_) => Vec::new(),
            };
            selected.push(match named.as_slice() {
                [] => vec![selector],
                named => named.iter().map(|gpu| gpu.uuid.clone()).collect(),
            });
        }
        let mut ended = Vec::new();
        for uuid in clearable(selected, &overrides) {
            ended.push(client.end_override(&uuid).await?);
        }
        let now = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
        let gpu_of = |ended: &gpush_api::OverrideEnded| now.iter().find(|gpu| gpu.uuid == ended.ended.uuid);
        out.show(&ended, |look| ended.iter().map(|one| render::overrides::ended(one, gpu_of(one), look)).collect())?;
        Ok(0)
    })
}

/// Returns the UUIDs of the GPUs whose overrides to clear, without repetitions. If a selector such as `all` names
/// several GPUs, takes only those with an override. If none of them has an override, takes all of them. GPUs without an
/// override come first, so that gpushd refuses the first request, before any override is cleared.
fn clearable(selected: Vec<Vec<String>>, overrides: &[String]) -> Vec<String> {
    let has_override = |uuid: &String| overrides.contains(uuid);
    let mut uuids: Vec<String> = Vec::new();
    for mut of_selector in selected {
        if of_selector.iter().any(has_override) {
            of_selector.retain(has_override);
        }
        for uuid in of_selector {
            if !uuids.contains(&uuid) {
                uuids.push(uuid);
            }
        }
    }
    uuids.sort_by_key(has_override);
    uuids
}

/// How long `config check` waits for gpushd. Without an answer, it reads the default file.
const ANSWER: Duration = Duration::from_secs(2);

/// Returns the config file of the gpushd that runs. Returns `None` if no gpushd answers, or if it uses no file.
fn path_of_agent(global: &Global) -> Option<PathBuf> {
    let runtime = super::runtime().ok()?;
    let mut client = Client::new(socket::chosen(global)).deadline(ANSWER).without_waiting_for_start();
    runtime.block_on(client.config()).ok()?.path.map(PathBuf::from)
}

fn check(named: Option<PathBuf>, host: Option<&str>, out: &Output) -> Outcome {
    if named.is_none() && !Path::new(offline::DEFAULT_CONFIG).exists() {
        let message = format!("there is no {}", offline::DEFAULT_CONFIG);
        let error = ApiError::new(Code::NotFound, message).cause("without a config, gpushd runs but manages no GPU");
        let hint = format!(
            "create an empty config with `install -D -m 644 /dev/null {}` (the man page gpush-config(5) describes the \
             settings), or name another file",
            offline::DEFAULT_CONFIG
        );
        return Err(error.hint(hint).into());
    }
    let file = named.unwrap_or_else(|| PathBuf::from(offline::DEFAULT_CONFIG));
    if file == Path::new("-") && host == Some("-") {
        let error = ApiError::new(Code::BadRequest, "the config and the host can't both be read from stdin");
        return Err(error.hint("save one of them in a file").into());
    }
    let bytes = offline::read(&file)?;
    let name = offline::name(&file);
    let config = match Config::from_bytes(&bytes, &name) {
        Ok(config) => config,
        Err(errors) => return wrong(&errors, out),
    };
    let gpus = host.map(offline::host).transpose()?;
    let known = gpus.as_deref().unwrap_or_default();
    let view = config.view(Some(&name), known);
    let mut findings = Vec::new();
    // A config for another host names accounts of that host.
    if host.is_none() {
        findings.extend(socket_group(&config));
        findings.extend(accounts(&name, &bytes));
    }
    findings.extend(programs(&config));
    findings.extend(config.slurm_rules_with_dynamic_layout().map(|rule| {
        format!("{rule}: gpushd refuses every Slurm job on these GPUs, because owner = \"slurm\" needs a static layout")
    }));
    findings.extend(gpus.iter().flat_map(|gpus| desired::findings(&config, gpus)));
    let plans = match &gpus {
        None => None,
        // No rule claims a GPU for MIG, so there is nothing to plan. Report this as a finding.
        Some(_) if !view.rules.iter().any(|r| r.mode == gpush_api::Mode::Mig && !r.claims.is_empty()) => {
            findings.push("no rule claims a GPU for MIG".to_owned());
            None
        }
        Some(gpus) => {
            let host = host.unwrap_or_default();
            let planned = desired::plan_host(&config, gpus, &PlanRequest::default());
            let mut plans = planned.map_err(|error| offline::about(host, error))?;
            offline::about_all(host, &mut plans);
            Some(plans)
        }
    };
    let checked = Checked { config: view, findings, plans };
    out.show(&checked, |look| {
        render::config::checked(&checked.config, &checked.findings, checked.plans.as_ref(), known, look)
    })?;
    let impossible = checked.plans.iter().flat_map(|p| &p.plans).find(|p| never(p));
    Ok(impossible.map_or(0, |p| p.error.as_ref().map_or(Code::LayoutImpossible, |e| e.code).exit_status()))
}

/// Returns a finding if the host has no group of the name in `socket_group`. This is not an error, because the config may
/// be for another host.
fn socket_group(config: &Config) -> Option<String> {
    let group = config.api.socket_group.as_ref().filter(|group| matches!(Group::from_name(group), Ok(None)))?;
    Some(format!(
        "socket_group: this host has no group `{group}`, so gpushd cannot create its socket; `groupadd --system {group}` \
         creates the group"
    ))
}

/// Returns a finding for each user and group that the config names but this host does not have.
fn accounts(file: &str, bytes: &[u8]) -> Vec<String> {
    let accounts = std::str::from_utf8(bytes).map(accounts_in).unwrap_or_default();
    notes_blocking(Path::new("/"), Some(file), &accounts).unwrap_or_default()
}

/// Returns a finding for each hook that the config names but this host cannot run.
fn programs(config: &Config) -> Vec<String> {
    use std::os::unix::fs::PermissionsExt;
    let change = &config.mode_change;
    let hooks = [("before", &change.before), ("after", &change.after)];
    let named = hooks.into_iter().filter_map(|(key, program)| Some((key, program.as_ref()?)));
    let wrong = |(key, program): (&str, &String)| {
        let what = match std::fs::metadata(program) {
            Err(error) => format!("{program} can't be run here: {error}"),
            Ok(of) if !of.is_file() || of.permissions().mode() & 0o111 == 0 => {
                format!("{program} is not an executable file")
            }
            Ok(of) if of.permissions().mode() & 0o022 != 0 => {
                format!(
                    "gpushd does not run {program}, because other users can write to it; remove their access with \
                    `chmod go-w {program}`"
                )
            }
            Ok(_) => return None,
        };
        Some(format!("mode_change.{key}: {what}"))
    };
    named.filter_map(wrong).collect()
}

/// Returns whether a plan can never succeed with this config and GPU model. Returns `false` if only the current use of
/// the GPU prevents success.
pub(crate) fn never(plan: &GpuPlan) -> bool {
    match &plan.refusal {
        Some(Refusal::Blocked { .. } | Refusal::Held { .. } | Refusal::Reboot { .. }) => false,
        Some(
            Refusal::UnknownProfile { .. }
            | Refusal::NoSuchPlacement { .. }
            | Refusal::PlacementsOverlap { .. }
            | Refusal::TooMany { .. }
            | Refusal::TooManySlices { .. }
            | Refusal::NoEngine { .. }
            | Refusal::NoArrangement { .. }
            | Refusal::ComputeDoesNotFit { .. }
            | Refusal::NoMig,
        ) => true,
        None => plan.error.is_some(),
    }
}

fn wrong(errors: &ConfigErrors, out: &Output) -> Outcome {
    let error = ApiError::from(errors);
    let status = error.code.exit_status();
    if out.json {
        out.document(&Wrong { error, problems: errors.located() })?;
        return Ok(status);
    }
    // Print this text instead of the API's error: it shows each problem with its line and a caret.
    let mut text = errors.to_string();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    out.remark(&format!("{text}\n"));
    let mut short = error;
    short.causes.clear();
    short.hint = None;
    Err(short.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: `clear 0,1` cleared the override of GPU 0, and then failed because GPU 1 had none.
    #[test]
    fn gpu_without_an_override_is_refused_before_any_is_cleared() {
        let overrides = ["GPU-0".to_owned(), "GPU-2".to_owned()];
        let clear = |selected: &[&[&str]]| {
            let of = |uuids: &&[&str]| uuids.iter().map(|uuid| (*uuid).to_owned()).collect();
            clearable(selected.iter().map(of).collect(), &overrides)
        };
        assert_eq!(clear(&[&["GPU-0"], &["GPU-1"]]), ["GPU-1", "GPU-0"]);
        assert_eq!(clear(&[&["GPU-0", "GPU-1", "GPU-2"]]), ["GPU-0", "GPU-2"], "a range");
        assert_eq!(clear(&[&["GPU-0"], &["GPU-0", "GPU-1"]]), ["GPU-0"], "no repetition");
        assert_eq!(clear(&[&["GPU-1", "GPU-3"]]), ["GPU-1", "GPU-3"]);
    }
}
