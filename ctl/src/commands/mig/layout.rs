//! `gpushctl mig apply`, also with `--dry-run` and `--check`: finds out which layout the user wants, and what it would change.

use gpush_api::{ApiError, ApplyRequest, Code, Gpu, GpuIndex, LayoutSource, Mode, PlanRequest, Plans};
use gpush_client::Client;
use gpush_core::{config::Config, desired, layout, parted};

use crate::{
    args::{Global, LayoutChange, Offline, Wanted, foreign_layout},
    commands::{self, apply, config_check, parted as files},
    exit::{DIFFERS, Failure, Outcome},
    offline,
    output::Output,
    render::{assertion, names::gpu_numbers, plan},
};

/// The layout on a command line: a layout name, layout entries, or a label of a mig-parted file.
enum LayoutArgument {
    Layout(LayoutSource),
    /// A label of a mig-parted file. Which layout the label means depends on the GPU.
    Label(parted::File, parted::Label),
}

impl LayoutArgument {
    /// Parses the layout on the command line. If a mig-parted file is invalid, fails before gpushd gets a request.
    fn of(wanted: &Wanted) -> Result<Self, ApiError> {
        if let Some(file) = &wanted.file {
            let (file, label) = files::read(file, wanted.label.as_deref())?;
            return Ok(Self::Label(file, label));
        }
        let Some(text) = wanted.name.as_ref().or(wanted.layout.as_ref()) else {
            return Ok(Self::Layout(LayoutSource::Wanted));
        };
        if let Some(error) = foreign_layout::layout(text) {
            return Err(error);
        }
        Ok(Self::Layout(layout::source_of(text)))
    }

    /// Creates the request for these GPUs. Prints for which GPUs a label has no layout.
    fn request(self, wanted: &Wanted, gpus: &[Gpu], out: &Output) -> Result<PlanRequest, ApiError> {
        let only = wanted.which.gpus.clone();
        Ok(match self {
            Self::Layout(layout) => PlanRequest { gpus: only, layout },
            Self::Label(file, label) => {
                let resolved = parted::resolve(&file, &label, gpus, &only)?;
                for remark in &resolved.remarks {
                    out.remark(&format!("note: {}\n", out.look.clean(remark)));
                }
                PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(resolved.layouts) }
            }
        })
    }

    /// Creates the request for gpushd. Requests the GPUs from gpushd only for a label.
    async fn ask(self, wanted: &Wanted, client: &mut Client, out: &Output) -> Result<PlanRequest, Failure> {
        let gpus = match &self {
            Self::Layout(_) => Vec::new(),
            Self::Label(..) => client.gpus(false).await?,
        };
        Ok(self.request(wanted, &gpus, out)?)
    }
}

/// If only mig-parted knows the layout name, returns an error that explains this.
fn explain_name_error(request: &PlanRequest, error: gpush_client::Error) -> Failure {
    match &request.layout {
        LayoutSource::Named(name) if error.code() == Code::NotFound => {
            foreign_layout::parted_label(name).map_or_else(|| Failure::from(error), Failure::from)
        }
        LayoutSource::Config
        | LayoutSource::Wanted
        | LayoutSource::Named(_)
        | LayoutSource::Entries(_)
        | LayoutSource::PerGpu(_) => error.into(),
    }
}

/// Explains numbers instead of a layout, with the profiles of the GPUs. For other wrong layouts, returns `error`.
async fn explain_numbers(client: &mut Client, wanted: &Wanted, error: ApiError) -> ApiError {
    let Some(text) = wanted.name.as_ref().or(wanted.layout.as_ref()) else { return error };
    super::numbers::explain(client, "apply", std::slice::from_ref(text), &wanted.which.gpus).await.unwrap_or(error)
}

/// Runs `mig apply --dry-run`.
pub(super) fn run_plan(global: &Global, wanted: &Wanted, how: &Offline, out: &Output) -> Outcome {
    let typed = match LayoutArgument::of(wanted) {
        Err(error) if how.offline.is_none() => {
            return super::super::ask(global, async |client| Err(explain_numbers(client, wanted, error).await.into()));
        }
        typed => typed?,
    };
    if let Some(host) = &how.offline {
        let (plans, gpus) = offline_plans(typed, wanted, host, how, out)?;
        return apply::show_plan(&plans, &gpus, out);
    }
    super::super::ask(global, async |client| {
        let request = typed.ask(wanted, client, out).await?;
        let plans = client.plan(&request).await.map_err(|error| explain_name_error(&request, error))?;
        // The text shows the GPUs; the JSON does not need them.
        let gpus = if out.json { Vec::new() } else { client.gpus(false).await? };
        apply::show_plan(&plans, &gpus, out)
    })
}

fn offline_plans(
    typed: LayoutArgument,
    wanted: &Wanted,
    host: &str,
    how: &Offline,
    out: &Output,
) -> Result<(Plans, Vec<Gpu>), Failure> {
    let gpus = offline::host(host)?;
    let request = typed.request(wanted, &gpus, out).map_err(|error| offline::about(host, error))?;
    let plans = offline::plan(host, &gpus, how.config.as_deref(), &request)?;
    Ok((plans, gpus))
}

/// Runs `mig apply --check`. Without a layout, checks whether the GPUs of mode `mig` have their desired layouts.
pub(super) fn run_check(global: &Global, wanted: &Wanted, how: &Offline, out: &Output) -> Outcome {
    let typed = LayoutArgument::of(wanted)?;
    if let Some(host) = &how.offline {
        let gpus = offline::host(host)?;
        let mut request = typed.request(wanted, &gpus, out).map_err(|error| offline::about(host, error))?;
        if request.layout == LayoutSource::Wanted && !request.gpus.is_empty() {
            let described = offline::described(host, gpus.clone(), how.config.as_deref(), &request)?;
            let selected = commands::select(described, &request.gpus)?;
            request.gpus = with_desired_layout(selected, out);
            if request.gpus.is_empty() {
                return nothing_to_check(out);
            }
        }
        let plans = offline::plan(host, &gpus, how.config.as_deref(), &request)?;
        return checked(&plans, &gpus, out);
    }
    super::super::ask(global, async |client| {
        let mut request = typed.ask(wanted, client, out).await?;
        let of_all = request.layout == LayoutSource::Wanted && request.gpus.is_empty();
        if of_all {
            // Check the GPUs that `mig apply` would change, and also cordoned GPUs.
            let gpus = client.gpus(false).await?;
            if let Some(text) = not_checked(&gpus) {
                out.remark(&(out.look.wrap("note: ", &text).join("\n") + "\n"));
            }
            request.gpus =
                gpus.into_iter().filter(|gpu| gpu.mode == Mode::Mig).map(|gpu| gpu.uuid.to_string()).collect();
        } else if request.layout == LayoutSource::Wanted {
            let gpus = client.gpus(false).await?;
            let gpus = commands::select_of(client, gpus, &request.gpus).await?;
            request.gpus = with_desired_layout(gpus, out);
            if request.gpus.is_empty() {
                return nothing_to_check(out);
            }
        }
        let plans = match request.layout {
            LayoutSource::Config | LayoutSource::Wanted => client.plan(&request).await?,
            LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
                check(client, request).await?
            }
        };
        let gpus = if out.json { Vec::new() } else { client.gpus(false).await? };
        let status = checked(&plans, &gpus, out)?;
        if !of_all || status != 0 {
            return Ok(status);
        }
        // gpushd does not know the layout of a GPU that it cannot read.
        let unseen = client.config_diff().await?.unseen;
        let Some(error) = unseen.first() else { return Ok(0) };
        if !out.json {
            out.error(error);
        }
        Ok(error.code.exit_status())
    })
}

/// Returns the UUIDs of the GPUs that may have a desired layout. Prints which GPUs have no desired layout because they
/// are unmanaged.
fn with_desired_layout(gpus: Vec<Gpu>, out: &Output) -> Vec<String> {
    let (unmanaged, others): (Vec<Gpu>, Vec<Gpu>) = gpus.into_iter().partition(|gpu| gpu.mode == Mode::Unmanaged);
    if !unmanaged.is_empty() {
        let which = gpu_numbers(&unmanaged.iter().map(|gpu| gpu.index).collect::<Vec<_>>());
        out.remark(&format!("note: {which}: not checked, because a rule of the config sets the mode `unmanaged`\n"));
    }
    others.into_iter().map(|gpu| gpu.uuid.to_string()).collect()
}

/// Ends the check if no GPU has a desired layout to check.
fn nothing_to_check(out: &Output) -> Outcome {
    out.show(&Plans { plans: Vec::new() }, |_| String::new()).map(|()| 0)
}

/// Names the GPUs that differ from their rule but that `mig apply --check` does not check, because `mig apply` does not change
/// them either.
fn not_checked(gpus: &[Gpu]) -> Option<String> {
    let is_cut = |gpu: &&Gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
    let needs_whole = |gpu: &&Gpu| gpu.mode.needs_whole_gpu();
    let indexes: Vec<GpuIndex> = gpus.iter().filter(is_cut).filter(needs_whole).map(|gpu| gpu.index).collect();
    if indexes.is_empty() {
        return None;
    }
    let (is, its) = if indexes.len() == 1 { ("is", "its rule needs") } else { ("are", "their rules need") };
    let which = gpu_numbers(&indexes);
    let arguments = indexes.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",");
    Some(format!(
        "{which} {is} not checked: MIG is enabled, but {its} the whole GPU. `gpushctl apply {arguments} --dry-run` shows \
         what would change"
    ))
}

/// Plans a layout that the user has named. Ignores the modes of the GPUs' rules, because a check changes nothing.
async fn check(client: &mut Client, mut request: PlanRequest) -> Result<Plans, Failure> {
    let gpus = client.gpus(true).await?;
    if let LayoutSource::Named(name) = &request.layout {
        let config = client.config().await?;
        match config.layouts.into_iter().find(|layout| layout.name == *name) {
            Some(layout) => request.layout = LayoutSource::Entries(layout.entries),
            None if name == layout::NONE => request.layout = LayoutSource::Entries(vec![name.clone()]),
            // Return gpushd's error, because it lists the existing layouts.
            None => return client.plan(&request).await.map_err(|error| explain_name_error(&request, error)),
        }
    }
    if request.gpus.is_empty() && !matches!(request.layout, LayoutSource::PerGpu(_)) {
        request.gpus = gpus.iter().filter(|gpu| gpu.mode == Mode::Mig).map(|gpu| gpu.uuid.to_string()).collect();
        if request.gpus.is_empty() {
            return Ok(client.plan(&request).await?);
        }
    }
    Ok(desired::plan_host(&Config::default(), &gpus, &request)?)
}

/// Returns the exit status: 0 if every GPU has its layout, 3 if a GPU differs, or another status if a GPU's layout is
/// not known.
fn checked(plans: &Plans, gpus: &[Gpu], out: &Output) -> Outcome {
    out.show(plans, |look| {
        if !plans.plans.is_empty() && plans.plans.iter().all(plan::needs_no_change) {
            return String::new();
        }
        assertion::checked(plans, gpus, look)
    })?;
    // A layout that is impossible on the GPU is an error of the caller. A layout that is only blocked counts as a
    // difference.
    let wrong = apply::refusals(plans).find(|(_, plan)| config_check::never(plan));
    Ok(match wrong {
        Some((code, _)) => code.exit_status(),
        None if plans.plans.iter().all(plan::needs_no_change) => 0,
        None => DIFFERS,
    })
}

/// Runs `mig apply`.
pub(super) async fn apply(client: &mut Client, wanted: &Wanted, change: &LayoutChange, out: &Output) -> Outcome {
    let typed = match LayoutArgument::of(wanted) {
        Ok(typed) => typed,
        Err(error) => return Err(explain_numbers(client, wanted, error).await.into()),
    };
    let request = typed.ask(wanted, client, out).await?;
    if request.gpus.is_empty() && matches!(request.layout, LayoutSource::Named(_) | LayoutSource::Entries(_)) {
        let gpus = client.gpus(false).await?;
        if let Some(error) = names_no_gpu(&gpus) {
            return Err(error.into());
        }
    }
    let PlanRequest { gpus, layout } = request.clone();
    let named = layout != LayoutSource::Wanted;
    let order = ApplyRequest { gpus, layout, ..apply::request(change) };
    match apply::run(client, order, change.execution.yes || !named, &change.execution.waiting, out).await {
        Err(Failure::Error(error)) if error.code == Code::NotFound => {
            let label = match &request.layout {
                LayoutSource::Named(name) => foreign_layout::parted_label(name),
                LayoutSource::Config | LayoutSource::Wanted | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
                    None
                }
            };
            Err(label.unwrap_or(*error).into())
        }
        other => other,
    }
}

/// Refuses to apply a layout that the user has named to GPUs that the user has not named. Returns `None` if only one GPU
/// supports MIG, because then no other GPU can be meant.
fn names_no_gpu(gpus: &[Gpu]) -> Option<ApiError> {
    let with_mig: Vec<&Gpu> = gpus.iter().filter(|gpu| gpu.mig.is_some()).collect();
    let [first, _, ..] = with_mig.as_slice() else { return None };
    let ruled: Vec<String> =
        with_mig.iter().filter(|gpu| gpu.mode == Mode::Mig).map(|gpu| gpu.index.to_string()).collect();
    let all = match ruled.as_slice() {
        [] | [_] => String::new(),
        several => format!(", or `-g {}` for all GPUs whose rule has mode `mig`", several.join(",")),
    };
    let error = ApiError::new(Code::BadRequest, "the command names no GPU, but several GPUs support MIG");
    Some(error.hint(format!("name GPUs with -g, such as `-g {}`{all}", first.index)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    /// Fault: `mig apply halves` without `-g` changed all GPUs whose rule has mode `mig`, although `mig add` refuses.
    #[test]
    fn layout_without_gpus_is_refused_if_several_gpus_have_mig() {
        let mut gpus = fixtures::mixed();
        gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Exclusive);
        let error = names_no_gpu(&gpus).unwrap();
        assert_eq!(error.hint.as_deref(), Some("name GPUs with -g, such as `-g 0`"));
        gpus[0].mode = Mode::Mig;
        gpus[2].mode = Mode::Mig;
        let hint = names_no_gpu(&gpus).unwrap().hint.unwrap();
        assert!(hint.ends_with("or `-g 0,2` for all GPUs whose rule has mode `mig`"), "{hint}");
        gpus.iter_mut().skip(1).for_each(|gpu| gpu.mig = None);
        assert_eq!(names_no_gpu(&gpus), None);
    }

    #[test]
    fn check_of_all_layouts_names_the_gpus_that_it_leaves_out() {
        let mut gpus = fixtures::mixed();
        assert_eq!(not_checked(&gpus), None);
        gpus[2].mode = Mode::Exclusive;
        let text = not_checked(&gpus).unwrap();
        assert!(text.starts_with("GPU 2 is not checked: ") && text.contains("`gpushctl apply 2 --dry-run`"), "{text}");
        gpus[3].mode = Mode::Mps;
        assert!(not_checked(&gpus).unwrap().starts_with("GPUs 2-3 are not checked: "));
        gpus[5].mode = Mode::Timeslice;
        assert!(not_checked(&gpus).unwrap().starts_with("GPUs 2-3 are"), "MIG is not enabled on GPU 5");
    }
}
