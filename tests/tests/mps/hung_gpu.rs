//! A GPU whose reading hangs does not delay commands for other GPUs.

use std::time::Duration;

use gpush_tests::hung_gpu::compare;

/// Fault: while the reading of GPU 1 hung, `mps set 0` took 10 s instead of milliseconds.
#[test]
fn hung_gpu_does_not_delay_commands_for_others() {
    let compared = compare(5);
    println!("{compared:#?}");
    // The limit is generous, because other tests run at the same time. The benchmark gives exact
    // durations.
    let slow: Vec<_> = compared.iter().filter(|one| one.hung > one.usual * 4 + Duration::from_millis(400)).collect();
    assert!(slow.is_empty(), "{slow:#?}");
}
