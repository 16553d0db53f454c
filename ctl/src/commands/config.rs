//! `gpushctl config show|reload|diff|overrides`.

use gpush_api::{Gpu, Override, Overrides, ReloadRequest, Reloaded};
use gpush_client::Client;

use super::{config_check, config_init};
use crate::{
    args::{self, Global, SomeGpus},
    exit::{DIFFERS, Failure, Outcome},
    output::{EndedOverrides, Output},
    render,
};

pub(super) fn run(global: &Global, command: args::Config, out: &Output) -> Outcome {
    match command {
        args::Config::Init(args) => config_init::run(global, &args, out),
        args::Config::Check { file, offline } => config_check::run(global, file, offline.as_deref(), out),
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
            out.change(reload_changed_config(&reloaded), &reloaded, |look| {
                render::overrides::reloaded(&reloaded, look)
            })?;
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

/// Returns whether a reload has changed something.
pub(super) fn reload_changed_config(reloaded: &Reloaded) -> bool {
    !(reloaded.settings.is_empty() && reloaded.gpus.is_empty() && reloaded.ended.is_empty())
}

/// Returns the overrides of the selected GPUs; all overrides if there are no selectors.
async fn overrides_of(client: &mut Client, selectors: &[String]) -> Result<Overrides, Failure> {
    let mut all = client.overrides().await?;
    // A GPU with an override may be missing in the driver's list. So request the list only for selectors that are not
    // the UUID of an override.
    let has_override = |selector: &&String| all.overrides.iter().any(|one| one.gpu_uuid == selector.as_str());
    let others: Vec<String> = selectors.iter().filter(|selector| !has_override(selector)).cloned().collect();
    let gpus = match others.as_slice() {
        [] => Vec::new(),
        others => {
            let gpus = client.gpus(false).await?;
            super::select_of(client, gpus, others).await?
        }
    };
    let is_selected = |one: &Override| {
        selectors.iter().any(|selector| one.gpu_uuid == selector.as_str())
            || gpus.iter().any(|gpu: &Gpu| gpu.uuid == one.gpu_uuid)
    };
    all.overrides.retain(|one| selectors.is_empty() || is_selected(one));
    Ok(all)
}

/// Runs `gpushctl config overrides clear`. If a selected GPU has no override, clears none.
fn clear(global: &Global, which: &SomeGpus, out: &Output) -> Outcome {
    super::with_agent(global, async |client| {
        let gpus = client.gpus(false).await;
        let overrides: Vec<String> =
            client.overrides().await?.overrides.into_iter().map(|one| one.gpu_uuid.to_string()).collect();
        let mut selected = Vec::new();
        for selector in which.selectors() {
            // If the driver no longer lists the GPU, its UUID is enough for gpushd to find the override.
            let named = match &gpus {
                Ok(gpus) => super::select(gpus.clone(), std::slice::from_ref(&selector)).unwrap_or_default(),
                Err(_) => Vec::new(),
            };
            selected.push(match named.as_slice() {
                [] => vec![selector],
                named => named.iter().map(|gpu| gpu.uuid.to_string()).collect(),
            });
        }
        let mut ended = Vec::new();
        for uuid in clearable(selected, &overrides) {
            ended.push(client.end_override(&uuid).await?);
        }
        let now = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
        let gpu_of = |ended: &gpush_api::OverrideEnded| now.iter().find(|gpu| gpu.uuid == ended.ended.gpu_uuid);
        out.change(true, &EndedOverrides { ended_overrides: &ended }, |look| {
            ended.iter().map(|one| render::overrides::ended(one, gpu_of(one), look)).collect()
        })?;
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
