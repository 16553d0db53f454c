//! `gpushctl apply`, and code that all commands for layouts share: show the plan, ask the user, apply, wait.

mod undo;

use gpush_api::{
    ApiError, ApplyRequest, Code, ConfigDiff, Gpu, GpuIndex, GpuLayout, GpuPlan, GpuState, LayoutSource, Maintenance,
    PlanRequest, Plans, ReloadRequest,
};
use gpush_client::Client;

use super::config::reload_changed_config;
use crate::{
    args::{ApplyArgs, Execution, LayoutChange, Waiting},
    exit::{Failure, Outcome},
    output::Output,
    render::{names::gpu_numbers, overrides, plan, trouble},
};

/// Runs `gpushctl apply`: loads the config file if it has changed, then brings each GPU to its desired state, whatever
/// its mode.
pub(super) async fn desired(client: &mut Client, args: &ApplyArgs, out: &Output) -> Outcome {
    if args.undo {
        return undo::run(client, args, out).await;
    }
    let config = load_config(client, &args.execution, out).await?;
    let status = apply_loaded(client, args, config == ConfigLoad::Changed, out);
    match config {
        ConfigLoad::Declined => Ok(1),
        ConfigLoad::Same | ConfigLoad::Changed => status.await,
        // The GPUs have the state that the loaded config requires, but the file requires something else.
        ConfigLoad::NotLoaded(not_loaded) => status.await.map(|status| if status == 0 { not_loaded } else { status }),
    }
}

/// Brings each GPU to its desired state. `config_changed` says whether another config has been loaded for this.
async fn apply_loaded(client: &mut Client, args: &ApplyArgs, config_changed: bool, out: &Output) -> Outcome {
    let all = client.gpus(false).await?;
    let selectors = args.which.selectors();
    let gpus =
        if means_all(&selectors) { managed(all, out)? } else { super::select_of(client, all, &selectors).await? };
    if gpus.is_empty() {
        if let Some(maintenance) = client.health().await?.maintenance {
            return Err(in_maintenance(&maintenance).into());
        }
        out.remark("Every GPU has its desired state.\n");
        return out.change(config_changed, &Plans { plans: Vec::new() }, |_| String::new()).map(|()| 0);
    }
    let gpus: Vec<String> = gpus.into_iter().map(|gpu| gpu.uuid.to_string()).collect();
    if args.execution.dry_run {
        return dry_run(client, &PlanRequest { gpus, layout: LayoutSource::Wanted }, out).await;
    }
    let request = ApplyRequest {
        gpus,
        layout: LayoutSource::Wanted,
        reason: args.why.reason.clone(),
        wait_s: args.execution.queueing.seconds,
        once: false,
        expires_at: None,
    };
    run(client, request, args.execution.yes, &args.execution.waiting, out).await
}

/// What `gpushctl apply` did to the loaded config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConfigLoad {
    /// The loaded config stays.
    Same,
    /// The config file was loaded, and something in it is different.
    Changed,
    /// The file cannot be loaded. The command applies the loaded config, and then exits with this status.
    NotLoaded(u8),
    /// The user did not want to load the file. The command ends.
    Declined,
}

/// Loads the config file if it has changed. On a terminal, first shows the difference and asks the user to confirm it,
/// unless `--yes` is given.
///
/// If gpushd cannot load the file, the loaded config is applied, so that drift can be repaired meanwhile. A program
/// (`--json`) gets the error instead. A dry run does not load the file.
async fn load_config(client: &mut Client, execution: &Execution, out: &Output) -> Result<ConfigLoad, Failure> {
    if !client.health().await?.config_file_changed {
        return Ok(ConfigLoad::Same);
    }
    if execution.dry_run {
        let differs = "the config file has changed since gpushd loaded it, and this plan is for the loaded config; \
            `gpushctl config diff` shows the difference";
        out.remark(&(out.look.wrap("! ", differs).join("\n") + "\n"));
        return Ok(ConfigLoad::Same);
    }
    let diff = match client.config_diff().await {
        Ok(diff) => diff,
        // Only administrators may load the config. If there is something to apply, the apply is refused too.
        Err(error) if error.code() == Code::Denied => return Ok(ConfigLoad::Same),
        Err(error) => return Err(error.into()),
    };
    if let Some(why) = not_loadable(&diff) {
        return not_loaded(why, out);
    }
    if !execution.yes && out.can_ask() {
        out.text(&overrides::diff(&diff, &out.look))?;
        if !out.confirmed("The config file has changed. Load it?")? {
            out.remark("Nothing was changed.\n");
            return Ok(ConfigLoad::Declined);
        }
    }
    match client.reload(&ReloadRequest::default()).await {
        Ok(reloaded) => {
            out.remark(&overrides::loaded(&reloaded, &out.look));
            Ok(if reload_changed_config(&reloaded) { ConfigLoad::Changed } else { ConfigLoad::Same })
        }
        Err(error) => not_loaded(*error.error, out),
    }
}

/// Returns why `apply` does not load a file: it has errors, or it has no rule for any GPU, although the loaded config has.
/// The file may be missing, or another program may be writing it.
fn not_loadable(diff: &ConfigDiff) -> Option<ApiError> {
    if let Some(trouble) = &diff.trouble {
        return Some(trouble.clone());
    }
    let had_rules = diff.gpus.iter().any(|one| one.in_force.mode.is_managed());
    let has_rules = diff.gpus.iter().any(|one| one.in_file.as_ref().is_some_and(|file| file.mode.is_managed()));
    (had_rules && !has_rules).then(|| {
        ApiError::new(Code::Conflict, "the config file has no rule for a GPU of this host any more")
            .hint("to load it anyway: `gpushctl config reload` (administrator)")
    })
}

/// Says that the loaded config is applied, because the file was not loaded. For a program, returns the reason as an error.
fn not_loaded(why: ApiError, out: &Output) -> Result<ConfigLoad, Failure> {
    if out.json {
        return Err(why.into());
    }
    let text = "the config file has changed, but was not loaded. This command applies the loaded config";
    let mut lines = out.look.wrap("! ", text);
    lines.extend(trouble::lines("cause", &why, 2, &out.look));
    out.remark(&(lines.join("\n") + "\n"));
    Ok(ConfigLoad::NotLoaded(why.code.exit_status()))
}

/// Returns whether the command is for all GPUs that gpushd manages. The selector `all` means the same as no selector.
fn means_all(selectors: &[String]) -> bool {
    selectors.iter().all(|selector| selector.eq_ignore_ascii_case("all"))
}

/// Returns the error for a host in maintenance: the last readings do not show how the GPUs are now.
fn in_maintenance(maintenance: &Maintenance) -> ApiError {
    let reason = maintenance.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
    ApiError::new(Code::Conflict, format!("the host is in maintenance{reason}"))
        .cause("gpushd has no driver handle open, so it cannot read the GPUs or change them")
        .hint("when the work on the host is done, end maintenance with `gpushctl maintenance leave` (administrator)")
}

/// Returns the GPUs that have a rule and differ from their desired state, also if a lease delays the change. Leaves out cordoned GPUs, because
/// `gpushctl apply` changes them only if the user names them.
fn managed(all: Vec<Gpu>, out: &Output) -> Result<Vec<Gpu>, ApiError> {
    if all.is_empty() {
        return Err(super::no_gpu());
    }
    if all.iter().all(|gpu| !gpu.mode.is_managed()) {
        let error = ApiError::new(Code::NotFound, "nothing to apply: no rule of the config claims a GPU");
        return Err(error.hint("see the rules with 'gpushctl config show'"));
    }
    let differing =
        all.into_iter().filter(|gpu| gpu.mode.is_managed() && (!gpu.drift.is_empty() || !gpu.pending.is_empty()));
    let (cordoned, gpus): (Vec<Gpu>, Vec<Gpu>) = differing.partition(|gpu| gpu.state == GpuState::Cordoned);
    if !cordoned.is_empty() {
        let indexes: Vec<GpuIndex> = cordoned.iter().map(|gpu| gpu.index).collect();
        let arguments = indexes.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",");
        let (are, them) = if indexes.len() == 1 { ("is", "it") } else { ("are", "them") };
        let which = gpu_numbers(&indexes);
        out.remark(&format!(
            "{which} {are} cordoned and left out; `gpushctl apply {arguments}` \
            includes {them}\n"
        ));
    }
    Ok(gpus)
}

/// Creates a request in which GPUs and layout are still missing.
pub(super) fn request(change: &LayoutChange) -> ApplyRequest {
    ApplyRequest {
        gpus: Vec::new(),
        layout: LayoutSource::Wanted,
        reason: change.lasting.reason.clone(),
        wait_s: change.execution.queueing.seconds,
        once: change.lasting.once,
        expires_at: change.lasting.expires,
    }
}

/// Applies a separate layout to each of these GPUs.
pub(super) async fn layouts(
    client: &mut Client,
    layouts: Vec<GpuLayout>,
    change: &LayoutChange,
    out: &Output,
) -> Outcome {
    let layout = LayoutSource::PerGpu(layouts);
    if change.execution.dry_run {
        return dry_run(client, &PlanRequest { gpus: Vec::new(), layout }, out).await;
    }
    run(client, ApplyRequest { layout, ..request(change) }, change.execution.yes, &change.execution.waiting, out).await
}

async fn dry_run(client: &mut Client, request: &PlanRequest, out: &Output) -> Outcome {
    let plans = client.plan(request).await?;
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await? };
    show_plan(&plans, &gpus, out)
}

/// Applies a change and waits for its end. On a terminal, first asks the user to confirm a plan that destroys
/// instances, unless `confirmed` is set.
pub(super) async fn run(
    client: &mut Client,
    request: ApplyRequest,
    confirmed: bool,
    waiting: &Waiting,
    out: &Output,
) -> Outcome {
    // Read the GPUs now, so that the output can later show which instances are new.
    let before = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    if !confirmed && out.can_ask() && !confirm(client, &request, &before, out).await? {
        out.remark("No GPU was changed.\n");
        return Ok(1);
    }
    let one = client.apply(&request).await?;
    if one.plans.is_empty() && !out.json {
        let error = ApiError::new(Code::NotFound, "nothing to apply: no rule of the config claims a GPU for MIG");
        return Err(error.hint("see the rules with 'gpushctl config show'").into());
    }
    // Request plans to show what the operation waits for. A plan names the processes that this user may see; the
    // operation does not.
    let waits = request.wait_s.map(|_| PlanRequest { gpus: request.gpus, layout: request.layout });
    super::operation::watch(client, one, &before, waits, waiting, out).await
}

/// If the plan destroys instances, shows the plan and asks the user whether to continue. If the plan is refused, does
/// not ask: the apply reports the refusal.
async fn confirm(client: &mut Client, request: &ApplyRequest, gpus: &[Gpu], out: &Output) -> Result<bool, Failure> {
    let request = PlanRequest { gpus: request.gpus.clone(), layout: request.layout.clone() };
    let plans = client.plan(&request).await?;
    let destroyed: usize = plans.plans.iter().map(|one| plan::Tally::of(one).destroys).sum();
    if destroyed == 0 || refusals(&plans).next().is_some() {
        return Ok(true);
    }
    out.text(&plan::plans(&plans, gpus, &out.look))?;
    let what = if destroyed == 1 { "1 instance".to_owned() } else { format!("{destroyed} instances") };
    out.confirmed(&format!("This destroys {what}. Continue?"))
}

/// Shows plans. Returns the exit status that an apply of these plans would have: if one plan is refused, the apply is
/// refused for all GPUs.
pub(super) fn show_plan(plans: &Plans, gpus: &[Gpu], out: &Output) -> Outcome {
    out.show(plans, |look| plan::plans(plans, gpus, look))?;
    let lasting = |(_, plan): &(Code, &GpuPlan)| !plan.error.as_ref().is_some_and(|error| error.retryable);
    let code = refusals(plans).find(lasting).or_else(|| refusals(plans).next());
    Ok(code.map_or(0, |(code, _)| code.exit_status()))
}

/// Returns the refused plans, each with the code of its error.
pub(super) fn refusals(plans: &Plans) -> impl Iterator<Item = (Code, &GpuPlan)> {
    plans.plans.iter().filter(|p| p.refusal.is_some() || p.error.is_some()).map(|plan| {
        let code = plan.error.as_ref().map_or(Code::LayoutImpossible, |e| e.code);
        (code, plan)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selector_all_means_the_same_as_no_selector() {
        let means = |selectors: &[&str]| means_all(&selectors.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>());
        assert!(means(&[]) && means(&["all"]));
        assert!(!means(&["0"]) && !means(&["all", "6"]));
    }
}
