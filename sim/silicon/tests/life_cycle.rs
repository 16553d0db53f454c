//! MIG mode, reset, reboot, processes and events over the lifetime of a GPU, for each architecture.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use silicon::description::GpuDescription;
use silicon::machine::{MIG_CONFIG_CHANGE, Pid, Placement, Process, ProcessKind, XID_CRITICAL_ERROR};
use silicon::{Description, Machine, Return};

/// Pid of the caller of all mode changes.
const CALLER: u32 = 100;

fn host(model: &str, mig: bool) -> Machine {
    let gpu = GpuDescription { mig: Some(mig), ..GpuDescription::new(model, 1) };
    Machine::new(&Description::of(vec![gpu])).unwrap()
}

fn process(pid: u32, kind: ProcessKind, at: Option<(u32, Option<u32>)>) -> Process {
    Process {
        pid: Pid { pid, start: 1 },
        kind,
        memory_mib: 100,
        gpu_instance: at.map(|(gi, _)| gi),
        compute_instance: at.and_then(|(_, ci)| ci),
    }
}

fn modes(machine: &Machine) -> (bool, bool) {
    (machine.gpus()[0].mig, machine.gpus()[0].mig_pending)
}

#[test]
fn ampere_waits_for_a_reset_and_survives_a_reboot() {
    let mut machine = host("a100-80", false);
    assert_eq!(machine.create_gpu_instance(0, 0, None), Err(Return::NotSupported));
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::ResetRequired));
    assert_eq!(modes(&machine), (false, true));
    assert_eq!(machine.create_gpu_instance(0, 0, None), Err(Return::NotSupported), "pending is not on");
    machine.reset(0, None).unwrap();
    assert_eq!(modes(&machine), (true, true));
    machine.create_gpu_instance(0, 0, None).unwrap();
    machine.reboot("second".to_owned());
    assert_eq!(modes(&machine), (true, true));
    assert!(machine.gpus()[0].instances.is_empty(), "instances do not survive a reboot");
    // A pending change can be reverted until a reset or a reboot activates it.
    assert_eq!(machine.set_mig_mode(0, false, CALLER), Ok(Return::ResetRequired));
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::Success));
    assert_eq!(modes(&machine), (true, true));
    assert_eq!(machine.set_mig_mode(0, false, CALLER), Ok(Return::ResetRequired));
    machine.reboot("third".to_owned());
    assert_eq!(modes(&machine), (false, false));
}

#[test]
fn mig_uuid_contains_the_uuid_of_the_gpu_before_r470() {
    let uuid_under = |driver: &str| {
        let gpu = GpuDescription { mig: Some(true), ..GpuDescription::new("a100-40", 1) };
        let described = Description { driver: Some(driver.parse().unwrap()), ..Description::of(vec![gpu]) };
        let mut machine = Machine::new(&described).unwrap();
        let instance = machine.create_gpu_instance(0, 9, None).unwrap();
        machine.create_compute_instance(instance, 2, None).unwrap();
        let uuid = machine.mig_devices(0).unwrap()[0].uuid.clone();
        let found = machine.mig_device_by_uuid(&uuid).unwrap();
        assert_eq!((found.gpu_instance, found.id), (instance.id, 0), "{uuid}");
        (uuid, format!("MIG-{}/{}/0", machine.identity(0).unwrap().uuid, instance.id))
    };
    let (old, expected) = uuid_under("460.32.03");
    assert_eq!(old, expected);
    let (new, other) = uuid_under("470.57.02");
    assert!(new != other && new.len() == "MIG-".len() + 36, "{new}");
}

#[test]
fn ampere_reports_blockers_by_activation_status() {
    let mut machine = host("a30-24", false);
    machine.open(Pid { pid: CALLER, start: 1 });
    machine.open(Pid { pid: 7, start: 1 });
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::InUse), "another client has the driver open");
    assert_eq!(machine.reset(0, Some(CALLER)), Err(Return::InUse));
    machine.close(Pid { pid: 7, start: 1 });
    machine.attach(0, process(8, ProcessKind::Compute, None)).unwrap();
    assert_eq!(machine.set_mig_mode(0, false, CALLER), Ok(Return::Success), "taking it back needs no reset");
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::InUse));
    assert_eq!(machine.reset(0, Some(CALLER)), Err(Return::InUse));
    assert_eq!(machine.detach(8, None), 1);
    assert_eq!(machine.reset(0, None), Err(Return::InUse), "the caller itself is a client");
    machine.reset(0, Some(CALLER)).unwrap();
    assert_eq!(modes(&machine), (true, true));
}

#[test]
fn idle_ampere_can_be_reset_by_the_driver() {
    let gpu = GpuDescription { mig: Some(false), resets_itself: true, ..GpuDescription::new("a100-40", 1) };
    let mut machine = Machine::new(&Description::of(vec![gpu])).unwrap();
    machine.attach(0, process(8, ProcessKind::Handle, None)).unwrap();
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::InUse));
    machine.detach(8, None);
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::Success));
    assert_eq!(modes(&machine), (true, true));
}

#[test]
fn hopper_mode_is_immediate_and_lost_at_reboot() {
    for model in ["h100-80-sxm", "b200-180"] {
        let mut machine = host(model, false);
        machine.attach(0, process(8, ProcessKind::Compute, None)).unwrap();
        assert_eq!(machine.set_mig_mode(0, true, CALLER), Ok(Return::Success));
        assert_eq!(modes(&machine), (true, true));
        assert_eq!(machine.create_gpu_instance(0, 0, None), Err(Return::InUse), "{model}");
        machine.detach(8, None);
        let made = machine.create_gpu_instance(0, 0, None).unwrap();
        assert_eq!(machine.set_mig_mode(0, false, CALLER), Err(Return::InUse), "instances are left");
        machine.destroy_gpu_instance(made).unwrap();
        machine.reset(0, None).unwrap();
        assert_eq!(modes(&machine), (true, true), "a reset keeps the mode");
        machine.reboot("second".to_owned());
        assert_eq!(modes(&machine), (false, false), "a reboot does not");
    }
}

#[test]
fn boot_script_can_enable_mig_on_hopper() {
    let gpu = GpuDescription { mig_at_boot: true, ..GpuDescription::new("h200-141", 2) };
    let mut machine = Machine::new(&Description::of(vec![gpu])).unwrap();
    machine.reboot("second".to_owned());
    assert!(machine.gpus().iter().all(|gpu| gpu.mig));
}

#[test]
fn gpu_without_mig_returns_not_supported() {
    let mut machine = Machine::of_model("l4").unwrap();
    assert_eq!(machine.set_mig_mode(0, true, CALLER), Err(Return::NotSupported));
    assert_eq!(machine.create_gpu_instance(0, 0, None), Err(Return::NotSupported));
    assert_eq!(machine.max_mig_devices(0), Ok(0));
    machine.reboot("second".to_owned());
    assert_eq!(modes(&machine), (false, false));
}

#[test]
fn errors_are_those_of_the_driver() {
    let mut machine = Machine::of_model("a100-80").unwrap();
    let part = machine.part(0).unwrap();
    assert_eq!(part.profile_by_index(5).err(), Some(Return::NotSupported), "8 slices: no such part");
    assert_eq!(part.profile_by_index(17).err(), Some(Return::NotSupported));
    assert_eq!(part.profile_by_index(18).err(), Some(Return::InvalidArgument));
    assert_eq!(machine.create_gpu_instance(1, 19, None), Err(Return::InvalidArgument), "no such GPU");
    assert_eq!(machine.create_gpu_instance(0, 47, None), Err(Return::NotSupported), "a profile of other parts");
    assert_eq!(machine.create_gpu_instance(0, 999, None), Err(Return::InvalidArgument));
    let at = |start, size| Some(Placement { start, size });
    assert_eq!(machine.create_gpu_instance(0, 14, at(1, 2)), Err(Return::InvalidArgument), "no placement of a 2g");
    let gi = machine.create_gpu_instance(0, 14, at(2, 2)).unwrap();
    assert_eq!(machine.create_gpu_instance(0, 14, at(2, 2)), Err(Return::InsufficientResources), "occupied");
    assert_eq!(machine.gpu_instance_handle(0, 9), Err(Return::NotFound));
    assert_eq!(machine.mig_device_by_index(0, 0), Err(Return::NotFound), "a GPU instance alone is no device");
    assert_eq!(machine.mig_device_by_index(0, 7), Err(Return::InvalidArgument));
    assert_eq!(machine.create_compute_instance(gi, 2, None), Err(Return::NotSupported), "3c in a 2g");
    assert_eq!(machine.create_compute_instance(gi, 99, None), Err(Return::InvalidArgument));
    let ci = machine.create_compute_instance(gi, 1, None).unwrap();
    assert_eq!(machine.create_compute_instance(gi, 0, None), Err(Return::InsufficientResources));
    assert_eq!(machine.destroy_gpu_instance(gi), Err(Return::InUse), "it has a compute instance");
    machine.destroy_compute_instance(ci).unwrap();
    assert_eq!(machine.destroy_compute_instance(ci), Err(Return::InvalidArgument));
    machine.destroy_gpu_instance(gi).unwrap();
    machine.lose(0).unwrap();
    assert_eq!(machine.create_gpu_instance(0, 14, None), Err(Return::GpuIsLost));
    assert_eq!(machine.reset(0, None), Err(Return::GpuIsLost), "lost is sticky");
    machine.reboot("second".to_owned());
    machine.create_gpu_instance(0, 14, None).unwrap();
}

#[test]
fn objects_in_use_are_not_destroyed() {
    let mut machine = Machine::of_model("h100-80-sxm").unwrap();
    let gi = machine.create_gpu_instance(0, 9, None).unwrap();
    let ci = machine.create_compute_instance(gi, 2, None).unwrap();
    assert_eq!(machine.attach(0, process(8, ProcessKind::Compute, None)), Err(Return::InvalidArgument));
    let mut tried = 0;
    for kind in ProcessKind::ALL {
        machine.attach(0, process(8, kind, Some((gi.id, Some(ci.id))))).unwrap();
        assert_eq!(machine.destroy_compute_instance(ci), Err(Return::InUse), "{kind:?}");
        let listed = machine.gpus()[0].listed(kind).count();
        assert_eq!(listed, usize::from(kind != ProcessKind::Handle), "the driver lists no bare handles");
        assert_eq!(machine.detach(8, Some(0)), 1);
        tried += 1;
    }
    machine.destroy_compute_instance(ci).unwrap();
    machine.attach(0, process(9, ProcessKind::Handle, Some((gi.id, None)))).unwrap();
    assert_eq!(machine.destroy_gpu_instance(gi), Err(Return::InUse), "a leaked handle of the GPU instance");
    assert!(machine.reap(|pid| pid.pid != 9), "pid 9 died");
    machine.destroy_gpu_instance(gi).unwrap();
    println!("{tried} kinds of processes hold an instance");
}

#[test]
fn memory_counts_in_its_instance() {
    let mut machine = Machine::of_model("a100-80").unwrap();
    let gi = machine.create_gpu_instance(0, 19, None).unwrap();
    machine.create_compute_instance(gi, 0, None).unwrap();
    let with = |memory_mib| Process { memory_mib, ..process(8, ProcessKind::Compute, Some((gi.id, Some(0)))) };
    assert_eq!(machine.attach(0, with(9729)), Err(Return::InsufficientResources));
    machine.attach(0, with(5000)).unwrap();
    machine.attach(0, with(6000)).unwrap();
    assert_eq!(machine.gpu_instance_memory(0, gi.id).unwrap().used_mib, 6000, "the second replaces the first");
    assert_eq!(machine.memory(0).unwrap().used_mib, 6000);
    assert_eq!(machine.memory(0).unwrap().total_mib, 81920);
}

#[test]
fn listeners_have_separate_cursors() {
    let mut machine = Machine::of_model("a100-80").unwrap();
    machine.xid(0, 13, None, None).unwrap();
    let late = machine.events().cursor();
    let gi = machine.create_gpu_instance(0, 19, None).unwrap();
    machine.xid(0, 31, Some(gi.id), None).unwrap();
    assert_eq!(machine.xid(0, 31, Some(14), None), Err(Return::NotFound));
    let collect = |mut cursor: u64, bits: u64| {
        let mut found = Vec::new();
        while let Some(event) = machine.events().next(cursor, |event| event.kind & bits != 0) {
            cursor = event.sequence;
            found.push((event.kind, event.data, event.gpu_instance));
        }
        found
    };
    let both = XID_CRITICAL_ERROR | MIG_CONFIG_CHANGE;
    assert_eq!(collect(0, XID_CRITICAL_ERROR), [(8, 13, None), (8, 31, Some(gi.id))]);
    assert_eq!(collect(late, both), [(0x100, 0, Some(gi.id)), (8, 31, Some(gi.id))]);
    assert_eq!(collect(machine.events().cursor(), both), []);
    // Even if no process reads the queue, the queue does not grow without limit.
    for n in 0..1000 {
        machine.xid(0, n, None, None).unwrap();
    }
    assert_eq!(machine.events().iter().count(), 256);
    assert_eq!(machine.events().iter().last().unwrap().data, 999);
}

#[test]
fn same_slot_gives_the_same_uuid() {
    let mut machine = Machine::of_model("a100-80").unwrap();
    let uuid = |machine: &mut Machine| {
        let gi = machine.create_gpu_instance(0, 9, None).unwrap();
        let ci = machine.create_compute_instance(gi, 2, None).unwrap();
        let uuid = machine.mig_uuid(ci).unwrap();
        machine.destroy_compute_instance(ci).unwrap();
        machine.destroy_gpu_instance(gi).unwrap();
        uuid
    };
    let first = uuid(&mut machine);
    assert!(first.starts_with("MIG-"));
    assert_eq!(uuid(&mut machine), first);
    machine.reboot("second".to_owned());
    assert_eq!(uuid(&mut machine), first);
    let other = Machine::new(&Description { seed: 1, ..Description::of(vec![GpuDescription::new("a100-80", 1)]) });
    assert_ne!(uuid(&mut other.unwrap()), first, "another host has other GPUs");
}

#[test]
fn device_index_is_dense_and_ordered_by_ids() {
    let mut machine = Machine::of_model("a100-80").unwrap();
    let gis: Vec<_> = (0..3).map(|_| machine.create_gpu_instance(0, 14, None).unwrap()).collect();
    for gi in &gis {
        machine.create_compute_instance(*gi, 0, None).unwrap();
        machine.create_compute_instance(*gi, 0, None).unwrap();
    }
    let order = |machine: &Machine| -> Vec<(u32, u32, u32)> {
        let all = machine.mig_devices(0).unwrap();
        all.iter().map(|d| (d.index, d.gpu_instance, d.compute_instance)).collect()
    };
    assert_eq!(order(&machine), [(0, 3, 0), (1, 3, 1), (2, 4, 0), (3, 4, 1), (4, 5, 0), (5, 5, 1)]);
    let gone = machine.compute_instance_handle(machine.gpu_instance_handle(0, 3).unwrap(), 0).unwrap();
    machine.destroy_compute_instance(gone).unwrap();
    assert_eq!(order(&machine), [(0, 3, 1), (1, 4, 0), (2, 4, 1), (3, 5, 0), (4, 5, 1)], "it shifts");
    let gi3 = machine.gpu_instance_handle(0, 3).unwrap();
    assert_eq!(machine.create_compute_instance(gi3, 0, None).unwrap().id, 0, "the lowest free id");
}

#[test]
fn readings_depend_only_on_load_and_conditions() {
    let mut machine = Machine::of_model("h100-80-sxm").unwrap();
    let idle = machine.reading(0).unwrap();
    assert_eq!((idle.gpu_percent, idle.performance_state), (0, 8));
    let gi = machine.create_gpu_instance(0, 0, None).unwrap();
    machine.attach(0, process(8, ProcessKind::Compute, Some((gi.id, None)))).unwrap();
    machine.set_time(1_000_000);
    let busy = machine.reading(0).unwrap();
    assert!((60..=100).contains(&busy.gpu_percent) && busy.power_mw > idle.power_mw, "{busy:?}");
    assert!(busy.power_mw < 700_000 && busy.temperature_c < 87, "{busy:?}");
    machine.detach(8, None);
    assert_eq!(machine.reading(0).unwrap(), idle);
}
