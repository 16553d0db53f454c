//! `gpushctl mig`.
//!
//! | file | subject |
//! |---|---|
//! | `layout` | `plan`, `apply`, `assert`: the requested layout and what it changes |
//! | `edit` | `add`, `remove`, `on`, `off`: changes of the current layout |
//! | `super::parted` | `export`, `import`: files of mig-parted |

mod edit;
pub(super) mod layout;

use gpush_api::{ApiError, Code, MigDevice};
use gpush_client::Client;

use crate::{
    args::{Global, Gpus, Mig, Offline},
    exit::Outcome,
    offline,
    output::Output,
    render::{devices, profiles},
};

pub(super) fn run(global: &Global, command: Mig, out: &Output) -> Outcome {
    match command {
        Mig::Profiles { which, offline: Some(host) } => {
            show_profiles(&super::select(offline::host(&host)?, &which.selectors())?, out)
        }
        Mig::Profiles { which, offline: None } => super::ask(global, async |client| {
            let gpus = client.gpus(true).await?;
            let gpus = super::select_of(client, gpus, &which.selectors()).await?;
            show_profiles(&gpus, out)
        }),
        Mig::List { which, free, profile } => {
            super::ask(global, async |client| list(client, &which, free, profile.as_deref(), out).await)
        }
        Mig::Export { which, label, file } => {
            super::parted::export(global, &which.selectors(), &label, file.as_deref(), out)
        }
        Mig::Import { file, label } => super::parted::import(&file, label.as_deref(), out),
        Mig::Plan { wanted, offline } => layout::run_plan(global, &wanted, &offline, out),
        Mig::Assert { wanted, offline } => layout::run_assert(global, &wanted, &offline, out),
        Mig::Apply { wanted, change } if change.execution.dry_run => {
            layout::run_plan(global, &wanted, &Offline::default(), out)
        }
        Mig::Apply { wanted, change } => {
            super::ask(global, async |client| layout::apply(client, &wanted, &change, out).await)
        }
        Mig::Add { entries, which, change } => super::ask(global, async |client| {
            let layouts = edit::added(client, &which.gpus, &entries).await?;
            super::apply::layouts(client, layouts, &change, out).await
        }),
        Mig::Remove { entries, which, change } => super::ask(global, async |client| {
            let layouts = edit::removed(client, &which.gpus, &entries).await?;
            super::apply::layouts(client, layouts, &change, out).await
        }),
        Mig::On { which, change } => super::ask(global, async |client| {
            let layouts = edit::switched(client, &which.selectors(), true).await?;
            super::apply::layouts(client, layouts, &change, out).await
        }),
        Mig::Off { which, change } => super::ask(global, async |client| {
            let layouts = edit::switched(client, &which.selectors(), false).await?;
            super::apply::layouts(client, layouts, &change, out).await
        }),
    }
}

fn show_profiles(gpus: &[gpush_api::Gpu], out: &Output) -> Outcome {
    if gpus.is_empty() && out.is_drawn() {
        return Err(super::no_gpu().into());
    }
    out.list(&gpus, |look| profiles::profiles(gpus, look))?;
    Ok(0)
}

async fn list(client: &mut Client, which: &Gpus, free: bool, profile: Option<&str>, out: &Output) -> Outcome {
    let gpus = client.gpus(false).await?;
    let gpus = super::select_of(client, gpus, &which.selectors()).await?;
    if gpus.is_empty() && out.is_drawn() {
        return Err(super::no_gpu().into());
    }
    let mut found: Vec<MigDevice> = client.mig_devices().await?;
    found.retain(|device| {
        gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid)
            && (!free || device.available)
            && profile.is_none_or(|profile| device.profile.eq_ignore_ascii_case(profile))
    });
    let none = found.is_empty();
    if none && free && out.is_drawn() {
        let of = profile.map_or_else(String::new, |profile| format!(" of profile {profile}"));
        let error = ApiError::new(Code::Blocked, format!("no MIG device{of} is free"));
        return Err(error.hint("see who uses them with 'gpushctl mig list'").into());
    }
    out.list(&found, |look| devices::list(&found, &gpus, look))?;
    Ok(if none && free { Code::Blocked.exit_status() } else { 0 })
}
