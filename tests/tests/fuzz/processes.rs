//! Texts of the kernel and of other programs: `/proc`, cgroups, MPS frames and logs, frames of the driver worker.

use gpush_host::{
    cgroup::{self, CgroupKind, Membership},
    proc::Status,
};
use gpush_mps::{daemon::log, protocol::wire};
use gpush_nvml::proto::{self, ToParent, ToWorker};

use super::runner::{assert_bounded, fuzz};

#[test]
fn status_of_a_process() {
    fuzz("proc_status", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let Some(status) = Status::parse(&text) else { return };
        assert!(status.groups.len() <= text.len() && status.pids.len() <= text.len());
        let _ = status.uid();
    });
}

#[test]
fn cgroups() {
    fuzz("cgroups", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        if let Some(membership) = Membership::parse(&text) {
            assert_bounded(format!("{membership:?}").len(), bytes, 8, 256);
        }
        assert_bounded(format!("{:?}", CgroupKind::parse(&text)).len(), bytes, 8, 256);
        let _ = cgroup::is_in_container(&text);
        for path in text.lines() {
            assert!(!cgroup::contains(path, "0::/other\n") || "/other".starts_with(path) || path == "/");
        }
    });
}

#[test]
fn mps_frames() {
    fuzz("mps_frames", |bytes| {
        match wire::frame(bytes) {
            Some(wire::Frame::Text(text)) => assert_bounded(text.len(), bytes, 3, 0),
            Some(wire::Frame::Status(_)) => assert_eq!(bytes.len(), 8),
            None => {}
        }
        if let Some((length, frame)) = wire::command(&String::from_utf8_lossy(bytes)) {
            assert_eq!(u64::from_le_bytes(length), frame.len() as u64);
            // The daemon treats each line as a command, so a frame must have one line.
            assert_eq!(frame.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert!(frame.len() <= wire::LONGEST_COMMAND + 2);
        }
    });
}

#[test]
fn mps_logs() {
    let dir = tempfile::tempdir().unwrap();
    fuzz("mps_logs", |bytes| {
        for name in ["control.log", "server.log"] {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        for all in [false, true] {
            let logs = log::last(dir.path(), 20, all);
            for file in logs.files {
                assert!(file.error.is_none(), "{file:?}");
                assert!(file.lines.len() <= 20, "{} lines", file.lines.len());
                let lines: usize = file.lines.iter().map(String::len).sum();
                assert_bounded(lines, bytes, 3, 0);
                assert!(file.lines.iter().all(|line| !line.contains('\u{1b}') && line.chars().count() <= 4096));
            }
        }
    });
}

#[test]
fn worker_frames() {
    fuzz("worker_frames", |bytes| {
        // A frame of the corpus is only the JSON text.
        let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
        for stream in [[&length, bytes].concat(), bytes.to_vec()] {
            if let Ok(Some(frame)) = proto::read::<ToParent>(&mut stream.as_slice()) {
                let printed = proto::encode(&frame).unwrap();
                assert_bounded(printed.len(), bytes, 4, 8192);
                let again = proto::read::<ToParent>(&mut printed.as_slice()).unwrap();
                assert_eq!(format!("{again:?}"), format!("{:?}", Some(frame)));
            }
            if let Ok(Some(frame)) = proto::read::<ToWorker>(&mut stream.as_slice()) {
                let printed = proto::encode(&frame).unwrap();
                assert_bounded(printed.len(), bytes, 4, 8192);
            }
        }
    });
}
