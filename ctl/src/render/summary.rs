//! `gpushctl status --summary`: totals per model and profile, for hosts with many GPUs.

use gpush_api::{DeviceUse, Gpu, GpuState, Mode, MpsState};

use super::{
    Appearance,
    appearance::{NOTE, paint, product},
    status::{Status, gpu_numbers, header},
    table::{Align, Narrow, fitted},
};

/// Totals of the GPUs of one model, or of the MIG devices of one profile on this model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Totals {
    model: String,
    what: String,
    total: usize,
    in_use: usize,
    granted: usize,
    free: usize,
    /// How many more instances gpushd could create now.
    possible: Option<usize>,
}

/// Draws the summary.
pub(crate) fn summary(status: &Status, look: &Appearance) -> String {
    let mut out = header(status, look).join("\n") + "\n\n";
    let totals = totals(status);
    let columns = [
        ("MODEL", Align::Left),
        ("DEVICE", Align::Left),
        ("TOTAL", Align::Right),
        ("IN USE", Align::Right),
        ("GRANTED", Align::Right),
        ("FREE", Align::Right),
        ("ROOM", Align::Right),
    ];
    let row = |one: &Totals| {
        vec![
            look.clean(&one.model),
            look.clean(&one.what),
            one.total.to_string(),
            one.in_use.to_string(),
            one.granted.to_string(),
            one.free.to_string(),
            one.possible.map_or_else(|| "-".to_owned(), |possible| possible.to_string()),
        ]
    };
    out += &fitted(&columns, totals.iter().map(row).collect(), Narrow::default(), 0, look);
    let those = |test: &dyn Fn(&Gpu) -> bool| -> Vec<u32> {
        status.gpus.iter().filter(|gpu| test(gpu)).map(|gpu| gpu.index).collect()
    };
    for (which, what) in [
        (those(&|gpu| !matches!(gpu.state, GpuState::Ready)), "not ready: see `gpushctl status`"),
        (those(&|gpu| gpu.overridden.is_some()), "overridden: see `gpushctl config overrides`"),
        (those(&|gpu| !gpu.drift.is_empty()), "with drift: see `gpushctl apply --dry-run`"),
    ] {
        if !which.is_empty() {
            let lines = look.wrap("", &format!("{} {what}", gpu_numbers(&which)));
            out += &lines.iter().map(|line| paint(NOTE, line) + "\n").collect::<String>();
        }
    }
    out
}

fn totals(status: &Status) -> Vec<Totals> {
    let mut all: Vec<Totals> = Vec::new();
    for gpu in &status.gpus {
        let model = product(&gpu.name).to_owned();
        let is_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        let what = match gpu.mode {
            _ if is_mig => "GPU, MIG on",
            Mode::Mps => "GPU, mps",
            Mode::Timeslice => "GPU, timeslice",
            Mode::Mig => "GPU, MIG off",
            Mode::Exclusive => "GPU, exclusive",
            Mode::NoRule | Mode::Unmanaged => "GPU",
        };
        let whole = entry(&mut all, &model, what);
        whole.total += 1;
        let instances = gpu.mig.iter().filter(|_| is_mig).flat_map(|mig| &mig.instances);
        let inner = |one: &gpush_api::GpuInstance| {
            !one.processes.is_empty() || one.compute.iter().any(|compute| !compute.processes.is_empty())
        };
        let used = !gpu.processes.is_empty() || instances.clone().any(inner);
        let mut members =
            status.leases.iter().filter(|lease| lease.state.holds_capacity()).flat_map(|one| &one.members);
        let granted = members.any(|member| member.gpu == gpu.uuid);
        let takes_work = gpu.state == GpuState::Ready && gpu.cordons.is_empty();
        // gpushd creates no instances on a GPU that accepts no new work, or whose rule has another mode than `mig`.
        let takes_instances = takes_work && matches!(gpu.mode, Mode::Mig | Mode::NoRule);
        whole.in_use += usize::from(used);
        whole.granted += usize::from(granted && !used);
        let has_room = match gpu.mode {
            Mode::Mps | Mode::Timeslice => takes_shares(gpu, status),
            Mode::Mig | Mode::Exclusive | Mode::NoRule | Mode::Unmanaged => !used && !granted,
        };
        whole.free += usize::from(has_room && !is_mig && takes_work);
        let profiles = gpu.mig.iter().filter(|_| is_mig).flat_map(|mig| mig.profiles.iter());
        for profile in profiles {
            let present = instances.clone().any(|one| one.profile == profile.name);
            let remaining = profile.remaining.filter(|_| takes_instances).unwrap_or(0);
            if present || remaining > 0 {
                let row = entry(&mut all, &model, &profile.name);
                row.possible = Some(row.possible.unwrap_or(0) + usize::from(remaining));
            }
        }
        for device in status.devices.iter().filter(|device| device.gpu_uuid == gpu.uuid) {
            let row = entry(&mut all, &model, &device.profile);
            row.total += 1;
            match device.usage {
                DeviceUse::Free => row.free += 1,
                DeviceUse::Granted => row.granted += 1,
                DeviceUse::InUse => row.in_use += 1,
                DeviceUse::Reserved => {}
            }
        }
    }
    all.sort_by(|a, b| {
        (&a.model, !a.what.starts_with("GPU"), &a.what).cmp(&(&b.model, !b.what.starts_with("GPU"), &b.what))
    });
    all
}

/// Returns whether a GPU that is shared through MPS or time-slicing has room for another lease.
fn takes_shares(gpu: &Gpu, status: &Status) -> bool {
    match gpu.mode {
        Mode::Mps => status.mps.iter().any(|daemon| {
            daemon.uuid == gpu.uuid
                && daemon.state == MpsState::Ready
                && daemon.granted_percent < daemon.wanted.shares_percent
        }),
        Mode::Timeslice => {
            let holding = status.leases.iter().filter(|lease| lease.state.holds_capacity());
            let taken = holding.flat_map(|lease| &lease.members).filter(|member| member.gpu == gpu.uuid).count();
            gpu.timeslice.as_ref().is_some_and(|view| taken < view.replicas as usize)
        }
        Mode::Mig | Mode::Exclusive | Mode::NoRule | Mode::Unmanaged => false,
    }
}

fn entry<'a>(all: &'a mut Vec<Totals>, model: &str, what: &str) -> &'a mut Totals {
    let at = all.iter().position(|one| one.model == model && one.what == what).unwrap_or_else(|| {
        all.push(Totals { model: model.to_owned(), what: what.to_owned(), ..Totals::default() });
        all.len() - 1
    });
    &mut all[at]
}

#[cfg(test)]
mod tests {
    use gpush_api::MpsDaemon;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn many_gpus_fit_a_page() {
        let mut gpus = Vec::new();
        for index in (0..64).step_by(8) {
            gpus.extend(fixtures::mixed().into_iter().map(|gpu| Gpu {
                index: gpu.index + index,
                uuid: format!("{}-{index}", gpu.uuid),
                ..gpu
            }));
        }
        for width in [60, 80, 120] {
            let text = fixtures::plain(&summary(
                &fixtures::status(gpus.clone(), false),
                &fixtures::look(width, Charset::Ascii),
            ));
            assert!(text.lines().count() <= 40, "{text}");
            insta::assert_snapshot!(format!("summary-{width}"), text);
        }
    }

    /// Fault: a shared GPU with one lease was not free, although most of it could be leased.
    #[test]
    fn shared_gpu_with_room_for_a_lease_is_free() {
        let gpu = Gpu { mode: Mode::Mps, ..fixtures::gpu(0, "A100", 40_960, None) };
        let mut status = fixtures::status(vec![gpu.clone()], false);
        let daemon = fixtures::mps::daemon(0);
        let shares = daemon.wanted.shares_percent;
        let mut free = |granted_percent, state| {
            status.mps = vec![MpsDaemon { uuid: gpu.uuid.clone(), granted_percent, state, ..daemon.clone() }];
            totals(&status)[0].free
        };
        assert_eq!(free(shares - 1, MpsState::Ready), 1);
        assert_eq!(free(shares, MpsState::Ready), 0);
        assert_eq!(free(0, MpsState::GivenUp), 0);
    }

    #[test]
    fn only_gpus_that_take_instances_count_as_possible() {
        let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().swap_remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(true, true);
        for profile in std::sync::Arc::make_mut(&mut mig.profiles) {
            profile.remaining = Some(1);
        }
        let possible = |state, mode| {
            let one = Gpu { state, mode, ..gpu.clone() };
            let all = totals(&fixtures::status(vec![one], false));
            all.iter().filter_map(|one| one.possible).sum::<usize>()
        };
        assert!(possible(GpuState::Ready, Mode::Mig) > 0);
        assert!(possible(GpuState::Ready, Mode::NoRule) > 0, "any layout can be applied without a rule");
        assert_eq!(possible(GpuState::Ready, Mode::Unmanaged), 0);
        assert_eq!(possible(GpuState::Ready, Mode::Exclusive), 0);
        for state in [GpuState::Lost, GpuState::Maintenance, GpuState::Cordoned, GpuState::Held, GpuState::Unknown] {
            assert_eq!(possible(state, Mode::Mig), 0, "{state:?}");
        }
    }

    #[test]
    fn totals_count_each_device_once() {
        let all = totals(&fixtures::status(fixtures::mixed(), false));
        let gpus: usize = all.iter().filter(|one| one.what.starts_with("GPU")).map(|one| one.total).sum();
        assert_eq!(gpus, fixtures::mixed().len());
        assert!(all.iter().all(|one| one.in_use + one.granted + one.free <= one.total), "{all:?}");
    }
}
