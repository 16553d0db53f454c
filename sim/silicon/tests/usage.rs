//! Activity and energy over time, compared with an independent sum over all changes of the load.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use proptest::prelude::*;
use silicon::description::GpuDescription;
use silicon::machine::{Conditions, GpuInstanceHandle, Load, Pid, Process, ProcessKind, Sums, WHOLE_PPM, reason};
use silicon::{Description, Machine, Return};

const START_MS: u64 = 1_700_000_000_000;

fn process(pid: u32, gpu_instance: Option<u32>) -> Process {
    Process {
        pid: Pid { pid, start: 1 },
        kind: ProcessKind::Compute,
        memory_mib: 10,
        gpu_instance,
        compute_instance: None,
    }
}

fn machine(model: &str, mig: bool) -> Machine {
    let gpu = GpuDescription { mig: Some(mig), ..GpuDescription::new(model, 1) };
    let mut machine = Machine::new(&Description::of(vec![gpu])).unwrap();
    machine.load_driver(START_MS);
    machine
}

/// Creates a 3g and a 4g instance with a compute instance each.
fn halves(machine: &mut Machine) -> [GpuInstanceHandle; 2] {
    [9, 5].map(|profile| {
        let gi = machine.create_gpu_instance(0, profile, None).unwrap();
        machine.create_compute_instance(gi, if profile == 9 { 2 } else { 3 }, None).unwrap();
        gi
    })
}

#[derive(Debug, Clone)]
enum Act {
    Wait(u64),
    Attach { pid: u32, half: usize, load: Load },
    Load { pid: u32, load: Load },
    Detach(u32),
    Limit(Option<u32>),
    Memory(u32),
}

fn load() -> impl Strategy<Value = Load> {
    let part = || prop_oneof![Just(0), Just(WHOLE_PPM), 0..=WHOLE_PPM];
    (part(), part(), part(), part(), proptest::option::of(0..200_000_u32)).prop_map(
        |(busy_ppm, sm_ppm, tensor_ppm, dram_ppm, power_mw)| Load { busy_ppm, sm_ppm, tensor_ppm, dram_ppm, power_mw },
    )
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1..5000_u64).prop_map(Act::Wait),
        2 => (1..4_u32, 0..2_usize, load()).prop_map(|(pid, half, load)| Act::Attach { pid, half, load }),
        3 => (1..4_u32, load()).prop_map(|(pid, load)| Act::Load { pid, load }),
        1 => (1..4_u32).prop_map(Act::Detach),
        1 => proptest::option::of(100_000..700_000_u32).prop_map(Act::Limit),
        1 => (1..4_u32).prop_map(Act::Memory),
    ]
}

/// The known truth: the loads that are set, and the sum of the activity over time, in ppm × ms.
#[derive(Default)]
struct Truth {
    loads: Vec<(u32, usize, Load)>,
    sums: [[u128; 4]; 2],
    whole: [u128; 4],
}

fn parts(load: &Load) -> [u128; 4] {
    [load.busy_ppm, load.sm_ppm, load.tensor_ppm, load.dram_ppm].map(u128::from)
}

impl Truth {
    fn wait(&mut self, ms: u64) {
        // The 3g instance has 3 of 7 compute slices, the 4g instance has 4; both have half of the memory.
        let sizes: [[(u128, u128); 4]; 2] = [[(3, 7), (3, 7), (3, 7), (4, 8)], [(4, 7), (4, 7), (4, 7), (4, 8)]];
        for (half, sizes) in sizes.iter().enumerate() {
            for (kind, (own, all)) in sizes.iter().enumerate() {
                let here = self.loads.iter().filter(|(_, at, _)| *at == half);
                let rate: u128 = here.map(|(_, _, load)| parts(load)[kind]).sum::<u128>().min(WHOLE_PPM.into());
                self.sums[half][kind] += rate * u128::from(ms);
                self.whole[kind] += rate * own / all * u128::from(ms);
            }
        }
    }
}

fn listed(sums: Sums) -> [u128; 4] {
    [sums.busy, sums.sm, sums.tensor, sums.dram].map(u128::from)
}

proptest! {
    #[test]
    fn activity_equals_the_sum_of_all_loads(acts in proptest::collection::vec(act(), 1..40)) {
        let mut machine = machine("h100-80-sxm", true);
        let halves = halves(&mut machine);
        let (mut now, mut truth, mut energy) = (START_MS, Truth::default(), 0);
        for act in acts {
            match act {
                Act::Wait(ms) => {
                    let before = machine.energy_uj(0, now).unwrap();
                    // Any time between the two moments divides the window into two that add up to it.
                    let middle = machine.activity(0, None, now + ms / 3).unwrap().sums.busy;
                    let (first, last) = (
                        machine.activity(0, None, now).unwrap().sums.busy,
                        machine.activity(0, None, now + ms).unwrap().sums.busy,
                    );
                    prop_assert_eq!((middle - first) + (last - middle), last - first);
                    now += ms;
                    truth.wait(ms);
                    machine.set_time(now);
                    let power = machine.reading(0).unwrap().power_mw;
                    let after = machine.energy_uj(0, now).unwrap();
                    prop_assert_eq!(after - before, u64::from(power) * ms, "the power is the slope of the energy");
                }
                Act::Attach { pid, half, load } => {
                    if truth.loads.iter().all(|(other, ..)| *other != pid) {
                        machine.attach(0, process(pid, Some(halves[half].id))).unwrap();
                        machine.set_load(0, pid, Some(load)).unwrap();
                        truth.loads.push((pid, half, load));
                    }
                }
                Act::Load { pid, load } => match truth.loads.iter_mut().find(|(other, ..)| *other == pid) {
                    Some(known) => {
                        known.2 = load;
                        machine.set_load(0, pid, Some(load)).unwrap();
                    }
                    None => prop_assert_eq!(machine.set_load(0, pid, Some(load)), Err(Return::NotFound)),
                },
                Act::Detach(pid) => {
                    machine.detach(pid, None);
                    truth.loads.retain(|(other, ..)| *other != pid);
                }
                Act::Limit(power_limit_mw) => {
                    machine.set_conditions(0, Conditions { power_limit_mw, heat_c: 0 }).unwrap();
                }
                Act::Memory(pid) => {
                    let known = truth.loads.iter().any(|(other, ..)| *other == pid);
                    prop_assert_eq!(machine.set_memory(0, pid, 77).is_ok(), known);
                }
            }
            for (half, gi) in halves.iter().enumerate() {
                let activity = machine.activity(0, Some(gi.id), now).unwrap();
                prop_assert!(activity.has_data);
                prop_assert_eq!(listed(activity.sums), truth.sums[half]);
            }
            prop_assert_eq!(listed(machine.activity(0, None, now).unwrap().sums), truth.whole);
            let used = machine.energy_uj(0, now).unwrap();
            prop_assert!(used >= energy, "energy fell from {} to {}", energy, used);
            energy = used;
        }
        let text = serde_json::to_string(machine.state()).unwrap();
        let read: silicon::machine::State = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(&read, machine.state());
        prop_assert!(text.len() < 8000, "{} bytes", text.len());
    }
}

#[test]
fn energy_falls_only_at_reset_and_reboot() {
    let mut machine = machine("a100-80", false);
    machine.attach(0, process(1, None)).unwrap();
    machine.set_load(0, 1, Some(Load::of_sm(WHOLE_PPM))).unwrap();
    machine.set_time(START_MS + 10_000);
    let busy = machine.energy_uj(0, START_MS + 10_000).unwrap();
    machine.detach(1, None);
    let idle = machine.energy_uj(0, START_MS + 20_000).unwrap() - busy;
    assert!(idle > 0 && idle < busy / 2, "{idle} of {busy}");
    assert_eq!(machine.energy_uj(0, START_MS + 5000).unwrap(), busy, "the clock was set back");
    machine.set_time(START_MS + 20_000);
    machine.reset(0, None).unwrap();
    assert_eq!(machine.energy_uj(0, START_MS + 20_000), Ok(0));
    machine.set_time(START_MS + 30_000);
    assert!(machine.energy_uj(0, START_MS + 30_000).unwrap() > 0);
    machine.reboot("again".to_owned());
    assert_eq!(machine.energy_uj(0, START_MS + 30_000), Ok(0));
}

#[test]
fn recreated_instance_starts_from_zero() {
    let mut machine = machine("h100-80-sxm", true);
    let [first, _] = halves(&mut machine);
    machine.attach(0, process(1, Some(first.id))).unwrap();
    machine.set_time(START_MS + 10_000);
    machine.detach(1, None);
    let uuid = machine.mig_devices(0).unwrap()[0].uuid.clone();
    assert!(machine.activity(0, Some(first.id), START_MS + 10_000).unwrap().sums.sm > 0);
    let ci = machine.compute_instance_handle(first, 0).unwrap();
    machine.destroy_compute_instance(ci).unwrap();
    assert!(!machine.activity(0, Some(first.id), START_MS + 10_000).unwrap().has_data);
    machine.destroy_gpu_instance(first).unwrap();
    assert_eq!(machine.activity(0, Some(first.id), START_MS + 10_000), Err(Return::NotFound));
    let again = machine.create_gpu_instance(0, 9, None).unwrap();
    machine.create_compute_instance(again, 2, None).unwrap();
    assert_eq!((again.id, &machine.mig_devices(0).unwrap()[0].uuid), (first.id, &uuid));
    let activity = machine.activity(0, Some(again.id), START_MS + 20_000).unwrap();
    assert_eq!((activity.sums, activity.has_data), (Sums::default(), true));
}

#[test]
fn limits_lower_the_clocks_and_count_their_time() {
    let mut machine = machine("h100-80-sxm", false);
    machine.attach(0, process(1, None)).unwrap();
    machine.set_load(0, 1, Some(Load { power_mw: Some(500_000), ..Load::of_sm(WHOLE_PPM) })).unwrap();
    let free = machine.reading(0).unwrap();
    assert_eq!((free.event_reasons, free.power_mw), (0, 619_000));
    machine.set_time(START_MS + 1000);
    machine.set_conditions(0, Conditions { power_limit_mw: Some(400_000), heat_c: 0 }).unwrap();
    let capped = machine.reading(0).unwrap();
    assert_eq!((capped.event_reasons, capped.power_mw), (reason::POWER_CAP, 400_000));
    assert!(capped.sm_clock_mhz < free.sm_clock_mhz);
    machine.set_time(START_MS + 3000);
    machine.set_conditions(0, Conditions { power_limit_mw: None, heat_c: 40 }).unwrap();
    assert_eq!(machine.reading(0).unwrap().event_reasons, reason::THERMAL);
    assert_eq!(machine.limited_ms(0, START_MS + 3500), Ok((2000, 500)));
    machine.detach(1, None);
    assert_eq!(machine.reading(0).unwrap().event_reasons, reason::IDLE);
    for power_limit_mw in [0, 700_001] {
        let set = machine.set_conditions(0, Conditions { power_limit_mw: Some(power_limit_mw), heat_c: 0 });
        assert_eq!(set, Err(Return::InvalidArgument));
    }
}

#[test]
fn process_samples_are_means_over_whole_periods() {
    let mut machine = machine("a100-80", false);
    machine.attach(0, process(1, None)).unwrap();
    machine.attach(0, process(2, None)).unwrap();
    machine.set_load(0, 1, Some(Load::of_sm(WHOLE_PPM / 2))).unwrap();
    machine.set_load(0, 2, Some(Load::IDLE)).unwrap();
    let percents = |machine: &Machine, since: u64, now: u64| -> Vec<(u32, u32)> {
        let all = machine.process_activity(0, START_MS + since, START_MS + now).unwrap();
        all.iter().map(|one| (one.pid.pid, one.busy_percent)).collect()
    };
    assert_eq!(percents(&machine, 0, 999), [], "no period is complete");
    assert_eq!(percents(&machine, 0, 1999), [(1, 50)], "a process that does nothing is not listed");
    machine.set_time(START_MS + 4000);
    machine.set_load(0, 1, Some(Load::IDLE)).unwrap();
    machine.set_load(0, 2, Some(Load::of_sm(WHOLE_PPM))).unwrap();
    assert_eq!(percents(&machine, 0, 8000), [(1, 25), (2, 50)]);
    assert_eq!(percents(&machine, 4000, 8000), [(2, 100)]);
    assert_eq!(percents(&machine, 8000, 8999), []);
    let later = machine.process_activity(0, START_MS, START_MS + 8500).unwrap();
    assert!(later.iter().all(|one| one.at_ms == START_MS + 8000));
}

#[test]
fn sample_buffer_has_the_mean_of_each_period() {
    let mut machine = machine("a100-80", false);
    machine.attach(0, process(1, None)).unwrap();
    machine.set_load(0, 1, Some(Load::of_sm(WHOLE_PPM))).unwrap();
    machine.set_time(START_MS + 1500);
    machine.set_load(0, 1, Some(Load::IDLE)).unwrap();
    let read = machine.samples(0, START_MS, START_MS + 3500, 1000).unwrap();
    let busy: Vec<_> = read.iter().map(|one| (one.at_ms - START_MS, one.busy_percent)).collect();
    assert_eq!(busy, [(1000, 100), (2000, 50), (3000, 0)]);
    assert!(read[0].power_mw > read[1].power_mw && read[1].power_mw > read[2].power_mw);
    let long = machine.samples(0, 0, START_MS + 1_000_000, 1000).unwrap();
    assert_eq!(long.len(), 120, "the buffer is limited");
}
