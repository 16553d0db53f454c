//! Bills: a closed month never changes, late use is a correction, and users see only their own bill.

use std::sync::Arc;

use gpush_api::{Bill, BillState, Code, GpuUuid, LeaseId, LeaseKind, UsageReport};
use gpush_store::{GpuModel, HoursPage, OwnedHour, UsageRecord};
use gpush_usage::{
    account::LeaseOwner,
    bill::{BilledGpu, Month},
    input::Hold,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, StateTimes},
    moment::{DAY_MS, HOUR_MS},
    share::{GPU_UNITS, Share},
};
use jiff::Timestamp;

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::{WHOLE, whole, whole_gpus},
    user,
};

/// A GPU that the host no longer has.
const GONE: &str = "GPU-00000000-0000-0000-0000-00000000dead";

/// Returns a config with which gpushd records each change at once. `close` is how long a month must be over.
fn config(close: &str, price: &str) -> String {
    format!(
        "# --constants usage.record=1ms,usage.close={close}\n[[price]]\nper_slice_hour = {price}\ncurrency = \"EUR\"\n{WHOLE}"
    )
}

/// Returns the month before the present one.
fn last_month() -> Month {
    let present = Month::of(Timestamp::now().as_millisecond());
    Month::of(present.start_ms() - 1)
}

fn lease_hour(lease: u64, number: u64, hour_ms: i64) -> OwnedHour {
    let share = Share { units: GPU_UNITS / 2, charged: GPU_UNITS / 2 };
    let (gpu, target) = (GpuUuid::from(GONE), GONE.into());
    let hold = Hold { gpu, target, kind: LeaseKind::Mps, share, instance: None, memory_mib: 1_000 };
    let times = StateTimes { busy_ms: 1_800_000, idle_ms: 1_800_000, ..StateTimes::default() };
    let unit_ms = u64::from(share.units) * 3_600_000;
    let sums = HoldSums {
        times,
        unit_ms,
        charged_unit_ms: unit_ms,
        busy_unit_ms: unit_ms / 2,
        busy_charged_unit_ms: unit_ms / 2,
        energy_mj: 7_200_000,
        ..HoldSums::default()
    };
    let owner = LeaseOwner {
        user: format!("user{}", 999 + lease),
        account: Some("physics".to_owned()),
        job: Some("ci/7".to_owned()),
        ..LeaseOwner::default()
    };
    OwnedHour { owner, hour: LeaseHour { lease: LeaseId(lease), hold, number, hour_ms, sums } }
}

fn gpu_hour(number: u64, hour_ms: i64) -> GpuHour {
    let all = u64::from(GPU_UNITS) * 3_600_000;
    let sums = GpuSums {
        known_ms: 3_600_000,
        capacity: all,
        leased: all / 2,
        free: all / 2,
        charged: all / 2,
        uncharged: all / 2,
        energy_mj: 9_000_000,
        unattributed_mj: 1_800_000,
        ..GpuSums::default()
    };
    GpuHour { gpu: GONE.into(), number, hour_ms, sums }
}

impl InProcess {
    /// Records hours, as an earlier gpushd did. There is no checkpoint any more, so the next gpushd numbers its hours after
    /// these.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    async fn record_hours(&self, leases: Vec<OwnedHour>, gpus: Vec<GpuHour>) {
        let store = &self.engine.as_ref().expect("gpushd runs").context.store;
        // The next checkpoint is due in an hour.
        self.until("a checkpoint", async || store.read(|view| view.usage_checkpoint()).await.expect("readable")).await;
        let billed = BilledGpu { model: "NVIDIA L4".to_owned(), slices: 1 };
        let models = vec![GpuModel { gpu: GONE.into(), billed }];
        let usage = UsageRecord { lease_hours: leases, gpu_hours: gpus, models, ..UsageRecord::default() };
        store.write(move |tx| tx.record_usage(&usage)).await.expect("recorded");
    }

    async fn until_closed(&self, month: Month) {
        self.until("a closed month", async || {
            let bill: Bill = self.get(&format!("/v1/bill?month={month}")).await;
            (bill.state == BillState::Closed).then_some(())
        })
        .await;
    }

    /// Returns the bill of a month in all forms.
    async fn bills(&self, month: Month, uid: u32) -> Vec<String> {
        let mut bills = Vec::new();
        for model in ["requested", "used", "flat"] {
            for focus in [false, true] {
                let path = format!("/v1/bill/csv?month={month}&model={model}&focus={focus}");
                let (text, kind) = self.metrics_at(&path, uid, "*/*").await;
                assert!(kind.starts_with("text/csv"), "{path}: {kind}: {text}");
                bills.push(text);
            }
        }
        bills
    }
}

/// Records hours of two leases in the last month.
async fn with_use(host: &Arc<ScriptedHost>) -> InProcess {
    let gpushd = host.start(&config("1h", "0.25")).await;
    gpushd.gpus().await;
    let start_ms = last_month().start_ms();
    let leases = (0..3).map(|hour| lease_hour(1, 1000 + hour, start_ms + 5 * HOUR_MS)).chain([
        lease_hour(2, 1010, start_ms),
        lease_hour(2, 1011, start_ms + HOUR_MS),
        lease_hour(2, 1012, last_month().end_ms() - HOUR_MS),
    ]);
    let gpus = vec![gpu_hour(1020, start_ms), gpu_hour(1021, last_month().end_ms() - HOUR_MS)];
    gpushd.record_hours(leases.collect(), gpus).await;
    gpushd.kill();
    let gpushd = host.start(&config("1h", "0.25")).await;
    gpushd.gpus().await;
    gpushd
}

/// The bill of a closed month has the same bytes after a kill, a restart, a reboot, changed prices, and after its hours
/// are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bill_of_a_closed_month_never_changes() {
    let host = whole_gpus(1);
    let month = last_month();
    let mut gpushd = with_use(&host).await;
    let open: Bill = gpushd.get(&format!("/v1/bill?month={month}&by=account")).await;
    assert_eq!((open.state, open.lines[0].key.as_deref()), (BillState::Ended, Some("physics")));
    assert!(open.notes[0].contains("is not closed yet"), "{open:?}");
    // Six hours of half a GPU, and two hours in which the other half is free.
    assert_eq!((open.total.amount.as_str(), open.currency.as_deref()), ("1", Some("EUR")));
    let before = gpushd.bills(month, 0).await;
    for step in ["restart", "kill", "reboot", "prices", "fold"] {
        match step {
            "kill" => gpushd.kill(),
            "fold" => {
                let store = gpushd.engine.as_ref().expect("gpushd runs").context.store.clone();
                // As on the next day.
                let tomorrow_ms = Timestamp::now().as_millisecond() + DAY_MS;
                let fold = move |tx: &mut gpush_store::Tx<'_>| {
                    tx.fold_days(tomorrow_ms)?;
                    tx.delete_folded_hours(i64::MAX)
                };
                store.write(fold).await.expect("deleted");
                let page = HoursPage { from_ms: 0, until_ms: month.end_ms(), number: 0, limit: 10 };
                assert!(store.read(move |view| view.lease_hours(page)).await.expect("readable").is_empty());
                gpushd.stop().await;
            }
            "reboot" => {
                gpushd.stop().await;
                host.reboot();
            }
            _ => gpushd.stop().await,
        }
        let price = if step == "restart" { "0.25" } else { "7.5" };
        gpushd = host.start(&config("1ms", price)).await;
        gpushd.gpus().await;
        gpushd.until_closed(month).await;
        assert_eq!(gpushd.bills(month, 0).await, before, "after {step}");
    }
    let report: UsageReport =
        gpushd.get(&format!("/v1/usage/report?since={}&until={}", time(month.start_ms()), time(month.end_ms()))).await;
    assert!((report.total.held_gpu_hours - 3.0).abs() < 1e-9, "{report:?}");
    assert!((report.total.energy_j - 43_200.0).abs() < 1e-9 && report.lines.len() == 2, "{report:?}");
}

fn time(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(ms).expect("a time")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_use_of_a_closed_month_is_a_correction_of_the_next() {
    let host = whole_gpus(1);
    let month = last_month();
    with_use(&host).await.stop().await;
    let gpushd = host.start(&config("1ms", "0.25")).await;
    gpushd.gpus().await;
    gpushd.until_closed(month).await;
    let before = gpushd.bills(month, 0).await;
    gpushd.record_hours(vec![lease_hour(2, 5000, month.start_ms() + 2 * HOUR_MS)], Vec::new()).await;
    assert_eq!(gpushd.bills(month, 0).await, before);
    let present: Bill = gpushd.get("/v1/bill").await;
    assert_eq!(present.state, BillState::Running);
    assert!(present.notes[0].contains("is not over"), "{present:?}");
    let late = present.lines.iter().find(|line| line.key.as_deref() == Some("user1001")).expect("the correction");
    assert_eq!((late.sums.corrections.as_str(), late.sums.amount.as_str()), ("0.125", "0.125"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_sees_only_their_own_bill() {
    let host = whole_gpus(1);
    let month = last_month();
    let gpushd = with_use(&host).await;
    let own = gpushd.bills(month, 1000).await;
    assert!(own.iter().all(|text| text.contains("user1000") && !text.contains("user1001")), "{own:?}");
    assert!(own.iter().all(|text| !text.contains("nallocated")), "{own:?}");
    let bill: Bill = gpushd.get_as(user(1000), &format!("/v1/bill?month={month}")).await.expect("the own bill");
    assert_eq!((bill.user.as_deref(), bill.unallocated, bill.total.amount.as_str()), (Some("user1000"), None, "0.375"));
    for path in ["/v1/bill?user=user1001", "/v1/bill/csv?user=user1001"] {
        let error = gpushd.get_as::<Bill>(user(1000), path).await.expect_err("not theirs");
        assert_eq!(error.code, Code::Denied, "{path}");
    }
    let named: Bill = gpushd.get(&format!("/v1/bill?month={month}&user=user1001")).await;
    assert_eq!((named.lines.len(), named.total.amount.as_str()), (1, "0.375"));
    for (query, says) in [
        ("month=2999-01", "has not begun"),
        ("month=2026-13", "is not a month"),
        ("month=november", "is not a month"),
        ("model=free", "model"),
    ] {
        let error = gpushd.get_as::<Bill>(user(0), &format!("/v1/bill?{query}")).await.expect_err("wrong");
        assert!(error.code == Code::BadRequest && error.message.contains(says), "{query}: {error:?}");
    }
}

/// A bill of the present month has the leases that are open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bill_of_the_present_month_has_open_leases() {
    let host = whole_gpus(1).start(&config("1h", "0.25")).await;
    host.gpus().await;
    let granted = host.lease(1000, &whole("0", 1)).await.expect("a lease");
    host.until_recorded(&granted, true).await;
    let bill = host
        .until("time on the bill", async || {
            let bill: Bill = host.get("/v1/bill?by=kind").await;
            (bill.lines.first()?.sums.amount != "0").then_some(bill)
        })
        .await;
    assert_eq!((bill.lines[0].key.as_deref(), bill.lines[0].sums.lease_count), (Some("whole"), 1));
    assert!(bill.unallocated.is_some() && bill.currency.as_deref() == Some("EUR"), "{bill:?}");
}
