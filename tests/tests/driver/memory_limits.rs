//! Limits of the memory of a cgroup: gpushd says whether the driver has them, and makes no call that accesses a GPU.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use gpush_tests::{
    driver::{hardware, uuids},
    host::{Host, Traced},
};

#[tokio::test]
async fn memory_limits_are_known_from_driver_615() {
    for (driver, has) in [("550.163.01", false), ("610.43.02", false), ("615.71.09", true)] {
        let host = Host::up(&format!("driver = \"{driver}\"\n[[gpu]]\nmodel = \"l4\"\n"));
        host.start_trace();
        let hardware = hardware(&host);
        uuids(&hardware).await;
        let info = hardware.driver().await.unwrap();
        assert_eq!((info.version.as_str(), info.memory_limits), (driver, has));
        let of_gpu = |call: &Traced| call.function.contains("MemoryLimits") && call.gpu.is_some();
        assert!(!host.trace().iter().any(of_gpu), "{driver}");
    }
}
