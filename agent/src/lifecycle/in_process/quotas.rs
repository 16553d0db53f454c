//! Quotas that users can see: limits, use, and what is left.

use gpush_api::{ApiError, Code, QuotaResource, QuotaView};

use super::{InProcess, leases::devices, user};

const CONFIG: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n\
                      [[quota]]\neverybody = true\nkinds = [\"mig\"]\nleases = 2\nmemory = \"40G\"\nlongest = \"12h\"\n";

fn limit(quota: &QuotaView, resource: QuotaResource) -> (f64, Option<f64>, Option<f64>) {
    let limit = quota.limits.iter().find(|limit| limit.resource == resource).expect("the limit");
    (limit.used, limit.maximum, limit.amount_left)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quota_of_caller_shows_what_is_left() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    let quota = async |uid| {
        let all: Vec<QuotaView> = host.get_as(user(uid), "/v1/quotas").await.expect("the own quota");
        assert_eq!((all.len(), all[0].uid), (1, uid));
        all.into_iter().next().expect("one quota")
    };
    let before = quota(1000).await;
    assert_eq!((before.quota.as_deref(), before.longest_s), (Some("everybody"), Some(43_200)));
    assert_eq!(limit(&before, QuotaResource::Leases), (0.0, Some(2.0), Some(2.0)));
    let granted = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    let now = quota(1000).await;
    assert_eq!(limit(&now, QuotaResource::Leases), (1.0, Some(2.0), Some(1.0)));
    let (used, maximum, left) = limit(&now, QuotaResource::MemoryMib);
    #[expect(clippy::cast_precision_loss, reason = "a few thousand MiB")]
    let size = granted.lease.members[0].memory_mib as f64;
    assert_eq!((used, maximum, left), (size, Some(40_960.0), Some(40_960.0 - size)));
    assert_eq!(limit(&quota(1001).await, QuotaResource::Leases).0, 0.0, "another user");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_of_other_users_are_for_administrators() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    for path in ["/v1/quotas?uid=1000", "/v1/quotas?all=true"] {
        let refused: ApiError = host.get_as::<Vec<QuotaView>>(user(1001), path).await.unwrap_err();
        assert_eq!(refused.code, Code::Denied, "{path}");
        let seen: Vec<QuotaView> = host.get(path).await;
        assert_eq!(seen.iter().map(|quota| quota.uid).collect::<Vec<_>>(), [1000], "{path}");
    }
    let root: Vec<QuotaView> = host.get("/v1/quotas").await;
    assert!(root[0].quota.is_none() && root[0].limits.iter().all(|limit| limit.maximum.is_none()), "{root:?}");
    let bad = host.get_as::<Vec<QuotaView>>(user(1000), "/v1/quotas?user=anna").await.unwrap_err();
    assert_eq!(bad.code, Code::BadRequest);
}
