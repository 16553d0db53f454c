//! What GPUs and leases are used for: samples, sums, and who may see them.

use std::collections::BTreeSet;

use gpush_api::{GpuState, HostUsage, Lease, LeaseGrant, LeaseUsage, SignalSource, UnknownReason, UseState};
use gpush_locked::Locked;
use gpush_nvml::{
    ErrorKind,
    sample::{Activity, InstanceRef, InstanceSample, ProcessSample, Ratio},
};
use hyper::Method;

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::{WHOLE, whole, whole_gpus},
    leases::{FIXED, devices},
    programs::UserProgram,
    requests::request,
    user,
};

/// Name of the call that takes a sample.
const SAMPLE: &str = "sampling the GPU";

impl InProcess {
    /// Waits until the figures are as a test wants them.
    async fn until_usage<T>(&self, what: &str, is: impl Fn(&HostUsage) -> Option<T>) -> T {
        self.until(what, async || is(&self.get("/v1/usage?watch=true").await)).await
    }

    /// Waits for a lease in this state.
    async fn until_use(&self, lease: &LeaseGrant, state: UseState) -> LeaseUsage {
        let id = lease.lease.id;
        let is =
            |usage: &HostUsage| usage.lease_usage.iter().find(|one| one.lease_id == id && one.state == state).cloned();
        self.until_usage(state.name(), is).await
    }

    /// Waits until gpushd has learned how much power the first GPU needs without a process. This needs two samples.
    async fn until_power_is_learned(&self) {
        let sampled = |usage: &HostUsage| usage.gpu_usage.first()?.sampled_at;
        let first = self.until_usage("a sample", sampled).await;
        self.until_usage("a second sample", |usage| sampled(usage).filter(|at| *at > first)).await;
    }

    /// Returns the metrics that a user sees.
    pub(super) async fn metrics(&self, uid: u32, accept: &str) -> (String, String) {
        self.metrics_at("/metrics", uid, accept).await
    }

    /// Returns a text and its content type.
    pub(super) async fn metrics_at(&self, path: &str, uid: u32, accept: &str) -> (String, String) {
        let headers = [("accept", accept)];
        let asked = request(user(uid), Method::GET, path, &headers, Vec::new());
        let answer = self.begin_request(asked).await.expect("an answer");
        let kind = answer.headers["content-type"].to_str().expect("text").to_owned();
        (String::from_utf8(answer.body.clone()).expect("text"), kind)
    }
}

/// Returns a process in a sample that worked for a part of the time, in ppm.
fn process(pid: u32, busy: u32) -> ProcessSample {
    let (gi, ci, dram) = (None, None, Some(Ratio::ZERO));
    ProcessSample { pid, gi, ci, memory_bytes: Some(2 << 30), busy: Some(Ratio::from_ppm(busy)), dram }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_empty_until_a_process_of_it_works() {
    let host = whole_gpus(1).start(WHOLE).await;
    host.gpus.set_sample(0, |_| {});
    let lease = host.lease(0, &whole("0", 1)).await.expect("a lease");
    let empty = host.until_use(&lease, UseState::Empty).await;
    assert!(empty.unused_since.is_some() && empty.target_usage[0].memory_mib == Some(0), "{empty:?}");
    let program = UserProgram::with_environment(0, &lease.environment);
    host.gpus.set_sample(0, |sample| {
        sample.activity.busy = Some(Ratio::from_ppm(800_000));
        sample.processes = Some(vec![process(program.pid(), 800_000)]);
    });
    let busy = host.until_use(&lease, UseState::Busy).await;
    assert_eq!((busy.unused_since, busy.target_usage[0].memory_mib), (None, Some(2048)));
    assert_eq!((busy.target_usage[0].source, busy.target_usage[0].estimate), (SignalSource::Utilization, false));
    let gpu = &host.get::<HostUsage>("/v1/usage?watch=true").await.gpu_usage[0];
    assert_eq!((gpu.activity.busy, gpu.power_w, gpu.leased), (Some(0.8), Some(70.0), Some(1.0)));
}

/// A process without a lease must not make the lease of another user look busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_of_a_process_without_a_lease_is_not_work_of_the_lease() {
    let host = whole_gpus(1).start(WHOLE).await;
    let lease = host.lease(1000, &whole("0", 1)).await.expect("a lease");
    let program = UserProgram::sleep(0);
    host.gpus.set_sample(0, |sample| {
        sample.activity.busy = Some(Ratio::from_ppm(900_000));
        sample.processes = Some(vec![process(program.pid(), 900_000)]);
    });
    let figures = |usage: &HostUsage| {
        let sampled = usage.gpu_usage.first()?.sampled_at.is_some();
        usage.lease_usage.iter().find(|one| one.lease_id == lease.lease.id && sampled).cloned()
    };
    let seen = host.until_usage("a sample", figures).await;
    assert_ne!(seen.state, UseState::Busy, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn driver_is_called_only_while_something_needs_samples() {
    let host = whole_gpus(2).start(&format!("{WHOLE}[history]\ndays = 0\n")).await;
    host.gpus.set_sample(0, |_| {});
    host.lease(0, &whole("0", 1)).await.expect("a lease");
    host.gpus().await;
    assert_eq!(host.gpus.sampled(), 0, "nothing has asked");
    host.until_usage("a sample", |usage| usage.gpu_usage.first()?.sampled_at).await;
    let taken = host.gpus.sampled();
    for _ in 0..20 {
        host.metrics(0, "*/*").await;
        host.get::<HostUsage>("/v1/usage?watch=true").await;
    }
    assert!(host.gpus.sampled() <= taken + 2 * 2, "many readers cause no more samples than one");
}

/// A GPU whose sample fails must not change its state, and shows no old figure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sample_is_a_gap_and_changes_no_gpu() {
    let host = whole_gpus(2).start(WHOLE).await;
    (0..2).for_each(|gpu| host.gpus.set_sample(gpu, |_| {}));
    let lease = host.lease(0, &whole("0", 1)).await.expect("a lease");
    host.until_use(&lease, UseState::Empty).await;
    host.gpus.fail(SAMPLE, 0, 1000, ErrorKind::Unknown);
    let unknown = host.until_use(&lease, UseState::Unknown).await;
    assert_eq!(unknown.reason, Some(UnknownReason::NoSample));
    let usage: HostUsage = host.get("/v1/usage?watch=true").await;
    assert!(usage.gpu_usage[0].failure.is_some() && usage.gpu_usage[0].power_w.is_none(), "{usage:?}");
    assert!(usage.gpu_usage[1].failure.is_none(), "{usage:?}");
    assert_eq!(host.gpu(0).await.state, GpuState::Ready);
    let (metrics, _) = host.metrics(0, "*/*").await;
    let power = metrics.lines().filter(|line| line.starts_with("gpush_gpu_power_watts{")).count();
    assert_eq!(power, 1, "a gap has no series: {metrics}");
    let dropped = metrics.lines().find_map(|line| line.strip_prefix("gpush_samples_dropped_total{reason=\"failed\"} "));
    assert!(dropped.is_some_and(|count| count != "0"), "{metrics}");
    host.gpus.clear_faults();
    host.until_use(&lease, UseState::Empty).await;
}

/// Watchers share the samples: ten open tops call the driver as often as one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_watchers_cause_the_samples_of_one() {
    let host = whole_gpus(1).start(WHOLE).await;
    host.gpus.set_sample(0, |_| {});
    host.gpus().await;
    host.until_usage("a sample", |usage| usage.gpu_usage.first()?.sampled_at).await;
    let before = host.gpus.sampled();
    let seen = Locked::new(BTreeSet::new());
    host.until("three more samples", async || {
        let watchers = (0..10).map(|_| host.get::<HostUsage>("/v1/usage?watch=true"));
        let answers = futures_util::future::join_all(watchers).await;
        let mut seen = seen.lock();
        seen.extend(answers.iter().filter_map(|usage| usage.gpu_usage[0].sampled_at));
        (seen.len() > 3).then_some(())
    })
    .await;
    // The first time belongs to a sample before, and one more sample can be on its way.
    let (taken, seen) = (host.gpus.sampled() - before, seen.lock().len());
    assert!(usize::try_from(taken).is_ok_and(|taken| taken <= seen + 1), "{taken} samples, {seen} times");
}

/// Fault: a sensor that was known to lie was shown as an activity of 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn activity_that_the_power_refutes_has_no_series() {
    let host = whole_gpus(1).start(WHOLE).await;
    host.gpus.set_sample(0, |sample| {
        sample.energy_mj = None;
        sample.activity.busy = Some(Ratio::ZERO);
    });
    let lease = host.lease(0, &whole("0", 1)).await.expect("a lease");
    host.until_power_is_learned().await;
    host.until_use(&lease, UseState::Empty).await;
    let program = UserProgram::with_environment(0, &lease.environment);
    host.gpus.set_sample(0, |sample| sample.processes = Some(vec![process(program.pid(), 0)]));
    host.until_use(&lease, UseState::Idle).await;
    assert_eq!(host.get::<HostUsage>("/v1/usage?watch=true").await.gpu_usage[0].activity.busy, Some(0.0));
    host.gpus.set_sample(0, |sample| sample.power_mw = Some(400_000));
    let unknown = host.until_use(&lease, UseState::Unknown).await;
    assert_eq!(unknown.reason, Some(UnknownReason::PowerDisagrees));
    assert_eq!(host.get::<HostUsage>("/v1/usage?watch=true").await.gpu_usage[0].activity.busy, None);
    let (metrics, _) = host.metrics(0, "*/*").await;
    assert!(!metrics.contains("\ngpush_gpu_utilization_ratio{") && metrics.contains("\ngpush_gpu_power_watts{"));
}

/// Returns a GPU instance in a sample whose SMs worked for a part of the time, in ppm.
fn instance(gi: u32, sm: u32) -> InstanceSample {
    let (sm, zero) = (Some(Ratio::from_ppm(sm)), Some(Ratio::ZERO));
    let activity = Activity {
        source: SignalSource::Gpm,
        window_us: Some(1_000),
        busy: sm,
        sm,
        tensor: zero,
        dram: zero,
        ..Activity::default()
    };
    InstanceSample { instance: InstanceRef { gi, generation: 0 }, activity, memory: None }
}

/// A sensor reads 0 under load. While another MIG device works, gpushd cannot detect this, so it must report the zero as not
/// certain. Afterwards the power of the board refutes the sensor. Fault: the lease was shown as certainly idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zero_of_a_mig_lease_beside_a_working_one_is_not_certain() {
    let host = ScriptedHost::new("dgx-h100", 1).start_with_layouts(FIXED).await;
    host.until_layouts_are_settled().await;
    let lies = host.lease(0, &devices("1g.10gb", 1)).await.expect("a device");
    let works = host.lease(0, &devices("1g.10gb", 1)).await.expect("the other device");
    let listed = host.gpus().await;
    let all = &listed[0].mig.as_ref().expect("MIG").instances;
    let place = |lease: &LeaseGrant| {
        let target = &lease.lease.members[0].target;
        let is_target = |uuid: &Option<_>| uuid.as_ref() == Some(target);
        let found = all.iter().find_map(|gi| Some((gi.id, gi.compute.iter().find(|ci| is_target(&ci.uuid))?.id)));
        found.expect("the device of the lease")
    };
    let (liar, worker) = (place(&lies), place(&works));
    let in_place = |pid: u32, (gi, ci): (u32, u32)| ProcessSample {
        gi: Some(gi),
        ci: Some(ci),
        busy: None,
        dram: None,
        ..process(pid, 0)
    };
    host.gpus.set_sample(0, |sample| {
        // The power decides, not the counter of the energy.
        (sample.activity, sample.energy_mj) = (Activity::default(), None);
        sample.instances = vec![instance(liar.0, 0), instance(worker.0, 0)];
    });
    host.until_power_is_learned().await;
    host.until_use(&lies, UseState::Empty).await;
    let (liars, workers) =
        (UserProgram::with_environment(0, &lies.environment), UserProgram::with_environment(0, &works.environment));
    host.gpus.set_sample(0, |sample| {
        sample.instances = vec![instance(liar.0, 0), instance(worker.0, 900_000)];
        sample.processes = Some(vec![in_place(liars.pid(), liar), in_place(workers.pid(), worker)]);
        sample.power_mw = Some(200_000);
    });
    let id = lies.lease.id;
    let seen = |usage: &HostUsage| {
        let lease = usage.lease_usage.iter().find(|one| one.lease_id == id).cloned()?;
        assert!(lease.state != UseState::Idle || lease.weak, "not certain: {lease:?}");
        Some(lease)
    };
    let weak = host.until_usage("a weak zero", |usage| seen(usage).filter(|lease| lease.weak)).await;
    assert_eq!((weak.state, weak.target_usage[0].weak), (UseState::Idle, true));
    let shown: Lease = host.get(&format!("/v1/leases/{id}")).await;
    let summary = shown.usage.expect("its use");
    assert_eq!((summary.state, summary.weak), (Some(UseState::Idle), true));
    assert!(!host.until_use(&works, UseState::Busy).await.weak);

    drop(workers);
    host.gpus.set_sample(0, |sample| {
        sample.instances = vec![instance(liar.0, 0), instance(worker.0, 0)];
        sample.processes = Some(vec![in_place(liars.pid(), liar)]);
    });
    let refuted = |lease: &LeaseUsage| lease.reason == Some(UnknownReason::PowerDisagrees);
    let unknown = host.until_usage("the power refutes the zero", |usage| seen(usage).filter(refuted)).await;
    assert_eq!((unknown.state, unknown.weak, unknown.target_usage[0].weak), (UseState::Unknown, false, false));
    host.gpus.set_sample(0, |sample| sample.instances[0] = instance(liar.0, 400_000));
    let is_busy = |lease: &LeaseUsage| lease.state == UseState::Busy;
    let busy = host.until_usage("work", |usage| seen(usage).filter(is_busy)).await;
    assert!(!busy.weak);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_sees_only_own_leases_and_no_names_of_others() {
    let config = format!("{WHOLE}[metrics]\nreaders = [\"user1002\"]\n");
    let host = whole_gpus(2).start(&config).await;
    let own = host.lease(1000, &whole("0", 1)).await.expect("a lease").lease.id;
    host.lease(1001, &whole("1", 1)).await.expect("a lease");
    let seen: HostUsage = host.get_as(user(1000), "/v1/usage?watch=true").await.expect("the own figures");
    assert_eq!(seen.lease_usage.iter().map(|lease| lease.lease_id).collect::<Vec<_>>(), [own]);
    let all: HostUsage = host.get("/v1/usage?watch=true").await;
    assert_eq!(all.lease_usage.len(), 2);
    let (of_user, _) = host.metrics(1000, "*/*").await;
    assert!(of_user.contains("gpush_gpu_info{") && !of_user.contains("gpush_lease"), "{of_user}");
    for uid in [0, 1002] {
        let (of_reader, _) = host.metrics(uid, "*/*").await;
        let names =
            of_reader.lines().filter(|line| line.starts_with("gpush_lease_info{") && line.contains("user=\"user100"));
        assert_eq!(names.count(), 2, "{uid}: {of_reader}");
    }
}

/// A relay without a password serves every user of the host, so it requests less than its own user may see.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn public_metrics_have_no_leases_for_readers_and_root() {
    let config = format!("{WHOLE}[metrics]\nreaders = [\"user1002\"]\n");
    let host = whole_gpus(1).start(&config).await;
    host.lease(1000, &whole("0", 1)).await.expect("a lease");
    for uid in [0, 1000, 1002] {
        let (public, _) = host.metrics_at("/metrics?labels=public", uid, "*/*").await;
        assert!(public.contains("gpush_gpu_info{") && !public.contains("gpush_lease"), "{uid}: {public}");
    }
    for wrong in ["labels=all", "label=public"] {
        let (error, _) = host.metrics_at(&format!("/metrics?{wrong}"), 0, "*/*").await;
        assert!(error.contains("/metrics does not take these parameters"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_format_that_the_client_prefers() {
    let host = whole_gpus(1).start(WHOLE).await;
    host.gpus.set_sample(0, |sample| sample.activity.source = SignalSource::Utilization);
    host.gpus().await;
    host.until_usage("a sample", |usage| usage.gpu_usage.first()?.sampled_at).await;
    let (classic, kind) = host.metrics(0, "text/plain").await;
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    assert!(classic.contains("# TYPE gpush_gpu_energy_joules_total counter\n") && !classic.contains("# EOF"));
    let (open, kind) = host.metrics(0, "application/openmetrics-text; version=1.0.0").await;
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"), "{kind}");
    assert!(open.contains("# UNIT gpush_gpu_energy_joules joules\n") && open.ends_with("# EOF\n"));
}
