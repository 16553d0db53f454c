//! Samples by the real worker of a simulated driver: the number of calls, the known truth, sensors that lie, and hangs.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::time::Duration;

use gpush_api::{GpuUuid, SignalSource};
use gpush_nvml::{
    Hardware, SampleError,
    proto::GpuRef,
    sample::{Activity, Doubt, Doubts, InstanceRef, ProcessSample, Ratio, Sample, Wanted},
};
use gpush_tests::{
    driver::{create, hardware, mig, options, uuids},
    host::Host,
};

/// A rule that counts all driver calls and never takes effect.
const COUNTER: &str = "nvml* --delay-ms 1 --after 1000000000";

/// An H100 with MIG off.
const WHOLE_H100: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n";

fn calls(host: &Host) -> u64 {
    let rules: serde_json::Value = serde_json::from_str(&host.sim("fault", &["list", "--json"])).unwrap();
    rules.as_array().unwrap().iter().find(|row| row["rule"]["function"] == "nvml*").unwrap()["seen"].as_u64().unwrap()
}

fn percent(percent: u32) -> Option<Ratio> {
    Some(Ratio::from_ppm(percent * 10_000))
}

/// A host with a stopped clock, whose GPUs are sampled.
struct Sampled {
    host: Host,
    hardware: Hardware,
    gpus: Vec<GpuRef>,
}

impl Sampled {
    async fn new(description: &str) -> Self {
        let host = Host::up(description);
        host.sim("clock", &["stop"]);
        let hardware = hardware(&host);
        let listed = hardware.list().await.unwrap();
        let gpus = listed.iter().map(|listed| GpuRef::from(listed.identity.as_ref().unwrap())).collect();
        Self { host, hardware, gpus }
    }

    async fn sample(&self, gpu: usize, instances: Option<&[InstanceRef]>, wanted: Wanted) -> Sample {
        self.hardware.sample(self.gpus[gpu].clone(), instances.map(<[_]>::to_vec), wanted).await.unwrap()
    }

    /// Samples a GPU with MIG off.
    async fn whole(&self, gpu: usize) -> Sample {
        self.sample(gpu, None, Wanted::default()).await
    }

    /// Samples the only given instance of a GPU.
    async fn instance(&self, gpu: usize, instance: InstanceRef) -> Activity {
        self.sample(gpu, Some(&[instance]), Wanted::default()).await.instances[0].activity
    }

    fn advance(&self, by: &str) {
        self.host.sim("clock", &["advance", by]);
    }

    /// Adds a process, and returns its pid.
    fn run(&self, args: &str) -> u32 {
        let args: Vec<&str> = ["add", "--spawn"].into_iter().chain(args.split(' ')).collect();
        self.host.sim("process", &args).trim().parse().unwrap()
    }

    fn set(&self, pid: u32, load: &str) {
        let pid = pid.to_string();
        let args: Vec<&str> = ["set", &pid].into_iter().chain(load.split(' ')).collect();
        self.host.sim("process", &args);
    }

    /// Creates a GPU instance with a compute instance of the same size.
    async fn create(&self, gpu: usize, profile: &str, start: u8) -> InstanceRef {
        let uuid = &self.gpus[gpu].uuid;
        let gi = create(&self.hardware, uuid.as_str(), profile, start).await.id;
        self.create_compute(uuid, gi).await;
        InstanceRef { gi, generation: 1 }
    }

    async fn create_compute(&self, uuid: &GpuUuid, gi: u32) {
        let reading = self.hardware.read(uuid).await.unwrap();
        let made = mig(&reading).instances.iter().find(|one| one.id == gi).unwrap();
        let of = mig(&reading).profiles.iter().find(|profile| profile.id == made.profile_id).unwrap();
        let whole = of.compute.iter().find(|compute| compute.slices == of.slices).unwrap();
        self.hardware.create_compute_instance(uuid, gi, whole.id, None).await.unwrap();
    }

    async fn destroy(&self, gpu: usize, gi: u32) {
        let uuid = &self.gpus[gpu].uuid;
        self.hardware.destroy_compute_instance(uuid, gi, 0).await.unwrap();
        self.hardware.destroy_gpu_instance(uuid, gi).await.unwrap();
    }
}

fn process_of(sample: &Sample, pid: u32) -> ProcessSample {
    *sample.processes.as_ref().unwrap().iter().find(|process| process.pid == pid).unwrap()
}

/// The figure of the design: 8 GPUs with 7 instances each in at most 70 driver calls.
#[tokio::test]
async fn fifty_six_instances_are_sampled_with_64_calls() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 8\n").await;
    let mut instances = vec![Vec::new(); 8];
    for (gpu, made) in instances.iter_mut().enumerate() {
        for start in 0..7 {
            made.push(sampled.create(gpu, "1g.10gb", start).await);
        }
    }
    sampled.host.fault(COUNTER);
    let mut rounds = Vec::new();
    let mut windows = vec![0_u32; 56];
    for round in 0..12 {
        sampled.advance("15s");
        let before = calls(&sampled.host);
        for (gpu, instances) in instances.iter().enumerate() {
            let sample = sampled.sample(gpu, Some(instances), Wanted::default()).await;
            assert!(sample.energy_mj.is_some() && sample.power_mw.is_some() && !sample.doubts.any());
            for (at, one) in sample.instances.iter().enumerate() {
                assert_eq!(one.activity.source, SignalSource::Gpm);
                if one.activity.doubt.is_none() {
                    windows[gpu * 7 + at] += 1;
                    let length = one.activity.window_us.unwrap();
                    assert!([30_000_000, 45_000_000].contains(&length), "{length}");
                }
            }
        }
        rounds.push((round, calls(&sampled.host) - before));
    }
    println!("calls of each round: {rounds:?}");
    assert!(rounds[3..].iter().all(|(_, calls)| *calls == 64), "{rounds:?}");
    assert!(windows.iter().all(|windows| *windows >= 3), "{windows:?}");

    let all = Wanted { windows: u8::MAX, ..Wanted::default() };
    let before = calls(&sampled.host);
    sampled.sample(0, Some(&instances[0]), all).await;
    assert_eq!(calls(&sampled.host) - before, 16, "all windows of a GPU at once");
}

#[tokio::test]
async fn instance_window_has_the_known_truth() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"h100-80-sxm\"\n").await;
    let one = sampled.create(0, "3g.40gb", 0).await;
    let pid =
        sampled.run(&format!("--gpu 0 --gi {} --ci 0 --memory 300 --sm 40 --busy 80 --tensor 20 --dram 10", one.gi));
    let first = sampled.instance(0, one).await;
    assert_eq!((first.source, first.doubt, first.sm), (SignalSource::Gpm, Some(Doubt::FirstSample), None));
    sampled.advance("9s");
    // A burst between two samples is in the window.
    sampled.set(pid, "--sm 100 --busy 100 --tensor 0 --dram 0");
    sampled.advance("1s");
    let sample = sampled.sample(0, Some(&[one]), Wanted::ALL).await;
    let activity = sample.instances[0].activity;
    assert_eq!((activity.sm, activity.busy, activity.tensor), (percent(46), percent(82), percent(18)));
    assert_eq!((activity.dram, activity.window_us), (percent(9), Some(10_000_000)));
    let process = process_of(&sample, pid);
    assert_eq!((process.gi, process.ci, process.memory_bytes), (Some(one.gi), Some(0), Some(300 << 20)));
    assert_eq!(process.busy, None, "the driver has no utilization of processes with MIG on");
    assert!(sample.instances[0].memory.unwrap().used_bytes >= 300 << 20);
    assert!(sample.memory.unwrap().total_bytes >= 79 << 30);
    assert_eq!((sample.temperature_c.is_some(), sample.event_reasons), (true, Some(0)));
    assert_eq!(sample.sm_clock_mhz, Some(1980));
    // A window is too short if the clock has not moved. It continues, so that no time is lost.
    let short = sampled.instance(0, one).await;
    assert_eq!((short.sm, short.doubt), (None, Some(Doubt::NotANumber)));
    sampled.advance("1s");
    assert_eq!(sampled.instance(0, one).await.sm, percent(100));
}

#[tokio::test]
async fn recreated_instance_begins_a_new_window() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"h100-80-sxm\"\n").await;
    let one = sampled.create(0, "1g.10gb", 0).await;
    let pid = sampled.run(&format!("--gpu 0 --gi {} --ci 0 --sm 50", one.gi));
    sampled.instance(0, one).await;
    sampled.advance("10s");
    assert_eq!(sampled.instance(0, one).await.sm, percent(50));
    sampled.host.sim("process", &["remove", &pid.to_string()]);
    for noticed in [true, false] {
        sampled.destroy(0, one.gi).await;
        let again = sampled.create(0, "1g.10gb", 0).await;
        assert_eq!(again.gi, one.gi, "the same slot, and the same UUID");
        sampled.advance("10s");
        let seen = InstanceRef { generation: if noticed { 2 } else { 1 }, ..again };
        let before = InstanceRef { generation: 1, ..again };
        let activity = sampled.instance(0, seen).await;
        let doubt = if noticed { Doubt::FirstSample } else { Doubt::Impossible };
        assert_eq!((activity.sm, activity.doubt), (None, Some(doubt)));
        sampled.advance("10s");
        assert_eq!(sampled.instance(0, seen).await.sm, percent(0));
        // Give the window activity for the next pass, so that the counters fall when the instance is recreated.
        let pid = sampled.run(&format!("--gpu 0 --gi {} --ci 0 --sm 50", one.gi));
        sampled.advance("10s");
        sampled.instance(0, before).await;
        sampled.advance("1s");
        sampled.instance(0, before).await;
        sampled.host.sim("process", &["remove", &pid.to_string()]);
    }
    let gone = InstanceRef { gi: 9, generation: 1 };
    let activity = sampled.instance(0, gone).await;
    assert_eq!((activity.source, activity.sm), (SignalSource::MemoryOnly, None), "an instance that does not exist");
}

/// Fault: an instance whose window had not begun was skipped, and the caller kept the activity of the instance before it.
#[tokio::test]
async fn instance_is_skipped_only_while_its_window_is_open() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"h100-80-sxm\"\n").await;
    let one = sampled.create(0, "1g.10gb", 0).await;
    let not_read = Wanted { windows: 0, ..Wanted::default() };
    let doubt = async |one| sampled.sample(0, Some(&[one]), not_read).await.instances[0].activity.doubt;
    assert_eq!(doubt(one).await, Some(Doubt::FirstSample));
    sampled.instance(0, one).await;
    assert_eq!(doubt(one).await, Some(Doubt::Skipped));
    assert_eq!(doubt(InstanceRef { generation: 2, ..one }).await, Some(Doubt::FirstSample));
}

#[tokio::test]
async fn instance_without_compute_instance_has_no_data() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"h100-80-sxm\"\n").await;
    let gi = create(&sampled.hardware, sampled.gpus[0].uuid.as_str(), "1g.10gb", 0).await.id;
    let one = InstanceRef { gi, generation: 1 };
    sampled.instance(0, one).await;
    sampled.advance("10s");
    let sample = sampled.sample(0, Some(&[one]), Wanted::default()).await;
    assert_eq!((sample.instances[0].activity.sm, sample.instances[0].activity.doubt), (None, Some(Doubt::NoData)));
    assert!(!sample.doubts.any(), "this is not a fault of a sensor");
}

/// Each kind of GPU names its best source.
#[tokio::test]
async fn source_depends_on_the_model_and_its_mode() {
    let text = "[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"t4\"\n";
    let sampled = Sampled::new(text).await;
    let one = sampled.create(1, "1g.10gb", 0).await;
    sampled.run("--gpu 0 --sm 30 --busy 60");
    sampled.run(&format!("--gpu 1 --gi {} --ci 0 --sm 30", one.gi));
    let on_t4 = sampled.run("--gpu 2 --sm 30 --busy 60 --dram 20");
    sampled.advance("5s");
    for gpu in [0, 2] {
        sampled.whole(gpu).await;
    }
    sampled.advance("10s");
    let h100 = sampled.whole(0).await.activity;
    assert_eq!((h100.source, h100.sm, h100.busy), (SignalSource::Gpm, percent(30), percent(60)));
    let a100 = sampled.sample(1, Some(&[one]), Wanted::default()).await;
    assert_eq!((a100.activity.source, a100.instances[0].activity), (SignalSource::MemoryOnly, memory_only()));
    let sample = sampled.whole(2).await;
    let t4 = sample.activity;
    assert_eq!((t4.source, t4.sm, t4.busy, t4.dram), (SignalSource::Utilization, None, percent(60), percent(20)));
    assert_eq!(process_of(&sample, on_t4).busy, percent(60));
    assert!(sample.memory.is_some() && sample.energy_mj.is_some());
    sampled.set(on_t4, "--sm 0");
    for _ in 0..2 {
        // The driver's last sampling period before the change is a part of the first of these samples.
        sampled.advance("10s");
        sampled.whole(2).await;
    }
    sampled.advance("10s");
    let idle = sampled.whole(2).await;
    assert_eq!((idle.activity.busy, process_of(&idle, on_t4).busy), (percent(0), percent(0)));
}

/// Fault: with a sample each second, the use of a process that did nothing was unknown while another process worked.
#[tokio::test]
async fn idle_process_beside_a_working_one_is_known_each_second() {
    let sampled = Sampled::new(WHOLE_H100).await;
    let (working, idle) = (sampled.run("--gpu 0 --sm 30"), sampled.run("--gpu 0 --sm 0"));
    let mut known = Vec::new();
    for _ in 0..8 {
        sampled.advance("1s");
        let sample = sampled.whole(0).await;
        known.push((process_of(&sample, working).busy, process_of(&sample, idle).busy));
    }
    assert!(known[2..].iter().all(|both| *both == (percent(30), percent(0))), "{known:?}");
}

/// A renderer uses the GPU too, but the list of compute processes does not have it.
#[tokio::test]
async fn graphics_processes_are_listed_with_mig_off() {
    let sampled = Sampled::new(WHOLE_H100).await;
    let mut expected = [sampled.run("--gpu 0 --sm 10"), sampled.run("--gpu 0 --kind graphics --sm 20")];
    expected.sort_unstable();
    let sample = sampled.whole(0).await;
    let mut listed: Vec<u32> = sample.processes.unwrap().iter().map(|process| process.pid).collect();
    listed.sort_unstable();
    assert_eq!(listed, expected);
}

/// Fault: after one failed call, the GPU counted as one without activity readings.
#[tokio::test]
async fn failed_window_keeps_its_source_and_begins_again() {
    let sampled = Sampled::new(WHOLE_H100).await;
    sampled.run("--gpu 0 --sm 50");
    sampled.host.fault("nvmlGpmQueryDeviceSupport --rc UNKNOWN --times 1");
    let next = async || {
        let sample = sampled.whole(0).await;
        sampled.advance("10s");
        assert_eq!(sample.activity.source, SignalSource::Gpm);
        assert_eq!(sample.doubts.failed, u32::from(sample.activity.doubt == Some(Doubt::Failed)));
        (sample.activity.sm, sample.activity.doubt)
    };
    assert_eq!(next().await, (None, Some(Doubt::Failed)));
    assert_eq!(next().await, (None, Some(Doubt::FirstSample)));
    assert_eq!(next().await, (percent(50), None));
    sampled.host.fault("nvmlGpmMetricsGet --rc UNKNOWN --times 1");
    assert_eq!(next().await, (None, Some(Doubt::Failed)));
    assert_eq!(next().await, (None, Some(Doubt::FirstSample)));
    assert_eq!(next().await, (percent(50), None));
}

fn memory_only() -> Activity {
    Activity { source: SignalSource::MemoryOnly, ..Activity::default() }
}

/// The driver's own buffer shows a burst that ended before the sample.
#[tokio::test]
async fn burst_between_two_samples_is_in_the_utilization() {
    let sampled = Sampled::new("[[gpu]]\nmodel = \"t4\"\n").await;
    let pid = sampled.run("--gpu 0 --sm 0");
    sampled.whole(0).await;
    sampled.advance("5s");
    sampled.set(pid, "--sm 100");
    sampled.advance("5s");
    sampled.set(pid, "--sm 0");
    sampled.advance("5s");
    let activity = sampled.whole(0).await.activity;
    let busy = activity.busy.unwrap().get();
    assert!((busy - 1.0 / 3.0).abs() < 0.02, "{busy}");
    let window = activity.window_us.unwrap();
    assert!((14_500_000..=15_500_000).contains(&window), "{window}");
}

#[tokio::test]
async fn wrong_values_are_absent_and_counted() {
    let sampled = Sampled::new(WHOLE_H100).await;
    let pid = sampled.run("--gpu 0 --sm 50");
    sampled.advance("5s");
    sampled.whole(0).await;
    let lie = async |rule: &str| {
        sampled.host.clear_faults();
        sampled.host.fault(rule);
        sampled.advance("10s");
        sampled.whole(0).await
    };
    for (kind, doubt, counted) in [
        ("nan", Doubt::NotANumber, Doubts { not_a_number: 1, ..Doubts::default() }),
        ("excess", Doubt::Impossible, Doubts { impossible: 1, ..Doubts::default() }),
    ] {
        let sample = lie(&format!("nvmlGpmMetricsGet --sensor {kind}")).await;
        assert_eq!((sample.activity.sm, sample.activity.doubt, sample.doubts), (None, Some(doubt), counted), "{kind}");
        assert!(sample.energy_mj.is_some() && process_of(&sample, pid).busy == percent(50));
    }
    for (kind, busy, counted) in [
        ("excess", None, Doubts { impossible: 1, ..Doubts::default() }),
        ("stale", None, Doubts { stale_time: 1, ..Doubts::default() }),
        ("foreign", percent(50), Doubts { foreign_process: 1, ..Doubts::default() }),
    ] {
        let sample = lie(&format!("nvmlDeviceGetProcessUtilization --sensor {kind}")).await;
        assert_eq!((process_of(&sample, pid).busy, sample.doubts), (busy, counted), "{kind}");
        assert_eq!(sample.processes.as_ref().unwrap().len(), 1, "a foreign process does not appear");
        assert_eq!(sample.activity.sm, percent(50));
    }
    let stale = lie("nvmlDeviceGetFieldValues --sensor stale").await;
    assert_eq!((stale.energy_mj, stale.power_mw, stale.doubts.stale_time), (None, None, 1));
    // A confident 0 cannot be seen in one sample: the power in the same sample contradicts it.
    let zero = lie("nvmlGpmMetricsGet --sensor zero").await;
    assert_eq!((zero.activity.sm, zero.activity.doubt), (percent(0), None));
    assert!(zero.power_mw.unwrap() > 150_000);
    let refused = lie("nvmlDeviceGetFieldValues --rc NOT_SUPPORTED").await;
    assert_eq!((refused.energy_mj, refused.activity.sm), (None, percent(50)));
}

#[tokio::test]
async fn hung_sample_leaves_the_gpu_and_the_others_alone() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\nmig = false\n");
    let mut options = options(&host);
    options.deadlines.sample = Duration::from_secs(3);
    let hardware = Hardware::start(options);
    let list = uuids(&hardware).await;
    let sample = async |gpu: usize| {
        hardware.sample(GpuRef::new(&list[gpu]), None, Wanted::default()).await.map(|sample| sample.uuid)
    };
    assert_eq!(sample(1).await, Ok(list[1].clone()));
    host.fault("nvmlDeviceGetFieldValues --gpu 0 --hang");
    assert_eq!(sample(0).await, Err(SampleError::Late));
    hardware.read(&list[0]).await.unwrap();
    hardware.set_mig_mode(&list[0], true).await.unwrap();
    assert!(hardware.status().unsettled.is_empty());
    assert_eq!(sample(1).await, Ok(list[1].clone()));
    assert!(matches!(sample(0).await, Err(SampleError::Waiting(_))));
}

/// An Ampere GPU refuses the change while another process has a driver session.
#[tokio::test]
async fn samples_do_not_block_a_change_of_mig_mode() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\nmig = false\nresets_itself = true\n");
    let hardware = hardware(&host);
    let gpu = uuids(&hardware).await.remove(0);
    hardware.sample(GpuRef::new(&gpu), None, Wanted::default()).await.unwrap();
    let pids = hardware.worker_pids();
    assert_eq!(pids.len(), 2);
    let change = hardware.set_mig_mode(&gpu, true).await.unwrap();
    assert!(change.is(true), "{change:?}");
    let after = hardware.sample(GpuRef::new(&gpu), Some(Vec::new()), Wanted::default()).await.unwrap();
    assert!(after.energy_mj.unwrap() < 60_000_000, "the reset has set the counter to 0");
}
