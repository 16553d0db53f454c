//! Activity, energy and samples of loads that a test sets, at times that a test sets.

#![allow(unsafe_code)] // calls C functions of the library under test
#![allow(clippy::unwrap_used)] // tests only

#[macro_use]
mod client;

use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

use client::Client;
use nvml_wrapper_sys::bindings::*;
use silicon::fault::{Rule, Sensor};
use silicon::machine::{Clock, Conditions, Load, Pid, Process, ProcessKind, WHOLE_PPM};

const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const NO_DATA: u32 = 21;

/// Graphics, SM, tensor and DRAM activity, and PCIe traffic to the host.
const METRICS: [u32; 5] = [1, 2, 5, 10, 20];

fn unsafe_zeroed<T>() -> T {
    // SAFETY: the type is a plain C struct, for which all zeros are a valid value.
    unsafe { zeroed() }
}

impl Client {
    /// Puts this test process on a GPU or in a GPU instance, with a load. The clock stands still.
    fn run(&self, gpu: u32, gpu_instance: Option<u32>, load: Load) {
        let process = Process {
            pid: Pid::own(),
            kind: ProcessKind::Compute,
            memory_mib: 9,
            gpu_instance,
            compute_instance: None,
        };
        self.host.set_clock(Clock::stopped).unwrap();
        self.host
            .update(|m| m.attach(gpu, process).and_then(|()| m.set_load(gpu, process.pid.pid, Some(load))))
            .unwrap();
    }

    fn advance_ms(&self, ms: u64) {
        self.host.advance(Duration::from_millis(ms)).unwrap();
    }

    fn lie(&self, function: &str, sensor: Option<Sensor>) {
        self.host.clear_faults(None).unwrap();
        if sensor.is_some() {
            self.host.add_fault(Rule { sensor, ..Rule::new(function) }).unwrap();
        }
    }

    fn sample(&self, gpu: u32, gi: Option<u32>) -> nvmlGpmSample_t {
        let mut sample = null_mut();
        ok!(self, nvmlGpmSampleAlloc(&mut sample));
        match gi {
            Some(gi) => ok!(self, nvmlGpmMigSampleGet(self.gpu(gpu), gi, sample)),
            None => ok!(self, nvmlGpmSampleGet(self.gpu(gpu), sample)),
        }
        sample
    }

    /// Returns the return code and the value of each metric of [`METRICS`].
    fn window(&self, from: nvmlGpmSample_t, to: nvmlGpmSample_t) -> [(u32, f64); 5] {
        let mut request: Box<nvmlGpmMetricsGet_t> = Box::new(unsafe_zeroed());
        (request.version, request.numMetrics, request.sample1, request.sample2) = (1, 5, from, to);
        METRICS.iter().zip(request.metrics.iter_mut()).for_each(|(id, metric)| metric.metricId = *id);
        ok!(self, nvmlGpmMetricsGet(&mut *request));
        std::array::from_fn(|at| (request.metrics[at].nvmlReturn, request.metrics[at].value))
    }

    fn fields<const N: usize>(&self, gpu: u32, ids: [u32; N]) -> [u64; N] {
        let mut fields: [nvmlFieldValue_t; N] = unsafe_zeroed();
        fields.iter_mut().zip(ids).for_each(|(field, id)| field.fieldId = id);
        ok!(self, nvmlDeviceGetFieldValues(self.gpu(gpu), N as i32, fields.as_mut_ptr()));
        // SAFETY: the library fills all 8 bytes of a value.
        fields.map(|field| unsafe { field.value.ullVal })
    }
}

const HALF: Load = Load { tensor_ppm: 300_000, dram_ppm: 100_000, busy_ppm: WHOLE_PPM, ..Load::of_sm(500_000) };

#[test]
fn gpm_window_is_the_integral_of_the_load() {
    let client = Client::of("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    client.run(0, None, HALF);
    let first = client.sample(0, None);
    client.advance_ms(3000);
    client.host.update(|m| m.set_load(0, std::process::id(), Some(Load::IDLE))).unwrap();
    let second = client.sample(0, None);
    client.advance_ms(1000);
    let third = client.sample(0, None);
    let values = |window: [(u32, f64); 5]| window.map(|(code, value)| (code == 0).then_some(value.round()));
    let [busy, sm, tensor, dram, _] = values(client.window(first, second));
    assert_eq!([busy, sm, tensor, dram], [Some(100.0), Some(50.0), Some(30.0), Some(10.0)]);
    let [busy, sm, ..] = values(client.window(second, third));
    assert_eq!([busy, sm], [Some(0.0), Some(0.0)]);
    let [busy, sm, tensor, _, pcie] = values(client.window(first, third));
    assert_eq!([busy, sm, tensor], [Some(75.0), Some(38.0), Some(23.0)], "the burst is in the window");
    assert!(pcie.unwrap() > 100.0);
}

#[test]
fn short_window_is_not_a_number() {
    let client = Client::of("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    client.run(0, None, HALF);
    let first = client.sample(0, None);
    client.advance_ms(99);
    let second = client.sample(0, None);
    client.advance_ms(1);
    let third = client.sample(0, None);
    assert!(client.window(first, second).iter().all(|(code, value)| *code == 0 && value.is_nan()));
    assert!(client.window(first, third).iter().all(|(code, value)| *code == 0 && !value.is_nan()));
}

#[test]
fn instance_has_data_only_with_a_compute_instance() {
    let client = Client::one("h100-80-sxm");
    let gpu = client.gpu(0);
    let created = client.create(gpu, 9, 0, 4).unwrap();
    let mut info: nvmlGpuInstanceInfo_t = unsafe_zeroed();
    ok!(client, nvmlGpuInstanceGetInfo(created, &mut info));
    client.host.set_clock(Clock::stopped).unwrap();
    let measure = |ms: u64| {
        let from = client.sample(0, Some(info.id));
        client.advance_ms(ms);
        client.window(from, client.sample(0, Some(info.id)))
    };
    assert!(measure(1000).iter().all(|(code, _)| *code == NO_DATA));
    let ci = client.create_compute(created, 2).unwrap();
    client.run(0, Some(info.id), HALF);
    let window = measure(1000);
    assert_eq!(window.map(|(code, _)| code), [0, 0, 0, 0, NOT_SUPPORTED], "no PCIe traffic of an instance");
    assert_eq!(window[1].1.round(), 50.0, "relative to the instance");
    let before = client.sample(0, Some(info.id));

    // A new instance in the same slot has the same id and UUID. The library does not notice that.
    client.host.update(|m| Ok::<_, silicon::HostError>(m.detach(std::process::id(), None))).unwrap();
    ok!(client, nvmlComputeInstanceDestroy(ci));
    ok!(client, nvmlGpuInstanceDestroy(created));
    let again = client.create(gpu, 9, 0, 4).unwrap();
    client.create_compute(again, 2).unwrap();
    client.advance_ms(1000);
    let across = client.window(before, client.sample(0, Some(info.id)));
    assert!(across[1].1 > 1e6, "{}", across[1].1);
    assert_eq!(measure(1000)[1], (0, 0.0));
}

#[test]
fn both_energy_counters_show_one_integral() {
    let client = Client::of("[[gpu]]\nmodel = \"a100-80\"\nmig = false\n");
    client.run(0, None, Load { power_mw: Some(100_000), ..HALF });
    let read = || {
        let mut millijoules = 0;
        ok!(client, nvmlDeviceGetTotalEnergyConsumption(client.gpu(0), &mut millijoules));
        let [field, power] = client.fields(0, [83, 186]);
        assert_eq!(field, millijoules);
        (field, power)
    };
    let (first, power) = read();
    assert_eq!(power, 168_000, "48 W when idle, 20 W for a context, 100 W for the load");
    client.advance_ms(10_000);
    let (second, _) = read();
    assert_eq!(second - first, 1_680_000);
    client.host.update(|m| m.set_conditions(0, Conditions { power_limit_mw: Some(150_000), heat_c: 0 })).unwrap();
    client.advance_ms(10_000);
    let (third, power) = read();
    assert_eq!((third - second, power), (1_500_000, 150_000));
    let mut reasons = 0;
    ok!(client, nvmlDeviceGetCurrentClocksThrottleReasons(client.gpu(0), &mut reasons));
    assert_eq!((reasons, client.fields(0, [74, 75, 190])), (4, [10_000_000_000, 0, 150_000]));
    client.host.set_clock(|clock, real| clock.set(1000, real)).unwrap();
    assert_eq!(read().0, third, "the clock was set back");
    client.host.reboot().unwrap();
    assert_eq!(read_of_new_boot(&client), 0);
}

fn read_of_new_boot(client: &Client) -> u64 {
    let mut device = null_mut();
    ok!(client, nvmlDeviceGetHandleByIndex_v2(0, &mut device));
    let mut millijoules = 1;
    ok!(client, nvmlDeviceGetTotalEnergyConsumption(device, &mut millijoules));
    millijoules
}

#[test]
fn sample_buffer_has_no_gap_between_two_calls() {
    let client = Client::of("[[gpu]]\nmodel = \"t4\"\n[[gpu]]\nmodel = \"a100-80\"\n");
    client.run(0, None, HALF);
    let read = |gpu: u32, kind: u32, since: u64| {
        let (mut kind_of_value, mut count, mut samples): (u32, u32, [nvmlSample_t; 120]) = (9, 120, unsafe_zeroed());
        let code = rc!(
            client,
            nvmlDeviceGetSamples(client.gpu(gpu), kind, since, &mut kind_of_value, &mut count, samples.as_mut_ptr())
        );
        // SAFETY: the value type of these kinds is an unsigned number.
        let all = samples[..count as usize].iter().map(|one| (one.timeStamp, unsafe { one.sampleValue.uiVal }));
        (code, all.collect::<Vec<_>>())
    };
    client.advance_ms(10_000);
    let (code, first) = read(0, 1, 0);
    assert_eq!(code, 0);
    // The process starts within the first period.
    assert!(first.len() > 50 && first[1..].iter().all(|(_, percent)| *percent == 100), "{first:?}");
    let last = first.last().unwrap().0;
    assert_eq!(read(0, 1, last).0, NOT_FOUND);
    client.host.update(|m| m.set_load(0, std::process::id(), Some(Load::IDLE))).unwrap();
    client.advance_ms(5000);
    let (_, second) = read(0, 1, last);
    assert!(second[0].0 > last && second.last().unwrap().1 == 0, "{second:?}");
    assert!(second.windows(2).all(|pair| pair[1].0 - pair[0].0 == 167_000), "{second:?}");
    let (code, power) = read(1, 0, 0);
    assert!(code == 0 && power.iter().all(|(_, mw)| *mw == 48_000), "{power:?}");
    assert_eq!(read(1, 1, 0).0, NOT_SUPPORTED, "no load with MIG on");
    let (mut kind_of_value, mut count) = (9, 0);
    ok!(client, nvmlDeviceGetSamples(client.gpu(0), 1, 0, &mut kind_of_value, &mut count, null_mut()));
    assert_eq!((kind_of_value, count), (1, 120));
}

#[test]
fn sensors_lie_as_the_fault_rules_demand() {
    let client = Client::of("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    client.run(0, None, HALF);
    let gpu = client.gpu(0);
    let from = client.sample(0, None);
    client.advance_ms(5000);
    let to = client.sample(0, None);
    for (sensor, check) in [
        (Sensor::Zero, (|value| value == 0.0) as fn(f64) -> bool),
        (Sensor::Nan, f64::is_nan),
        (Sensor::Excess, |value| value > 1e6),
    ] {
        client.lie("nvmlGpmMetricsGet", Some(sensor));
        assert!(client.window(from, to).iter().all(|(code, value)| *code == 0 && check(*value)), "{sensor:?}");
    }
    let utilization = |sensor: Option<Sensor>| {
        client.lie("nvmlDeviceGetProcessUtilization", sensor);
        let (mut samples, mut count): ([nvmlProcessUtilizationSample_t; 4], u32) = (unsafe_zeroed(), 4);
        ok!(client, nvmlDeviceGetProcessUtilization(gpu, samples.as_mut_ptr(), &mut count, 0));
        samples[..count as usize].iter().map(|one| (one.pid, one.smUtil, one.timeStamp)).collect::<Vec<_>>()
    };
    let honest = utilization(None);
    let (own, now) = (std::process::id(), honest[0].2);
    assert_eq!(honest, [(own, 100, now)]);
    assert_eq!(utilization(Some(Sensor::Zero)), [(own, 0, now)]);
    assert_eq!(utilization(Some(Sensor::Excess)), [(own, 2100, now)]);
    assert_eq!(utilization(Some(Sensor::Stale)), [(own, 100, now - 3_600_000_000)]);
    let foreign = utilization(Some(Sensor::Foreign));
    assert_eq!((foreign.len(), foreign[0].0), (2, own));
    assert_eq!(Pid::find(foreign[1].0), None);
    client.lie("nvmlDeviceGetUtilizationRates", Some(Sensor::Zero));
    let mut rates = nvmlUtilization_t { gpu: 9, memory: 9 };
    ok!(client, nvmlDeviceGetUtilizationRates(gpu, &mut rates));
    let mut power = 0;
    ok!(client, nvmlDeviceGetPowerUsage(gpu, &mut power));
    assert!((rates.gpu, rates.memory) == (0, 0) && power > 100_000, "{power} mW while the load reads 0");
    let misplaced = Rule { sensor: Some(Sensor::Nan), ..Rule::new("nvmlDeviceGetUtilizationRates") };
    assert!(client.host.add_fault(misplaced).is_err());
}
