//! `gpushctl mig profiles|show|plan|apply|assert`; `export` and `import` are in `parted`.

use gpush_api::{ApiError, ApplyRequest, Code, Gpu, GpuPlan, LayoutSource, Mode, PlanRequest, Plans};
use gpush_client::Client;
use gpush_core::{layout, parted, quote::Quoted};

use crate::{
    args::{Global, Lasting, Mig, Offline, Wanted, Watched},
    exit::{DIFFERS, Failure, Outcome},
    offline,
    output::Output,
    render::{plan, profiles, show},
};

pub(super) fn run(global: &Global, command: Mig, out: &Output) -> Outcome {
    match command {
        Mig::Profiles { which, offline: Some(host) } => {
            show_profiles(&super::select(offline::host(&host)?, &which)?, out)
        }
        Mig::Profiles { which, offline: None } => super::ask(global, async |client| {
            let gpus = client.gpus(true).await?;
            let gpus = super::select_of(client, gpus, &which).await?;
            show_profiles(&gpus, out)
        }),
        Mig::Show(which) => super::ask(global, async |client| {
            let gpus = client.gpus(false).await?;
            let gpus = super::select_of(client, gpus, &which).await?;
            if gpus.is_empty() && !out.json {
                return Err(super::no_gpu().into());
            }
            out.show(&gpus, |look| show::mig_devices(&gpus, look))?;
            Ok(0)
        }),
        Mig::Export { which, label, output } => super::parted::export(global, &which, &label, output.as_deref(), out),
        Mig::Import { file, label } => super::parted::import(&file, label.as_deref(), out),
        Mig::Plan { wanted, offline } => planned(global, &wanted, &offline, out, show_plan),
        Mig::Assert { wanted, offline } => asserted(global, &wanted, &offline, out),
        Mig::Apply { wanted, dry_run: true, .. } => {
            planned(global, &wanted, &Offline { offline: None, config: None }, out, show_plan)
        }
        Mig::Apply { wanted, dry_run: false, watched, wait, lasting } => {
            super::ask(global, async |client| apply(client, &wanted, lasting, wait, &watched, out).await)
        }
    }
}

fn show_profiles(gpus: &[gpush_api::Gpu], out: &Output) -> Outcome {
    if gpus.is_empty() && !out.json {
        return Err(super::no_gpu().into());
    }
    out.show(&gpus, |look| profiles::profiles(gpus, look))?;
    Ok(0)
}

/// What was typed: nothing is the config's layout, a name or entries are told apart by their form.
enum Typed {
    Layout(LayoutSource),
    /// What a label of a mig-parted file means depends on the GPUs.
    Label(parted::File, parted::Label),
}

impl Typed {
    /// A file is read here, before anybody is asked: a wrong one is told whatever the agent's state.
    fn of(wanted: &Wanted) -> Result<Self, ApiError> {
        if let Some(file) = &wanted.file {
            let (file, label) = super::parted::read(file, wanted.label.as_deref())?;
            return Ok(Self::Label(file, label));
        }
        if let Some(name) = wanted.name.as_ref().filter(|name| is_like_gpus(name)) {
            let message = format!("{} is no layout", Quoted(name));
            return Err(ApiError::new(Code::BadRequest, message).hint(format!("a GPU is named with --gpu {name}")));
        }
        Ok(Self::Layout(match wanted.name.as_ref().or(wanted.layout.as_ref()) {
            None => LayoutSource::Config,
            Some(text) => layout::source_of(text),
        }))
    }

    /// The request for a host with these GPUs. Says which GPUs a label leaves out.
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

    /// The request to an agent, which is asked for its GPUs only when they matter.
    async fn ask(self, wanted: &Wanted, client: &mut Client, out: &Output) -> Result<PlanRequest, Failure> {
        let gpus = match &self {
            Self::Layout(_) => Vec::new(),
            Self::Label(..) => client.gpus(false).await?,
        };
        Ok(self.request(wanted, &gpus, out)?)
    }
}

/// Whether a name is what GPUs are named by: `0`, `0-2,5`.
fn is_like_gpus(name: &str) -> bool {
    name.bytes().all(|b| b.is_ascii_digit() || b"-,".contains(&b))
}

/// Plans by the agent or offline, and hands the plans on with the GPUs that they are for.
fn planned(
    global: &Global,
    wanted: &Wanted,
    how: &Offline,
    out: &Output,
    tell: fn(&Plans, &[gpush_api::Gpu], &Output) -> Outcome,
) -> Outcome {
    ask_for(global, Typed::of(wanted)?, wanted, how, out, tell)
}

/// Without a layout the question is whether there is drift, and an override is none.
fn asserted(global: &Global, wanted: &Wanted, how: &Offline, out: &Output) -> Outcome {
    let typed = match Typed::of(wanted)? {
        Typed::Layout(LayoutSource::Config) => Typed::Layout(LayoutSource::Wanted),
        other => other,
    };
    ask_for(global, typed, wanted, how, out, assert)
}

fn ask_for(
    global: &Global,
    typed: Typed,
    wanted: &Wanted,
    how: &Offline,
    out: &Output,
    tell: fn(&Plans, &[gpush_api::Gpu], &Output) -> Outcome,
) -> Outcome {
    if let Some(host) = &how.offline {
        let gpus = offline::host(host)?;
        let request = typed.request(wanted, &gpus, out).map_err(|error| offline::about(host, error))?;
        let plans = offline::plan(host, &gpus, how.config.as_deref(), &request)?;
        return tell(&plans, &gpus, out);
    }
    super::ask(global, async |client| {
        let mut request = typed.ask(wanted, client, out).await?;
        let of_all = request.layout == LayoutSource::Wanted && request.gpus.is_empty();
        if of_all {
            // Whether all is as wanted concerns each GPU of which something is wanted, be it cordoned or uncut.
            let managed = |gpu: &Gpu| gpu.mode != Mode::Unmanaged;
            request.gpus = client.gpus(false).await?.into_iter().filter(managed).map(|gpu| gpu.uuid).collect();
        }
        let plans = client.plan(&request).await?;
        // Only for the drawing: the JSON is the plans alone.
        let gpus = if out.json { Vec::new() } else { client.gpus(false).await? };
        let status = tell(&plans, &gpus, out)?;
        if !of_all || status != 0 {
            return Ok(status);
        }
        // What nobody sees is not as wanted.
        let unseen = client.config_diff().await?.unseen;
        let Some(error) = unseen.first() else { return Ok(0) };
        if !out.json {
            out.error(error);
        }
        Ok(error.code.exit_status())
    })
}

fn show_plan(plans: &Plans, gpus: &[gpush_api::Gpu], out: &Output) -> Outcome {
    out.show(plans, |look| plan::plans(plans, gpus, look))?;
    // As an apply would end, which is refused for all of them at once.
    let lasting = |(_, plan): &(Code, &GpuPlan)| !plan.error.as_ref().is_some_and(|error| error.retryable);
    let code = refusals(plans).find(lasting).or_else(|| refusals(plans).next());
    Ok(code.map_or(0, |(code, _)| code.exit_status()))
}

/// Each refused plan with its code.
fn refusals(plans: &Plans) -> impl Iterator<Item = (Code, &GpuPlan)> {
    plans.plans.iter().filter(|p| p.refusal.is_some() || p.error.is_some()).map(|plan| {
        let code = plan.error.as_ref().map_or(Code::LayoutImpossible, |e| e.code);
        (code, plan)
    })
}

/// 0 when every GPU is as wanted, 3 when one differs, another status when the question has no answer.
fn assert(plans: &Plans, gpus: &[gpush_api::Gpu], out: &Output) -> Outcome {
    out.show(plans, |look| {
        if !plans.plans.is_empty() && plans.plans.iter().all(plan::as_wanted) {
            return String::new();
        }
        plan::plans(plans, gpus, look)
    })?;
    // A layout that can't be has no GPU that could be like it: that is the asker's error. One that
    // is only blocked, or waits for MIG mode, is a difference.
    let wrong = refusals(plans).find(|(_, plan)| super::config::never(plan));
    Ok(match wrong {
        Some((code, _)) => code.exit_status(),
        None if plans.plans.iter().all(plan::as_wanted) => 0,
        None => DIFFERS,
    })
}

async fn apply(
    client: &mut Client,
    wanted: &Wanted,
    lasting: Lasting,
    wait_s: Option<u64>,
    watched: &Watched,
    out: &Output,
) -> Outcome {
    let PlanRequest { gpus, layout } = Typed::of(wanted)?.ask(wanted, client, out).await?;
    let Lasting { once, reason, expires: expires_at } = lasting;
    let request = ApplyRequest { gpus, layout, reason, wait_s, once, expires_at };
    // Before, so that the result can tell new from kept. Not to have it is no reason not to apply.
    let before = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    let one = client.apply(&request).await?;
    if one.plans.is_empty() && !out.json {
        let error = ApiError::new(Code::NotFound, "no GPU is meant: the config claims none for MIG");
        return Err(error.hint("name one with --gpu and a layout; the rules: `gpushctl config show`").into());
    }
    super::operation::watch(client, one, &before, true, watched, out).await
}
