//! `gpushctl config check`: errors of a config file, and what the file does on the GPUs of this or of another host.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use gpush_api::{ApiError, Code, ConfigView, Driver, Gpu, GpuPlan, Mode, PlanRequest, Plans, Refusal, RuleView};
use gpush_client::Client;
use gpush_core::{
    config::{Config, ConfigErrors, Located, accounts_in, rule_lines},
    desired::{self, ConfigFinding, KnownHost, LintFinding},
};
use gpush_host::{config_accounts::notes_blocking, helper::Helpers};
use serde::Serialize;

use crate::{args::Global, exit::Outcome, offline, output::Output, render, socket};

/// The output of `gpushctl config check --json` for a valid file.
#[derive(Serialize)]
pub(super) struct Checked {
    /// The config in the form in which gpushd shows it.
    pub(super) config: ConfigView,
    /// Remarks that are not errors.
    #[serde(rename = "remarks")]
    pub(super) findings: Vec<String>,
    /// Those of the remarks that are mistakes with a number.
    pub(super) lints: Vec<LintFinding>,
    /// The plans for the GPUs of the host. `None` if no GPUs are known, or if no rule claims a GPU for MIG.
    #[serde(flatten)]
    pub(super) plans: Option<Plans>,
}

/// The output of `gpushctl config check --json` for an invalid file.
#[derive(Serialize)]
pub(super) struct Wrong {
    pub(super) error: ApiError,
    pub(super) problems: Vec<Located>,
}

/// How long `config check` waits for gpushd. Without an answer, it reads the default file, and checks no GPU.
const ANSWER: Duration = Duration::from_secs(2);

/// Returns the config file of the gpushd that runs. Returns `None` if no gpushd answers, or if it uses no file.
fn path_of_agent(global: &Global) -> Option<PathBuf> {
    let runtime = super::runtime().ok()?;
    let mut client = Client::new(socket::chosen(global)).deadline(ANSWER).without_waiting_for_start();
    runtime.block_on(client.config()).ok()?.path.map(PathBuf::from)
}

/// Runs `gpushctl config check`.
pub(super) fn run(global: &Global, file: Option<PathBuf>, offline: Option<&str>, out: &Output) -> Outcome {
    let named = file.or_else(offline::environment).or_else(|| path_of_agent(global));
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
    if file == Path::new("-") && offline == Some("-") {
        let error = ApiError::new(Code::BadRequest, "the config and the host can't both be read from stdin");
        return Err(error.hint("save one of them in a file").into());
    }
    let bytes = offline::read(&file)?;
    let name = offline::name(&file);
    let config = match Config::from_bytes(&bytes, &name) {
        Ok(config) => config,
        Err(errors) => return wrong(&errors, out),
    };
    // A config for another host names accounts of that host.
    let mut findings = if offline.is_none() { accounts(&name, &bytes) } else { Vec::new() };
    findings.extend(programs(&config));
    findings.extend(config.slurm_rules_with_dynamic_layout().map(|rule| {
        format!("{rule}: gpushd refuses every Slurm job on these GPUs, because owner = \"slurm\" needs a static layout")
    }));
    let mut driver = None;
    let gpus = match offline {
        Some(host) => Some(offline::host(host)?),
        None if !selects_gpus(&config) => None,
        None => match host_of_agent(global) {
            Ok((gpus, of_agent)) => {
                driver = of_agent;
                Some(gpus)
            }
            Err(error) => {
                let why = if error.code == Code::Unreachable { "no gpushd answers" } else { &error.message };
                findings.push(format!(
                    "not checked: selectors and layouts, because {why}; for another host, add --offline"
                ));
                None
            }
        },
    };
    let known = gpus.as_deref().unwrap_or_default();
    let view = config.view(Some(&name), known);
    let host = gpus.as_deref().map(|gpus| KnownHost { gpus, driver: driver.as_ref() });
    let mut of_config = desired::findings(&config, host);
    if offline.is_none() && config.rules.iter().any(|rule| rule.mode.is_managed()) {
        of_config.extend(other_managers());
    }
    findings.extend(of_config.iter().map(|finding| match finding {
        ConfigFinding::Lint(lint) => format!("{lint}; `gpushctl explain {}` says why", lint.lint),
        ConfigFinding::Remark(text) => text.clone(),
    }));
    let lints = of_config.into_iter().filter_map(|finding| match finding {
        ConfigFinding::Lint(lint) => Some(lint),
        ConfigFinding::Remark(_) => None,
    });
    let lints: Vec<LintFinding> = lints.collect();
    let has_layouts = view.rules.iter().any(|rule| rule.mode == Mode::Mig && !rule.claims.is_empty());
    let plans = match (&gpus, offline) {
        (None, _) => None,
        (Some(_), Some(_)) if view.rules.iter().all(|rule| rule.claims.is_empty()) => {
            findings.push("no rule claims a GPU".to_owned());
            None
        }
        // No rule claims a GPU for MIG, so there is nothing to plan.
        (Some(_), _) if !has_layouts => None,
        (Some(gpus), Some(host)) => {
            let planned = desired::plan_host(&config, gpus, &PlanRequest::default());
            let mut plans = planned.map_err(|error| offline::about(host, error))?;
            offline::about_all(host, &mut plans);
            Some(plans)
        }
        (Some(gpus), None) => Some(possible(&config, gpus)?),
    };
    let plans = plans.map(|plans| with_lines(plans, &view, &name, &bytes));
    let checked = Checked { config: view, findings, lints, plans };
    out.show(&checked, |look| {
        render::config::checked(&checked.config, &checked.findings, checked.plans.as_ref(), known, look)
    })?;
    let impossible = checked.plans.iter().flat_map(|p| &p.plans).find(|p| never(p));
    Ok(impossible.map_or(0, |p| p.error.as_ref().map_or(Code::LayoutImpossible, |e| e.code).exit_status()))
}

/// Returns a finding for each program of this host that manages the GPUs as gpushd does.
fn other_managers() -> impl Iterator<Item = ConfigFinding> {
    let found = gpush_doctor::other_managers(&gpush_doctor::Host::local()).into_iter();
    found.filter_map(|finding| {
        Some(ConfigFinding::Lint(LintFinding {
            lint: finding.lint?,
            message: finding.message,
            hint: finding.hint.unwrap_or_default(),
        }))
    })
}

/// Returns whether a config has selectors of GPUs.
fn selects_gpus(config: &Config) -> bool {
    !config.rules.is_empty() || config.quotas.iter().any(|quota| quota.gpus.is_some())
}

/// Returns the GPUs of the host, with their profiles, and its driver, from the gpushd that runs.
fn host_of_agent(global: &Global) -> Result<(Vec<Gpu>, Option<Driver>), ApiError> {
    let runtime = super::runtime()?;
    let mut client = Client::new(socket::chosen(global)).deadline(ANSWER).without_waiting_for_start();
    Ok(runtime
        .block_on(async { Ok::<_, gpush_client::Error>((client.gpus(true).await?, client.version().await?.driver)) })?)
}

/// Plans the layouts of the config on the GPUs of the host as if nothing used them. So a plan is refused only if its
/// layout is impossible.
fn possible(config: &Config, gpus: &[Gpu]) -> Result<Plans, ApiError> {
    let gpus: Vec<Gpu> = gpus.iter().map(desired::as_if_idle).collect();
    let mut plans = desired::plan_host(config, &gpus, &PlanRequest::default())?;
    for plan in plans.plans.iter_mut().filter(|plan| !never(plan)) {
        (plan.refusal, plan.error) = (None, None);
    }
    Ok(plans)
}

/// Adds the rule and its line in the file to the error of each layout that a GPU can never have.
fn with_lines(mut plans: Plans, view: &ConfigView, file: &str, bytes: &[u8]) -> Plans {
    let lines = std::str::from_utf8(bytes).map(rule_lines).unwrap_or_default();
    for plan in plans.plans.iter_mut().filter(|plan| never(plan)) {
        let claims = |rule: &RuleView| rule.claims.contains(&plan.gpu);
        let rule = view.rules.iter().position(claims).and_then(|at| Some((view.rules.get(at)?, lines.get(at)?)));
        if let (Some(error), Some((rule, line))) = (&mut plan.error, rule) {
            error.causes.insert(0, format!("{file}:{line}: {} sets this layout", rule.name));
        }
    }
    plans
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
    let notify = &config.notify.command;
    let hooks =
        [("mode_change.before", &change.before), ("mode_change.after", &change.after), ("notify.command", notify)];
    let named = hooks.into_iter().filter_map(|(key, program)| Some((key, program.as_ref()?)));
    let wrong = |(key, program): (&str, &String)| {
        let what = match std::fs::metadata(program) {
            Err(error) => format!("{program} can't be run here: {error}"),
            Ok(of) if !of.is_file() || of.permissions().mode() & 0o111 == 0 => {
                format!("{program} is not an executable file")
            }
            Ok(_) => {
                let error = Helpers::may_run(program).err()?;
                error.hint.map_or(error.message.clone(), |hint| format!("{}; {hint}", error.message))
            }
        };
        Some(format!("{key}: {what}"))
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
    use gpush_api::GpuState;
    use gpush_core::preset;

    use super::*;

    /// A user of the GPU blocks the change now, but does not make the layout impossible.
    #[test]
    fn layout_of_a_gpu_in_use_is_possible() {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(1);
        gpus[0].processes_known = false;
        gpus[0].state = GpuState::Unknown;
        let refused = |layout: &str| {
            let text = format!("[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = [\"{layout}\"]\n");
            let plans = possible(&Config::parse(&text, "config.toml").unwrap(), &gpus).unwrap();
            plans.plans.iter().any(never)
        };
        assert!(!refused("1g.10gb*7"));
        assert!(refused("4g.40gb*2"));
    }
}
