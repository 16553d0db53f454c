//! Metrics of faults: Xid errors, cordons, remapped memory rows, unleased processes, the driver.

use gpush_openmetrics::Family;

use crate::state::{GpuSnapshot, HostState};

/// Returns the metrics of faults. They name no user.
pub(super) fn families(host: &HostState) -> Vec<Family> {
    let mut driver = Family::gauge("gpush_driver_up", "Whether the driver answers. Absent during maintenance.");
    if host.maintenance.is_none() {
        driver.add([], flag(host.driver.is_none()));
    }
    let mut families = GpuFamilies::new();
    for one in &host.gpus {
        families.add(one);
    }
    let [errors, last] = xids(host);
    let GpuFamilies { cordon, rows, pending, failed, unleased } = families;
    vec![driver, cordon, errors, last, rows, pending, failed, unleased]
}

/// The families with series of one GPU.
struct GpuFamilies {
    cordon: Family,
    rows: Family,
    pending: Family,
    failed: Family,
    unleased: Family,
}

impl GpuFamilies {
    fn new() -> Self {
        Self {
            cordon: Family::gauge("gpush_gpu_cordon", "Cordons of a GPU; the value is 1."),
            rows: Family::gauge("gpush_gpu_remapped_rows", "Memory rows that were replaced, by the kind of error."),
            pending: Family::gauge("gpush_gpu_row_remap_pending", "Whether the next reset replaces a memory row."),
            failed: Family::gauge("gpush_gpu_row_remap_failed", "Whether a memory row could not be replaced."),
            unleased: Family::gauge("gpush_gpu_unleased_processes", "Processes that must not use a GPU."),
        }
    }

    fn add(&mut self, one: &GpuSnapshot) {
        let uuid = one.gpu.uuid.as_str();
        for cordon in &one.gpu.cordons {
            self.cordon.add([("uuid", uuid), ("cause", &*cordon.cause)], 1.0);
        }
        if let Some(rows) = one.rows {
            for (error, count) in [("correctable", rows.correctable), ("uncorrectable", rows.uncorrectable)] {
                self.rows.add([("uuid", uuid), ("error", error)], f64::from(count));
            }
            self.pending.add([("uuid", uuid)], flag(rows.pending));
            self.failed.add([("uuid", uuid)], flag(rows.failed));
        }
        if one.gpu.processes_known && !one.gpu.stale {
            #[expect(clippy::cast_precision_loss, reason = "a host has fewer than 2^23 processes")]
            self.unleased.add([("uuid", uuid)], one.gpu.unleased.len() as f64);
        }
    }
}

/// Returns the number of reports of each Xid error, and the time of the last report.
fn xids(host: &HostState) -> [Family; 2] {
    let mut errors = Family::counter("gpush_gpu_xid_errors", "Xid errors that the driver reported to this gpushd.");
    let mut last = Family::gauge("gpush_gpu_xid_last_timestamp_seconds", "Time of the last report of an Xid error.");
    for (uuid, xid, count) in host.xids.iter() {
        let xid = xid.to_string();
        let labels = || [("uuid", uuid.as_str()), ("xid", &*xid)];
        #[expect(clippy::cast_precision_loss, reason = "few reports")]
        errors.add(labels(), count.reports as f64);
        #[expect(clippy::cast_precision_loss, reason = "a time in this millennium")]
        last.add(labels(), count.last.as_millisecond() as f64 / 1000.0);
    }
    [errors, last]
}

fn flag(is: bool) -> f64 {
    if is { 1.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gpush_api::{Process, ProcessKind, UnleasedProcess};
    use gpush_nvml::RemappedRows;
    use gpush_openmetrics::{Format, render};

    use super::*;
    use crate::state::{
        State,
        tests::{cordon, list, read},
    };

    fn lines(host: &HostState) -> Vec<String> {
        let text = render(&families(host), Format::Classic);
        let is_series = |line: &&str| !line.starts_with('#') && !line.contains("_timestamp_seconds");
        text.lines().filter(is_series).map(str::to_owned).collect()
    }

    fn unleased() -> UnleasedProcess {
        let (pid, uid, user) = (Some(1), Some(1000), Some("alice".to_owned()));
        let kind = ProcessKind::Compute;
        let process = Process { pid, uid, user, command: None, kind, memory_mib: None, unidentified: false };
        UnleasedProcess { target: "GPU-0".into(), device: None, process, why: "its user holds no lease".to_owned() }
    }

    #[test]
    fn faults_of_a_gpu_have_series() {
        let state = State::empty();
        list(&state, &[0]);
        read(&state, 0);
        state.apply(&[cordon("GPU-0")]);
        for xid in [79, 31, 79] {
            state.count_xid(&"GPU-0".into(), xid);
        }
        let mut host = HostState::clone(&state.now());
        let mut gpu = GpuSnapshot::of(host.gpus[0].gpu.clone());
        gpu.rows = Some(RemappedRows { correctable: 2, uncorrectable: 0, pending: true, failed: false });
        gpu.gpu.unleased = vec![unleased()];
        host.gpus = vec![Arc::new(gpu)];
        let expected = [
            "gpush_driver_up 1",
            r#"gpush_gpu_cordon{uuid="GPU-0",cause="admin"} 1"#,
            r#"gpush_gpu_xid_errors_total{uuid="GPU-0",xid="31"} 1"#,
            r#"gpush_gpu_xid_errors_total{uuid="GPU-0",xid="79"} 2"#,
            r#"gpush_gpu_remapped_rows{uuid="GPU-0",error="correctable"} 2"#,
            r#"gpush_gpu_remapped_rows{uuid="GPU-0",error="uncorrectable"} 0"#,
            r#"gpush_gpu_row_remap_pending{uuid="GPU-0"} 1"#,
            r#"gpush_gpu_row_remap_failed{uuid="GPU-0"} 0"#,
            r#"gpush_gpu_unleased_processes{uuid="GPU-0"} 1"#,
        ];
        assert_eq!(lines(&host), expected);
    }

    #[test]
    fn unreadable_processes_are_not_counted_as_zero() {
        let state = State::empty();
        list(&state, &[0]);
        read(&state, 0);
        let mut gpu = GpuSnapshot::of(state.now().gpus[0].gpu.clone());
        gpu.gpu.processes_known = false;
        let host = HostState { gpus: vec![Arc::new(gpu)], ..HostState::clone(&state.now()) };
        assert_eq!(lines(&host), ["gpush_driver_up 1"]);
    }
}
