//! What leases were used for outlasts gpushd: restarts, kills, reboots.

use std::collections::BTreeMap;

use gpush_api::{Code, HostUsage, Lease, LeaseGrant, LeaseUsageSummary, UsageHistory, UsageReport};
use gpush_nvml::sample::Ratio;

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::{WHOLE, whole, whole_gpus},
    leases::devices,
    user,
};

/// A config with which gpushd records each change at once.
fn config() -> String {
    format!("# --constants usage.record=1ms\n{WHOLE}")
}

impl InProcess {
    async fn lease_of(&self, granted: &LeaseGrant) -> Lease {
        self.get(&format!("/v1/leases/{}", granted.lease.id)).await
    }

    /// Returns the counters of leases and of unattributed energy in the metrics, by series.
    async fn counters(&self) -> BTreeMap<String, f64> {
        let (text, _) = self.metrics(0, "*/*").await;
        let is_counter = |series: &str| {
            series.starts_with("gpush_lease_") && series.contains("_total{lease=") || series.contains("unattributed")
        };
        let values = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
        let counters = values.filter(|(series, _)| is_counter(series));
        counters.map(|(series, value)| (series.to_owned(), value.parse().expect("a number"))).collect()
    }

    /// Waits until the checkpoint in the store names a lease, or does not name it any more.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    pub(super) async fn until_recorded(&self, granted: &LeaseGrant, is_open: bool) {
        let needle = format!("\"{}\"", granted.lease.id);
        let store = &self.engine.as_ref().expect("gpushd runs").context.store;
        self.until("a checkpoint", async || {
            let text = store.read(|view| view.usage_checkpoint()).await.expect("readable")?;
            (text.contains(&needle) == is_open).then_some(())
        })
        .await;
    }
}

/// Returns the accounted time of a lease in seconds.
fn held_s(usage: &LeaseUsageSummary) -> u64 {
    usage.busy_s + usage.idle_s + usage.empty_s + usage.unknown_s
}

/// Checks that the accounted time is the time between grant and end. Each of the four sums may lose a fraction of a second,
/// and the ledger sees the begin and the end a little later.
fn assert_nothing_is_lost(lease: &Lease) {
    let (granted, ended) = (lease.granted_at.expect("granted"), lease.ended_at.expect("ended"));
    let held = ended.duration_since(granted).as_secs();
    let accounted = i64::try_from(held_s(lease.usage.as_ref().expect("its use"))).expect("a short time");
    assert!((held - accounted).abs() <= 4, "{held} s, {accounted} s accounted: {lease:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn use_of_an_ended_lease_is_kept_over_restart_kill_and_reboot() {
    let host = whole_gpus(1);
    let mut gpushd = host.start(&config()).await;
    host.gpus.set_sample(0, |sample| sample.energy_mj = Some(5_000_000));
    let granted = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    gpushd.until_recorded(&granted, true).await;
    gpushd.release(&granted).await;
    gpushd.wait_until_ended(&granted).await;
    gpushd.until_recorded(&granted, false).await;
    let before = gpushd.lease_of(&granted).await;
    assert_nothing_is_lost(&before);
    for step in ["kill", "restart", "reboot"] {
        match step {
            "kill" => gpushd.kill(),
            "restart" => gpushd.stop().await,
            _ => {
                gpushd.stop().await;
                host.reboot();
            }
        }
        gpushd = host.start(&config()).await;
        assert_eq!(gpushd.lease_of(&granted).await, before, "after a {step}");
    }
    let of_other = gpushd.get_as::<Lease>(user(1001), &format!("/v1/leases/{}", granted.lease.id)).await;
    assert!(of_other.is_err(), "users do not see ended leases of others");
}

/// A lease continues its sums after a kill. The time between checkpoint and start counts as unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_loses_no_held_time_of_an_open_lease() {
    let host = whole_gpus(2);
    let mut gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    let first = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    gpushd.until_recorded(&first, true).await;
    // The second lease begins and ends without a checkpoint.
    gpushd.kill();
    gpushd = host.start(WHOLE).await;
    gpushd.gpus().await;
    let second = gpushd.lease(1001, &whole("1", 1)).await.expect("a lease");
    gpushd.release(&second).await;
    gpushd.wait_until_ended(&second).await;
    gpushd.kill();
    gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    gpushd.until_recorded(&first, true).await;
    gpushd.release(&first).await;
    gpushd.wait_until_ended(&first).await;
    gpushd.until_recorded(&first, false).await;
    for granted in [&first, &second] {
        assert_nothing_is_lost(&gpushd.lease_of(granted).await);
    }
}

/// Fault: after a kill, the counters fell to those of the last checkpoint. Prometheus took this as a reset of the counters,
/// and counted the whole time and energy again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_do_not_fall_when_gpushd_is_killed() {
    let host = whole_gpus(1);
    let config = format!("# --constants usage.record=500ms\n{WHOLE}");
    let mut gpushd = host.start(&config).await;
    gpushd.gpus().await;
    let granted = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    let busy = format!("gpush_lease_busy_seconds_total{{lease=\"{}\"}}", granted.lease.id);
    let mut before = BTreeMap::new();
    for wanted in [1.0, 2.0, 3.0] {
        let counters = gpushd
            .until("more work in the metrics", async || {
                host.gpus.set_sample(0, |sample| {
                    sample.activity.busy = Some(Ratio::from_ppm(800_000));
                    sample.energy_mj = sample.energy_mj.map(|mj| mj + 50);
                });
                gpushd.get::<HostUsage>("/v1/usage?watch=true").await;
                let now = gpushd.counters().await;
                for (series, value) in &before {
                    assert!(now.get(series).is_none_or(|now| now >= value), "{series} was {value}: {now:?}");
                }
                Some(now).filter(|now| now.get(&busy).is_some_and(|busy| *busy >= wanted))
            })
            .await;
        assert!(counters.keys().any(|series| series.starts_with("gpush_lease_energy_joules_total")), "{counters:?}");
        before = counters;
        gpushd.kill();
        gpushd = host.start(&config).await;
        gpushd.gpus().await;
    }
}

/// Metrics show the final sums of a lease for 5 minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_lease_has_its_final_series_for_a_while() {
    let host = whole_gpus(1).start(&config()).await;
    host.gpus().await;
    let granted = host.lease(1000, &whole("0", 1)).await.expect("a lease");
    host.until_recorded(&granted, true).await;
    host.release(&granted).await;
    host.wait_until_ended(&granted).await;
    host.until_recorded(&granted, false).await;
    let id = granted.lease.id;
    let (text, _) = host.metrics(0, "*/*").await;
    let has = |series: &str| text.contains(&format!("{series}{{lease=\"{id}\""));
    assert!(has("gpush_lease_held_seconds_total") && has("gpush_lease_info"), "{text}");
    assert!(!has("gpush_lease_ends_timestamp_seconds") && !has("gpush_lease_idle_seconds"), "{text}");
    let (of_user, _) = host.metrics(1000, "*/*").await;
    assert!(!of_user.contains("gpush_lease"), "{of_user}");
}

/// The past of a lease is for its holder and administrators.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_of_a_lease_is_for_its_holder() {
    let host = whole_gpus(1).start(&config()).await;
    host.gpus().await;
    let granted = host.lease(1000, &whole("0", 1)).await.expect("a lease");
    host.until_recorded(&granted, true).await;
    let path = format!("/v1/leases/{}/usage", granted.lease.id);
    let past: gpush_api::LeasePast = host.get_as(user(1000), &path).await.expect("the past");
    assert_eq!(past.lease_id, granted.lease.id);
    for uid in [1001, 65_534] {
        let error = host.get_as::<gpush_api::LeasePast>(user(uid), &path).await.expect_err("not theirs");
        assert!(error.message.contains("whose use you may see"), "{error:?}");
    }
}

/// Fault: a report showed a refused request only after up to 10 minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_counts_requests_at_once_and_only_once() {
    for config in [WHOLE.to_owned(), config()] {
        let host = whole_gpus(1).start(&config).await;
        host.gpus().await;
        host.lease(1000, &whole("0", 1)).await.expect("a lease");
        for _ in 0..3 {
            host.lease(1001, &whole("0", 1)).await.expect_err("the GPU is in use");
        }
        for _ in 0..20 {
            let report: UsageReport = host.get("/v1/usage/report").await;
            let counts: Vec<_> =
                report.request_lines.iter().map(|line| (line.granted_requests, line.no_capacity)).collect();
            assert_eq!(counts, [(1, 3)], "{report:?}");
        }
    }
}

/// A report counts recorded hours and the present hour, once each. Users see their own leases only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_counts_ended_and_open_leases_once() {
    let host = whole_gpus(2);
    let mut gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    let ended = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    gpushd.until_recorded(&ended, true).await;
    gpushd.release(&ended).await;
    gpushd.wait_until_ended(&ended).await;
    gpushd.until_recorded(&ended, false).await;
    gpushd.stop().await;
    gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    let open = gpushd.lease(1001, &whole("1", 1)).await.expect("a lease");
    gpushd.until_recorded(&open, true).await;
    let report: UsageReport = gpushd.get("/v1/usage/report?by=user").await;
    let keys: Vec<_> = report.lines.iter().filter_map(|line| line.key.as_deref()).collect();
    assert_eq!(keys, ["user1000", "user1001"]);
    let sum: f64 = report.lines.iter().map(|line| line.sums.held_gpu_hours).sum();
    assert!((sum - report.total.held_gpu_hours).abs() < 1e-9);
    let capacity = report.capacity.expect("an administrator sees it");
    assert!((capacity.leased_gpu_hours - sum).abs() < 1e-9, "{capacity:?} {sum}");
    let parts = capacity.leased_gpu_hours + capacity.free_gpu_hours + capacity.unusable_gpu_hours;
    assert!((parts - capacity.capacity_gpu_hours).abs() < 1e-9, "{capacity:?}");

    let own: UsageReport = gpushd.get_as(user(1000), "/v1/usage/report?by=group").await.expect("the own use");
    assert_eq!(own.lines.iter().filter_map(|line| line.key.as_deref()).collect::<Vec<_>>(), ["group0"]);
    assert_eq!(own.capacity, None);
    let of_other = gpushd.get_as::<UsageReport>(user(1000), "/v1/usage/report?user=user1001").await;
    assert_eq!(of_other.expect_err("not theirs").code, Code::Denied);
    let empty = gpushd.get_as::<UsageReport>(user(0), "/v1/usage/report?since=2999-01-01T00:00:00Z").await;
    assert!(empty.expect_err("no period").message.contains("the period is empty"));
}

/// Fault: a report over 30 days did not say that gpushd had recorded only the last three of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_says_when_the_records_begin() {
    let host = whole_gpus(1);
    let started = jiff::Timestamp::now();
    let mut gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    let granted = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    gpushd.until_recorded(&granted, true).await;
    let path = "/v1/usage/report?since=2020-01-01T00:00:00Z";
    let first: UsageReport = gpushd.get_as(user(1000), path).await.expect("the own use");
    let since = first.recorded_since.expect("the records begin in the period");
    // The start of the records within an hour is exact to a minute.
    assert!(since.duration_since(started).as_secs().abs() < 90, "{since} {started}");
    gpushd.stop().await;
    gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    gpushd.until_recorded(&granted, true).await;
    let second: UsageReport = gpushd.get(path).await;
    let again = second.recorded_since.expect("the records begin in the period");
    assert!(again.duration_since(since).as_secs().abs() < 90, "{since} {again}");
    let past: UsageReport = gpushd.get(&format!("{path}&until=2020-01-02T00:00:00Z")).await;
    assert_eq!(past.recorded_since, Some(past.until), "nothing is recorded");
}

/// Fault: each restart of gpushd split the use of an open lease with a MIG device into several targets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mig_device_stays_one_target_over_restarts() {
    let config = "# --constants usage.record=1ms\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\n";
    let host = ScriptedHost::new("dgx-h100", 1);
    let mut gpushd = host.start(config).await;
    gpushd.apply(&["0"], &["1g.10gb*2"]).await;
    let granted = gpushd.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    gpushd.until_recorded(&granted, true).await;
    for _ in 0..3 {
        gpushd.stop().await;
        gpushd = host.start(config).await;
        gpushd.gpus().await;
        gpushd.until_recorded(&granted, true).await;
        let used = gpushd.get::<HostUsage>("/v1/usage").await;
        assert_eq!(used.lease_usage[0].target_usage.len(), 1, "{used:?}");
    }
    gpushd.release(&granted).await;
    gpushd.wait_until_ended(&granted).await;
    gpushd.until_recorded(&granted, false).await;
    let history: UsageHistory = gpushd.get("/v1/usage/history").await;
    assert_eq!(history.used_leases[0].used_targets.len(), 1, "{history:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_counts_the_requests_of_each_user_over_restarts() {
    let host = whole_gpus(1);
    let mut gpushd = host.start(&config()).await;
    gpushd.gpus().await;
    let granted = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    for _ in 0..2 {
        gpushd.lease(1001, &whole("0", 1)).await.expect_err("the GPU is leased");
    }
    gpushd.until_recorded(&granted, true).await;
    for stop in [false, true] {
        for (uid, expected) in [(1000, (1, 0)), (1001, (0, 2)), (0, (1, 2))] {
            let path = "/v1/usage/report?by=kind";
            let report: UsageReport = gpushd.get_as(user(uid), path).await.expect("a report");
            let total = report.total_requests;
            assert_eq!((total.granted_requests, total.refused_requests), expected, "{uid} {stop}: {report:?}");
            let line = report.lines.iter().find(|line| line.key.as_deref() == Some("whole")).expect("the kind");
            assert_eq!(line.request_sums, total);
        }
        if !stop {
            gpushd.stop().await;
            gpushd = host.start(&config()).await;
            gpushd.gpus().await;
        }
    }
}
