//! Kills thousands of clients of the simulated driver at random moments. The host must stay consistent.
//!
//! As with a real driver, a killed client must leave no partly written state, and no lock without
//! an owner. The crash tests of gpushd rely on this.

use gpush_tests::host::{Host, program};

/// Number of kills. `cargo xtask soak` sets a larger number in `GPUSH_TEST_KILLS`.
const KILLS: u64 = 3_000;

#[test]
fn state_stays_valid_after_thousands_of_sigkills() {
    let kills = std::env::var("GPUSH_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    let host = Host::up("dgx-a100");
    let output = host
        .command(program("nvml-churn"))
        .args(["--kills", &kills.to_string(), "--seed", &std::process::id().to_string()])
        .output()
        .expect("nvml-churn can be started");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    print!("{printed}");
    assert!(printed.starts_with(&format!("{kills} SIGKILLs")), "{printed}");
    assert_eq!(host.show()["clients"], serde_json::json!([]));
}
