//! Compute mode and time-slice level: what sets them, and what resets them.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use silicon::description::GpuDescription;
use silicon::machine::{Pid, Process, ProcessKind, Timeslice};
use silicon::{Description, Machine, Return};

const EXCLUSIVE_PROCESS: u32 = 3;

fn host(model: &str, mig: bool) -> Machine {
    let gpu = GpuDescription { mig: Some(mig), ..GpuDescription::new(model, 1) };
    Machine::new(&Description::of(vec![gpu])).unwrap()
}

fn pid(pid: u32) -> Pid {
    Pid { pid, start: 1 }
}

fn on_gpu(number: u32, kind: ProcessKind) -> Process {
    Process { pid: pid(number), kind, memory_mib: 100, gpu_instance: None, compute_instance: None }
}

/// Sets the compute mode and the time-slice level. Panics if a call fails.
fn set(machine: &mut Machine) {
    machine.set_compute_mode(0, EXCLUSIVE_PROCESS).unwrap();
    machine.set_timeslice(0, Timeslice::Long).unwrap();
    assert_eq!(settings(machine), (EXCLUSIVE_PROCESS, Timeslice::Long));
}

fn settings(machine: &Machine) -> (u32, Timeslice) {
    (machine.gpus()[0].compute_mode, machine.gpus()[0].timeslice)
}

const FORGOTTEN: (u32, Timeslice) = (0, Timeslice::Default);

#[test]
fn compute_mode_can_change_on_a_gpu_in_use() {
    let mut machine = host("t4", false);
    machine.attach(0, on_gpu(8, ProcessKind::Compute)).unwrap();
    set(&mut machine);
    for mode in [0, 2, 3] {
        assert_eq!(machine.set_compute_mode(0, mode), Ok(()));
        assert_eq!(machine.gpus()[0].compute_mode, mode);
    }
    for mode in [1, 4, u32::MAX] {
        assert_eq!(machine.set_compute_mode(0, mode), Err(Return::InvalidArgument));
    }
    assert_eq!(settings(&machine), (3, Timeslice::Long));
    assert_eq!(machine.set_compute_mode(1, 0), Err(Return::InvalidArgument), "no such GPU");
    machine.lose(0).unwrap();
    assert_eq!(machine.set_compute_mode(0, 0), Err(Return::GpuIsLost));
    assert_eq!(machine.set_timeslice(0, Timeslice::Short), Err(Return::GpuIsLost));
}

#[test]
fn compute_mode_limits_new_contexts() {
    let mut machine = host("t4", false);
    machine.attach(0, on_gpu(8, ProcessKind::Compute)).unwrap();
    machine.set_compute_mode(0, EXCLUSIVE_PROCESS).unwrap();
    assert_eq!(machine.attach(0, on_gpu(9, ProcessKind::Compute)), Err(Return::InUse));
    assert_eq!(machine.attach(0, on_gpu(8, ProcessKind::Compute)), Ok(()), "the same process");
    for kind in [ProcessKind::Mps, ProcessKind::Graphics, ProcessKind::Handle] {
        assert_eq!(machine.attach(0, on_gpu(10, kind)), Ok(()), "{kind:?}");
    }
    machine.detach(8, None);
    assert_eq!(machine.attach(0, on_gpu(9, ProcessKind::Compute)), Ok(()), "clients of a server do not count");
    machine.set_compute_mode(0, 2).unwrap();
    for kind in [ProcessKind::Compute, ProcessKind::Mps] {
        assert_eq!(machine.attach(0, on_gpu(11, kind)), Err(Return::InUse), "PROHIBITED, {kind:?}");
    }
    assert_eq!(machine.attach(0, on_gpu(11, ProcessKind::Handle)), Ok(()));
}

#[test]
fn mig_disables_compute_mode_and_levels() {
    let mut machine = host("h100-80-sxm", false);
    set(&mut machine);
    machine.set_mig_mode(0, true, 100).unwrap();
    assert_eq!(settings(&machine), FORGOTTEN);
    for mode in 0..4 {
        assert_eq!(machine.set_compute_mode(0, mode), Err(Return::NotSupported));
    }
    assert_eq!(machine.timeslice(0), Err(Return::NotSupported));
    assert_eq!(machine.set_timeslice(0, Timeslice::Short), Err(Return::NotSupported));
    machine.set_mig_mode(0, false, 100).unwrap();
    set(&mut machine);
}

#[test]
fn reset_and_reboot_lose_both_settings() {
    let mut machine = host("a100-80", false);
    set(&mut machine);
    machine.reset(0, None).unwrap();
    assert_eq!(settings(&machine), FORGOTTEN);
    set(&mut machine);
    machine.reboot("second".to_owned());
    assert_eq!(settings(&machine), FORGOTTEN);
}

#[test]
fn persistence_mode_keeps_settings_after_last_client() {
    let mut machine = host("a100-80", false);
    machine.open(pid(1));
    set(&mut machine);
    machine.close(pid(1));
    assert_eq!(settings(&machine), (EXCLUSIVE_PROCESS, Timeslice::Long), "persistence mode is on");
    machine.set_persistence(0, false).unwrap();
    assert!(!machine.reap(|_| true));
    assert_eq!(settings(&machine), FORGOTTEN);

    let holders: [fn(&mut Machine); 3] = [
        |machine| machine.close(pid(1)),
        |machine| assert_eq!(machine.detach(8, None), 1),
        |machine| assert!(machine.reap(|_| false)),
    ];
    for (number, leave) in holders.into_iter().enumerate() {
        if number == 1 {
            machine.attach(0, on_gpu(8, ProcessKind::Mps)).unwrap();
        } else {
            machine.open(pid(1));
        }
        set(&mut machine);
        assert!(!machine.reap(|_| true));
        assert_eq!(settings(&machine), (EXCLUSIVE_PROCESS, Timeslice::Long), "a client is left, case {number}");
        leave(&mut machine);
        assert_eq!(settings(&machine), FORGOTTEN, "case {number}");
    }
}

#[test]
fn mps_client_is_listed_twice_and_server_once() {
    let mut machine = host("t4", false);
    machine.attach(0, on_gpu(7, ProcessKind::Compute)).unwrap();
    machine.attach(0, on_gpu(8, ProcessKind::Mps)).unwrap();
    let listed = |kind| machine.gpus()[0].listed(kind).map(|p| p.pid.pid).collect::<Vec<_>>();
    assert_eq!(listed(ProcessKind::Compute), [7, 8]);
    assert_eq!(listed(ProcessKind::Mps), [8]);
    assert!(listed(ProcessKind::Graphics).is_empty() && listed(ProcessKind::Handle).is_empty());
}
