//! What each lease of a period was used for, and which requests were refused: the history that the advice needs.

use std::sync::Arc;

use gpush_api::{Code, UsageHistory};
use serde_json::json;

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::{WHOLE, whole, whole_gpus},
    leases::{FIXED, devices},
    user,
};

const HISTORY: &str = "/v1/usage/history";

/// Returns a config with which gpushd records each change at once.
fn recording(config: &str) -> String {
    format!("# --constants usage.record=1ms\n{config}")
}

async fn started(host: &Arc<ScriptedHost>, config: &str) -> InProcess {
    let gpushd = host.start(&recording(config)).await;
    gpushd.gpus().await;
    gpushd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_has_ended_and_open_leases_once_over_a_restart() {
    let host = whole_gpus(2);
    let mut gpushd = started(&host, WHOLE).await;
    let ended = gpushd.lease(1000, &whole("0", 1)).await.expect("a lease");
    gpushd.until_recorded(&ended, true).await;
    gpushd.release(&ended).await;
    gpushd.wait_until_ended(&ended).await;
    gpushd.until_recorded(&ended, false).await;
    let open = gpushd.lease(1001, &whole("1", 1)).await.expect("a lease");
    gpushd.until_recorded(&open, true).await;
    for is_restarted in [false, true] {
        if is_restarted {
            gpushd.stop().await;
            gpushd = started(&host, WHOLE).await;
        }
        let history: UsageHistory = gpushd.get(HISTORY).await;
        let leases: Vec<_> = history
            .used_leases
            .iter()
            .map(|lease| (lease.lease_id, lease.user.as_str(), lease.ended_at.is_some(), lease.used_targets.len()))
            .collect();
        assert_eq!(leases, [(open.lease.id, "user1001", false, 1), (ended.lease.id, "user1000", true, 1)]);
        let target = &history.used_leases[0].used_targets[0];
        assert_eq!((target.share_kind.as_str(), target.profile.as_deref()), ("whole", None));
        assert!((target.compute_part - 1.0).abs() < f64::EPSILON && !history.has_older_leases);
        assert_eq!(history.user, None);
    }
    let own: UsageHistory = gpushd.get_as(user(1000), HISTORY).await.expect("the own use");
    assert_eq!(own.used_leases.iter().map(|lease| lease.lease_id).collect::<Vec<_>>(), [ended.lease.id]);
    assert_eq!((own.user.as_deref(), own.request_days.len()), (Some("user1000"), 0));
    let of_other = gpushd.get_as::<UsageHistory>(user(1000), &format!("{HISTORY}?user=user1001")).await;
    assert_eq!(of_other.expect_err("not theirs").code, Code::Denied);
    let named: UsageHistory = gpushd.get(&format!("{HISTORY}?user=user1001")).await;
    assert_eq!((named.used_leases.len(), named.user.as_deref()), (1, Some("user1001")));
    let empty = gpushd.get_as::<UsageHistory>(user(0), &format!("{HISTORY}?since=2999-01-01T00:00:00Z")).await;
    assert!(empty.expect_err("no period").message.contains("the period is empty"));
    let past: UsageHistory =
        gpushd.get(&format!("{HISTORY}?since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00Z")).await;
    assert!(past.used_leases.is_empty() && past.request_days.is_empty());
}

/// The profile of a device, and the requests that found no free device, are in the history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_names_profiles_and_refused_requests() {
    let host = ScriptedHost::new("dgx-h100", 1);
    let gpushd = host.start_with_layouts(&recording(FIXED)).await;
    gpushd.until_layouts_are_settled().await;
    let granted = gpushd.lease(1000, &devices("1g.10gb", 2)).await.expect("both devices");
    let refused = gpushd.lease(1001, &devices("1g.10gb", 1)).await.expect_err("no device is free");
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    gpushd.lease(1001, &json!({ "share": { "kind": "whole" }, "duration_s": 60 })).await.expect_err("no whole GPU");
    gpushd.until_recorded(&granted, true).await;
    gpushd.release(&granted).await;
    gpushd.wait_until_ended(&granted).await;
    gpushd.until_recorded(&granted, false).await;
    let history: UsageHistory = gpushd.get(HISTORY).await;
    let [lease] = history.used_leases.as_slice() else { panic!("{history:?}") };
    let profiles: Vec<_> = lease.used_targets.iter().filter_map(|target| target.profile.as_deref()).collect();
    assert_eq!(profiles, ["1g.10gb", "1g.10gb"]);
    let lines: Vec<_> = history.request_days.iter().flat_map(|day| &day.request_lines).collect();
    let mig = lines.iter().find(|line| line.profile == "1g.10gb").expect("the requests for devices");
    assert_eq!((mig.granted_requests, mig.no_capacity), (1, 1), "{lines:?}");
}
