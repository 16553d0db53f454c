//! Rules that enforce leases, on a host that cannot enforce them: this gpushd is not the system service.

use gpush_api::{Code, DeviceEnforcement, EnforcementPlan, EnforcementState, Health, HealthStatus, LeaseGrant};
use serde_json::{Value, json};

use super::{InProcess, user};

fn rules(missing: &str) -> String {
    format!(
        "[[gpu]]\nname = \"strict\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\nlease = \"enforced\"\n{missing}\n\
         [[gpu]]\nmatch = [\"1\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n"
    )
}

fn device(gpus: &[&str]) -> Value {
    json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" }, "duration_s": 600, "selectors": gpus })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_that_the_host_does_not_enforce_grants_nothing() {
    let host = InProcess::start("dgx-h100", 2, &rules("")).await;
    for caller in [user(1000), user(0)] {
        let refused = host.post_as::<LeaseGrant>(caller, "/v1/leases", &device(&["0"])).await.unwrap_err();
        assert_eq!(refused.code, Code::Unavailable, "{refused:?}");
        assert!(refused.message.contains("GPU 0") && refused.message.contains("`strict`"), "{refused:?}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("gpushctl enforce on")));
    }
    // A request that does not name the GPU gets another one.
    let granted: LeaseGrant = host.post_as(user(1000), "/v1/leases", &device(&[])).await.expect("GPU 1");
    let status: DeviceEnforcement = host.get("/v1/enforcement").await;
    assert_eq!(status.state, EnforcementState::Off);
    assert_eq!((status.enforced_gpus.len(), granted.lease.members.len()), (1, 1));
    let health: Health = host.get("/v1/health").await;
    assert_eq!(health.status, HealthStatus::Degraded);
    let error = health.errors.iter().find(|error| error.message == "leases of GPU 0 are not enforced");
    assert!(error.is_some_and(|error| !error.causes.is_empty()), "{:?}", health.errors);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_enforcement_grants_if_the_rule_says_so() {
    let host = InProcess::start("dgx-h100", 2, &rules("enforce_missing = \"grant\"")).await;
    let granted: LeaseGrant = host.post_as(user(1000), "/v1/leases", &device(&["0"])).await.expect("a lease");
    assert_eq!(granted.lease.device_access, None, "nothing limits its devices");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_that_is_not_the_system_service_enforces_nothing() {
    let host = InProcess::start("dgx-h100", 1, "").await;
    let refused = host.post::<Value>("/v1/enforcement/on", &json!({})).await.unwrap_err();
    assert!(refused.code == Code::Unsupported && refused.hint.is_some(), "{refused:?}");
    let plan: EnforcementPlan = host.get("/v1/enforcement/plan").await;
    assert!(plan.unsupported.is_some() && plan.effects.is_empty());
    let refused = host.post_as::<Value>(user(1000), "/v1/enforcement/on", &json!({})).await.unwrap_err();
    assert_eq!(refused.code, Code::Denied);
    let refused = host.post_as::<Value>(user(1000), "/v1/enforcement/shell", &json!({})).await.unwrap_err();
    assert_eq!(refused.code, Code::Denied);
    let health: Health = host.get("/v1/health").await;
    assert_eq!(health.status, HealthStatus::Ok, "no rule enforces leases: {:?}", health.errors);
}
