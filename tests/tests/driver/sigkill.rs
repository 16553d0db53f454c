//! 10,000 clients of the simulated driver killed at random moments: the host stays whole.
//!
//! The agent's crash tests rest on this: what a killed process leaves behind must be what the
//! driver would have, never a torn state or a lock that nobody holds.

use gpush_tests::host::{Host, program};

/// Kills; fewer on request (`GPUSH_TEST_KILLS`), for machines in a hurry.
const KILLS: u64 = 10_000;

#[test]
fn the_state_stays_valid_through_ten_thousand_sigkills_of_clients() {
    let kills = std::env::var("GPUSH_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    let host = Host::up("dgx-a100");
    let output = host
        .command(program("nvml-churn"))
        .args(["--kills", &kills.to_string(), "--seed", &std::process::id().to_string()])
        .output()
        .expect("nvml-churn can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    print!("{said}");
    assert!(said.starts_with(&format!("{kills} SIGKILLs")), "{said}");
    assert_eq!(host.show()["clients"], serde_json::json!([]));
}
