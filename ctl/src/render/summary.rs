//! `gpushctl status --summary`: totals per model and profile, for hosts with many GPUs.

use gpush_api::{DeviceUse, Gpu, GpuIndex, GpuState, MigDevice, Mode};

use super::{
    Appearance,
    appearance::{NOTE, paint, product},
    devices,
    names::gpu_numbers,
    slices::{Use, admits_leases},
    status::{Status, header},
    table::{Align, Narrow, fitted},
};

/// Totals of the GPUs of one model, or of the MIG devices of one profile on this model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Totals {
    model: String,
    what: String,
    total: usize,
    /// `None` for GPUs with MIG on: programs and leases use only their MIG devices, which have rows of their own.
    uses: Option<Uses>,
    /// How many more instances gpushd could create now.
    possible: Option<usize>,
}

/// Numbers of GPUs or MIG devices by their use. A device that is in use or granted, and has room for another lease,
/// also counts as free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Uses {
    in_use: usize,
    granted: usize,
    free: usize,
}

impl Uses {
    fn add(&mut self, usage: Use, is_free: bool) {
        self.in_use += usize::from(usage == Use::Busy);
        self.granted += usize::from(usage == Use::Granted);
        self.free += usize::from(is_free);
    }
}

/// Explains why a device can count twice.
const SHARED: &str = "FREE includes shared devices that are in use or granted and have room for another lease.";

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
    let or_dash = |number: Option<usize>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let row = |one: &Totals| {
        vec![
            look.clean(&one.model),
            look.clean(&one.what),
            one.total.to_string(),
            or_dash(one.uses.map(|uses| uses.in_use)),
            or_dash(one.uses.map(|uses| uses.granted)),
            or_dash(one.uses.map(|uses| uses.free)),
            or_dash(one.possible),
        ]
    };
    out += &fitted(&columns, totals.iter().map(row).collect(), Narrow::default(), 0, look);
    if totals.iter().any(|one| one.uses.is_some_and(|uses| uses.in_use + uses.granted + uses.free > one.total)) {
        out += &(look.wrap("", SHARED).join("\n") + "\n");
    }
    let those = |test: &dyn Fn(&Gpu) -> bool| -> Vec<GpuIndex> {
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
        let takes_work = gpu.state == GpuState::Ready && gpu.cordons.is_empty();
        // gpushd creates no instances on a GPU that accepts no new work, or whose rule has another mode than `mig`.
        let takes_instances = takes_work && matches!(gpu.mode, Mode::Mig | Mode::NoRule);
        if !is_mig {
            let uses = whole.uses.get_or_insert_default();
            if gpu.state != GpuState::Lost {
                let usage = status.use_of(gpu);
                let is_shared = matches!(gpu.mode, Mode::Mps | Mode::Timeslice);
                let has_room = if is_shared { takes_work && takes_shares(gpu, status) } else { usage == Use::Idle };
                uses.add(usage, has_room);
            }
        }
        let profiles = gpu.mig.iter().filter(|_| is_mig).flat_map(|mig| mig.profiles.iter());
        for profile in profiles {
            let present = instances.clone().any(|one| one.profile == profile.name);
            let remaining = profile.remaining.filter(|_| takes_instances).unwrap_or(0);
            if present || remaining > 0 {
                let row = entry(&mut all, &model, &profile.name);
                row.possible = Some(row.possible.unwrap_or(0) + usize::from(remaining));
            }
        }
        for device in status.devices_of(gpu) {
            let row = entry(&mut all, &model, &device.profile);
            row.total += 1;
            let is_free = devices::is_free(device, gpu, &status.mps) || takes_clients(device, status);
            row.uses.get_or_insert_default().add(Use::of_device(Some(device)), is_free);
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
        Mode::Mps => has_room(gpu.uuid.as_str(), status),
        Mode::Timeslice => gpu.timeslice.as_ref().is_some_and(|view| gpu.leases.len() < view.replicas as usize),
        Mode::Mig | Mode::Exclusive | Mode::NoRule | Mode::Unmanaged => false,
    }
}

/// Returns whether an MPS target has room for another lease.
fn has_room(uuid: &str, status: &Status) -> bool {
    let mut daemons = status.mps.iter().filter(|daemon| daemon.uuid == uuid);
    daemons.any(|daemon| admits_leases(daemon) && daemon.granted_percent < daemon.wanted.total_percentage)
}

/// Returns whether a MIG device is shared through MPS, and has room for another lease.
fn takes_clients(device: &MigDevice, status: &Status) -> bool {
    device.usage != DeviceUse::Reserved && device.uuid.as_ref().is_some_and(|uuid| has_room(uuid.as_str(), status))
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
    use gpush_api::{MpsDaemon, MpsState};

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn many_gpus_fit_a_page() {
        let mut gpus = Vec::new();
        for index in (0..64).step_by(8) {
            gpus.extend(fixtures::mixed().into_iter().map(|gpu| Gpu {
                index: GpuIndex(gpu.index.0 + index),
                uuid: format!("{}-{index}", gpu.uuid).into(),
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
        let shares = daemon.wanted.total_percentage;
        let mut free = |granted_percent, state| {
            status.mps = vec![MpsDaemon { uuid: gpu.uuid.clone().into(), granted_percent, state, ..daemon.clone() }];
            totals(&status)[0].uses.unwrap().free
        };
        assert_eq!(free(shares - 1, MpsState::Ready), 1);
        assert_eq!(free(shares, MpsState::Ready), 0);
        assert_eq!(free(0, MpsState::GivenUp), 0);
    }

    /// Fault: a GPU without MIG mode counted as free, although its rule has mode `mig` and gpushd grants no
    /// lease on it.
    #[test]
    fn only_gpus_that_programs_can_use_as_a_whole_are_free() {
        let free = |mode, pending| {
            let mut gpu = Gpu { mode, ..fixtures::gpu(0, "A100", 40_960, Some(fixtures::mig(8, Vec::new()))) };
            gpu.mig.as_mut().unwrap().set_mode(false, pending);
            totals(&fixtures::status(vec![gpu], false))[0].uses.unwrap().free
        };
        assert_eq!([free(Mode::Mig, false), free(Mode::Mig, true)], [0, 0]);
        assert_eq!([free(Mode::Exclusive, false), free(Mode::Exclusive, true)], [1, 0]);
        assert_eq!(free(Mode::NoRule, false), 1);
    }

    /// Fault: the header counted only MIG devices, but the columns counted GPUs too.
    #[test]
    fn header_and_columns_count_the_same() {
        let mut gpus = fixtures::mixed();
        gpus.push(Gpu { processes: vec![fixtures::hidden()], mode: Mode::Exclusive, ..gpus[5].clone() });
        let status = fixtures::status(gpus, false);
        let in_use: usize = totals(&status).iter().filter_map(|one| one.uses).map(|uses| uses.in_use).sum();
        let header = fixtures::plain(&header(&status, &fixtures::look(120, Charset::Ascii)).join(" "));
        assert!(header.contains(&format!(", {in_use} in use")), "{in_use}: {header}");
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
        let counted = |one: &Totals| one.uses.map_or(0, |uses| uses.in_use + uses.granted + uses.free);
        assert!(all.iter().all(|one| counted(one) <= one.total), "{all:?}");
    }
}
