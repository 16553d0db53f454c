//! Tests of `gpushctl metrics`.

mod relay;
mod serve;
mod tls;
mod write;

use gpush_api::{ApiError, Code};

use crate::support::{Agent, Answer, Host, Request};

const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics that every user may see, and those of leases.
const PUBLIC: &str = "gpush_gpu_power_watts{uuid=\"GPU-1\"} 70\n";
const OF_LEASES: &str = "gpush_lease_info{lease=\"L1\",user=\"anna\"} 1\n";

/// Answers as gpushd does for a user in `metrics.readers`.
fn metrics(request: &Request) -> Answer {
    let content_type = if request.accept.contains("openmetrics") { OPEN_METRICS } else { CLASSIC };
    match request.path.as_str() {
        "/metrics" => Answer::Text(content_type, format!("{PUBLIC}{OF_LEASES}")),
        "/metrics?labels=public" => Answer::Text(content_type, PUBLIC.to_owned()),
        _ => Answer::error(&ApiError::new(Code::NotFound, "no such path")),
    }
}

fn agent(host: &Host) -> Agent {
    Agent::listen(&host.path("gpushd.sock"), metrics)
}

#[test]
fn metrics_are_printed_as_requested() {
    let host = Host::new();
    let agent = agent(&host);
    let printed = host.run(&["metrics"]);
    assert_eq!(printed, format!("$ gpushctl metrics\n{PUBLIC}{OF_LEASES}[exit 0]\n"));
    let printed = host.run(&["metrics", "show", "--public"]);
    assert_eq!(printed, format!("$ gpushctl metrics show --public\n{PUBLIC}[exit 0]\n"));
    let output = host.command(&["metrics", "show", "--openmetrics", "--json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["content_type"], OPEN_METRICS);
    assert_eq!(document["text"], format!("{PUBLIC}{OF_LEASES}"));
    assert_eq!(agent.asked(), ["GET /metrics", "GET /metrics?labels=public", "GET /metrics"]);
}
