//! `gpushctl mig`.
//!
//! | file | subject |
//! |---|---|
//! | `layout` | `apply`, `apply --dry-run`, `apply --check`: the requested layout and what it changes |
//! | `edit` | `add`, `remove`, `on`, `off`: changes of the current layout |
//! | `numbers` | numbers instead of a layout, such as the profile ids of nvidia-smi |
//! | `room` | why `mig add` has no room |
//! | `super::parted` | `export`, `import`: files of mig-parted |

mod edit;
pub(super) mod layout;
mod numbers;
mod room;

use gpush_api::{ApiError, Code, DeviceUse, Gpu, GpuState, Lease, MigDevice, MpsDaemon};
use gpush_client::Client;
use gpush_core::{layout::DYNAMIC, nearest::nearest};

use crate::{
    args::{Global, Gpus, Lasting, LayoutChange, Mig},
    exit::Outcome,
    offline,
    output::Output,
    render::{devices as drawing, profiles},
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
        Mig::Apply { wanted, check: true, offline, .. } => layout::run_check(global, &wanted, &offline, out),
        Mig::Apply { wanted, offline, change, .. } if change.execution.dry_run => {
            layout::run_plan(global, &wanted, &offline, out)
        }
        Mig::Apply { wanted, change, .. } => {
            super::ask_after_start(global, out, async |client| layout::apply(client, &wanted, &change, out).await)
        }
        Mig::Add { entries, which, change } => super::ask_after_start(global, out, async |client| {
            edit::add(client, &which.gpus, &entries, &change, out).await
        }),
        Mig::Remove { entries, which, change } => super::ask_after_start(global, out, async |client| {
            let layouts = edit::removed(client, &which.gpus, &entries).await?;
            super::apply::layouts(client, layouts, &change, out).await
        }),
        Mig::On { which, change } => super::ask_after_start(global, out, async |client| {
            edit::enable(client, &which.selectors(), &change, out).await
        }),
        Mig::Off { which, execution, why } => {
            // Disabling MIG mode does not create an override.
            let lasting = Lasting { once: false, reason: why.reason, expires: None };
            let change = LayoutChange { execution, lasting };
            super::ask_after_start(global, out, async |client| {
                edit::disable(client, &which.selectors(), &change, out).await
            })
        }
    }
}

fn show_profiles(gpus: &[gpush_api::Gpu], out: &Output) -> Outcome {
    if gpus.is_empty() && out.is_drawn() {
        return Err(super::no_gpu().into());
    }
    out.list(&gpus, |look| profiles::profiles(gpus, look))?;
    Ok(0)
}

/// Returns the MIG devices of these GPUs. If gpushd cannot list the devices, derives their use from the other
/// responses, and ignores the queue.
pub(super) async fn devices(
    client: &mut Client,
    gpus: &[Gpu],
    mps: &[MpsDaemon],
    leases: &[Lease],
    out: &Output,
) -> Vec<MigDevice> {
    if !gpus.iter().any(|gpu| gpu.mig.as_ref().is_some_and(|mig| !mig.instances.is_empty())) {
        return Vec::new();
    }
    match client.mig_devices().await {
        Ok(mut devices) => {
            devices.retain(|device| gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid));
            devices
        }
        Err(error) => {
            let first = "the status ignores the queue: ";
            out.remark(&(out.look.wrap(first, &error.error.message).join("\n") + "\n"));
            gpush_core::devices::list(gpus, mps, leases)
        }
    }
}

async fn list(client: &mut Client, which: &Gpus, free: bool, profile: Option<&str>, out: &Output) -> Outcome {
    let gpus = client.gpus(profile.is_some()).await?;
    let gpus = super::select_of(client, gpus, &which.selectors()).await?;
    if gpus.is_empty() && out.is_drawn() {
        return Err(super::no_gpu().into());
    }
    if let Some(error) = profile.and_then(|profile| unknown_profile(profile, &gpus)) {
        return Err(error.into());
    }
    let mut found: Vec<MigDevice> = client.mig_devices().await?;
    let shared = if free { client.mps().await? } else { Vec::new() };
    found.retain(|device| {
        gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid)
            && profile.is_none_or(|profile| device.profile.eq_ignore_ascii_case(profile))
    });
    // The caller may not be allowed to lease a device that is free.
    let is_shared = |device: &MigDevice| shared.iter().any(|daemon| device.uuid.as_ref() == Some(&daemon.uuid));
    let for_others = found.iter().filter(|device| device.usage == DeviceUse::Free && !is_shared(device)).count();
    if free {
        let is_free = |device: &MigDevice, gpu: &Gpu| drawing::is_free(device, gpu, &shared);
        found.retain(|device| gpus.iter().any(|gpu| gpu.uuid == device.gpu_uuid && is_free(device, gpu)));
    }
    let none = found.is_empty();
    if none && free && out.is_drawn() {
        let of = profile.map_or_else(String::new, |profile| format!(" of profile {profile}"));
        return Err(none_is_free(&of, for_others).hint(hint_if_none_is_free(profile, &gpus, for_others)).into());
    }
    out.list(&found, |look| {
        let list = drawing::list(&found, &gpus, look);
        match profile {
            Some(profile) => list.or_empty(&format!("No MIG device of profile {profile}.")),
            None => list,
        }
    })?;
    Ok(if none && free { Code::Blocked.exit_status() } else { 0 })
}

/// Returns the error if the caller can use no MIG device now. `for_others` is the number of devices that are free, but not
/// for the caller.
fn none_is_free(of: &str, for_others: usize) -> ApiError {
    match for_others {
        0 => ApiError::new(Code::Blocked, format!("no MIG device{of} is free")),
        number => ApiError::new(Code::Blocked, format!("you cannot lease a MIG device{of} now"))
            .cause(format!("MIG devices{of} that are free, but not for you: {number}")),
    }
}

/// Returns the next command if no MIG device is free. On a GPU with a dynamic layout, a lease can create one.
fn hint_if_none_is_free(profile: Option<&str>, gpus: &[Gpu], for_others: usize) -> String {
    if for_others > 0 {
        return "see your limits with `gpushctl quota`, and the requests that wait with `gpushctl lease list`"
            .to_owned();
    }
    let has_room = |gpu: &&Gpu, name: &str| {
        let profiles = gpu.mig.iter().flat_map(|mig| mig.profiles.iter());
        gpu.state == GpuState::Ready
            && gpu.layout.as_deref() == Some(&[DYNAMIC.to_owned()])
            && profiles.into_iter().any(|one| one.name.eq_ignore_ascii_case(name) && one.remaining > Some(0))
    };
    let room = profile.and_then(|name| Some((name, gpus.iter().find(|gpu| has_room(gpu, name))?.index)));
    match room {
        Some((name, index)) => {
            format!("GPU {index} has a dynamic layout: `gpushctl run --mig {name} -- COMMAND` creates a device there")
        }
        None => "run `gpushctl mig list` to see who uses the MIG devices".to_owned(),
    }
}

/// Returns the error for a profile that none of the GPUs has. Returns `None` if a GPU has the profile, or if the
/// profiles of the GPUs are not known.
fn unknown_profile(profile: &str, gpus: &[Gpu]) -> Option<ApiError> {
    let profiles = gpus.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| mig.profiles.iter());
    let names = profiles.flat_map(|one| {
        std::iter::once(one.name.as_str()).chain(one.compute.iter().map(|compute| compute.name.as_str()))
    });
    // An instance may have a profile that is not in the list of profiles.
    let instances = gpus.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| &mig.instances);
    let present = instances.flat_map(|one| {
        std::iter::once(one.profile.as_str()).chain(one.compute.iter().map(|compute| compute.profile.as_str()))
    });
    let mut names: Vec<&str> = names.chain(present).collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() || names.iter().any(|name| name.eq_ignore_ascii_case(profile)) {
        return None;
    }
    let error = ApiError::new(Code::NotFound, format!("no GPU has the MIG profile `{profile}`"));
    Some(match nearest(profile, names.iter().copied()) {
        Some(meant) => error.hint(format!("did you mean `{meant}`? 'gpushctl mig profiles' lists the profiles")),
        None => error.hint("list the profiles with 'gpushctl mig profiles'"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_that_no_gpu_has_is_an_error() {
        let gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        for known in ["1g.10gb", "1G.10GB", "1c.3g.40gb"] {
            assert_eq!(unknown_profile(known, &gpus), None, "{known}");
        }
        let error = unknown_profile("1g.11gb", &gpus).unwrap();
        assert_eq!(error.code.exit_status(), 2);
        assert!(error.hint.unwrap().starts_with("did you mean `1g."));
        assert!(unknown_profile("bogus", &gpus).unwrap().hint.unwrap().contains("mig profiles"));
        assert_eq!(unknown_profile("1g.10gb", &[]), None, "no profiles are known");
    }

    /// Fault: a user at the limit of leases was shown that no device is free, while `mig list` showed free ones.
    #[test]
    fn devices_that_are_free_for_others_are_named() {
        let error = none_is_free(" of profile 1g.10gb", 3);
        assert_eq!(error.message, "you cannot lease a MIG device of profile 1g.10gb now");
        assert_eq!(error.causes, ["MIG devices of profile 1g.10gb that are free, but not for you: 3"]);
        assert!(hint_if_none_is_free(None, &[], 3).contains("`gpushctl quota`"));
        assert_eq!(none_is_free("", 0).message, "no MIG device is free");
    }

    /// Earlier fault: the hint did not say that a lease creates a device on a GPU with a dynamic layout.
    #[test]
    fn hint_names_a_gpu_with_a_dynamic_layout_and_room() {
        let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        let mig = gpus[2].mig.as_mut().unwrap();
        let profiles = std::sync::Arc::make_mut(&mut mig.profiles);
        profiles.iter_mut().for_each(|one| one.remaining = Some(u8::from(one.name == "1g.10gb")));
        let hint = |gpus: &[Gpu], profile| hint_if_none_is_free(profile, gpus, 0);
        let other = "run `gpushctl mig list` to see who uses the MIG devices";
        assert_eq!(hint(&gpus, Some("1g.10gb")), other, "no layout is dynamic");
        gpus[2].layout = Some(vec![DYNAMIC.to_owned()]);
        assert_eq!(
            hint(&gpus, Some("1G.10gb")),
            "GPU 2 has a dynamic layout: `gpushctl run --mig 1G.10gb -- COMMAND` creates a device there"
        );
        assert_eq!(hint(&gpus, Some("7g.80gb")), other, "no room");
        assert_eq!(hint(&gpus, None), other);
        gpus[2].state = GpuState::Cordoned;
        assert_eq!(hint(&gpus, Some("1g.10gb")), other, "the GPU grants no leases");
    }
}
