//! Drawings of MPS targets and processes.

use gpush_api::{MpsLog, MpsLogs, MpsSetResponse, MpsState};

use super::*;
use crate::render::{
    mps::{self, change, clients, list, show as daemon},
    processes,
};

#[test]
fn targets_as_a_table() {
    let all = fixtures::mps::all();
    for width in [60, 80, 120] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("mps-list-{width}"), fits(list::list(&all, &[], &look).text(), &look));
    }
    let ascii = fixtures::look(100, Charset::Ascii);
    let text = fits(list::list(&all, &[], &ascii).text(), &ascii);
    assert!(text.is_ascii(), "{text}");
    let pipe = Appearance { wraps: false, ..fixtures::look(60, UTF8) };
    let lines = fixtures::plain(list::list(&all, &[], &pipe).text());
    assert!(all.iter().all(|one| lines.lines().any(|line| line.starts_with(&mps::argument(one)))), "{lines}");
    // The list of a target without problems has only a heading and one line.
    assert_eq!(list::list(&[fixtures::mps::daemon(0)], &[], &pipe).text().lines().count(), 2);
    let look = fixtures::look(80, UTF8);
    assert_snapshot!("mps-list-none", fits(list::list(&[], &[], &look).text(), &look));
}

#[test]
fn targets_in_colour() {
    let look = fixtures::look(80, UTF8);
    // Replace escape characters, so that a difference in the snapshot is readable.
    assert_snapshot!("mps-list-colour", list::list(&fixtures::mps::all(), &[], &look).text().replace('\x1b', "^["));
}

#[test]
fn target_with_all_details() {
    for (name, one) in [
        ("busy", fixtures::mps::busy()),
        ("given-up", fixtures::mps::all().remove(5)),
        ("long", fixtures::mps::all().remove(6)),
        ("device", fixtures::mps::all().remove(2)),
    ] {
        let look = fixtures::look(80, UTF8);
        assert_snapshot!(format!("mps-show-{name}"), fits(&daemon::show(&one, &look), &look));
    }
    let narrow = fixtures::look(60, Charset::Ascii);
    let text = fits(&daemon::show(&fixtures::mps::busy(), &narrow), &narrow);
    assert!(text.is_ascii());
    assert_snapshot!("mps-show-60", text);
}

/// Fault: a GPU whose MPS daemon an administrator had stopped looked idle, and nothing named the next command.
#[test]
fn gpu_with_a_stopped_daemon_is_reserved_and_names_the_next_command() {
    let look = fixtures::look(80, UTF8);
    let mut daemon = fixtures::mps::daemon(4);
    (daemon.state, daemon.stays_stopped, daemon.pid, daemon.in_force) = (MpsState::Stopped, true, None, None);
    let gpu = Gpu { mode: Mode::Mps, ..fixtures::gpu(4, "A100-SXM4-80GB", 81_920, None) };
    let mut shown = fixtures::status(vec![gpu], false);
    shown.mps = vec![daemon];
    let drawn = |brief| fits(&crate::render::status::status(&shown, brief, &look), &look);
    let text = drawn(true) + "---\n" + &drawn(false);
    assert_snapshot!("status-mps-stopped", text);
}

#[test]
fn daemon_that_waits_for_an_orphan_shows_no_failure() {
    let look = fixtures::look(80, UTF8);
    let mut waiting = fixtures::mps::all().remove(4);
    waiting.failures = 0;
    let why = "a server, which the previous daemon left, still serves 1 client";
    waiting.reasons = vec![why.into(), "gpushd tries again until it can start a daemon".into()];
    let text = mps::notes(&waiting, "! ", &look).join("\n") + "\n" + &change::waits(&waiting, &look);
    assert!(!text.contains("failed 0 times") && text.contains("next check in 8s: a server"), "{text}");
    assert_snapshot!("mps-waits-for-an-orphan", fixtures::plain(&text));
}

#[test]
fn clients_of_mps() {
    let all = fixtures::mps::all();
    let look = fixtures::look(80, UTF8);
    let mut text = fits(clients::all(&all, &look).text(), &look);
    text += "---\n";
    text += &fits(clients::all(&all[..1], &look).text(), &look);
    text += "---\n";
    text += clients::all(&[fixtures::mps::daemon(3)], &look).text();
    text += clients::all(&[fixtures::mps::daemon(3), fixtures::mps::daemon(4)], &look).text();
    text += clients::all(&[], &look).text();
    assert_snapshot!("mps-clients", text);
}

#[test]
fn result_of_each_mps_change() {
    let look = fixtures::look(80, UTF8);
    let all = fixtures::mps::all();
    let mut text = String::new();
    for one in &all {
        text += &fits(&change::ended(one, false, &look), &look);
        text += &format!("  meanwhile: {}\n", change::waits(one, &look));
    }
    // Fault: the text did not name the clients that prevented the end of the daemon.
    text += &format!("---\n{}", fits(&change::not_stopped(&all[0], &look), &look));
    let reaches = ["the server of alice and its 3 clients keep their limits", "clients of the next server get it"];
    let set = MpsSetResponse { daemon: fixtures::mps::busy(), reaches: reaches.map(str::to_owned).to_vec() };
    text += &format!("---\n{}", fits(&change::set(&set, &look), &look));
    let later = MpsSetResponse { daemon: all[3].clone(), reaches: Vec::new() };
    text += &fits(&change::set(&later, &look), &look);
    let denied = ApiError::new(Code::Denied, "the log can't be read").cause("Permission denied");
    let log = |name: &str, lines: &[&str], error| MpsLog {
        path: format!("/var/log/gpush/mps/g00000000/{name}.log"),
        lines: lines.iter().map(|line| (*line).to_owned()).collect(),
        left_out: if name == "quiet" { 12 } else { 0 },
        error,
    };
    let control = log("control", &["[2026-11-22 04:00:00.001 Control  4100] Start", "a\u{1b}[2Jb"], None);
    let logs = MpsLogs {
        files: vec![control, log("server", &[], None), log("quiet", &[], None), log("other", &[], Some(denied))],
    };
    text += &format!("---\n{}", fits(&change::logs(&logs, &look), &look));
    assert_snapshot!("mps-changes", text);
}

#[test]
fn every_mps_state_has_a_word_and_a_meaning() {
    let look = fixtures::look(80, UTF8);
    for state in [
        MpsState::Stopped,
        MpsState::Starting,
        MpsState::Ready,
        MpsState::Fault,
        MpsState::Hung,
        MpsState::BackingOff,
        MpsState::GivenUp,
        MpsState::Draining,
        MpsState::Stopping,
    ] {
        let one = gpush_api::MpsDaemon { state, ..fixtures::mps::daemon(0) };
        assert_eq!(mps::state(state).0, state.name().replace('_', " "));
        assert!(
            list::list(std::slice::from_ref(&one), &[], &look)
                .text()
                .contains(mps::state(state).0.split(' ').next().unwrap())
        );
        let quiet = matches!(state, MpsState::Stopped | MpsState::Starting | MpsState::Ready | MpsState::Stopping);
        assert_eq!(mps::notes(&one, "! ", &look).is_empty(), quiet, "{state:?}");
    }
}

#[test]
fn gpus_with_their_mps() {
    let look = fixtures::look(80, UTF8);
    let mut gpus = fixtures::mixed();
    gpus[0].mig = None;
    gpus[0].mode = Mode::Mps;
    gpus[1].layout = Some(vec!["2g.20gb:mps".into(), "3g.40gb:mps".into()]);
    gpus.truncate(3);
    assert_eq!(gpus.iter().map(list::concerns).collect::<Vec<_>>(), [true, true, false]);
    let mut shown = fixtures::status(gpus.clone(), false);
    shown.mps = fixtures::mps::all();
    assert_snapshot!("status-mps", drawn(&shown, false, &look));
    assert_snapshot!("status-mps-brief", drawn(&shown, true, &look));
    let narrow = fixtures::look(72, Charset::Ascii);
    assert!(drawn(&shown, false, &narrow).is_ascii());
    assert_snapshot!("gpu-show-mps", fixtures::plain(&show::gpu(&gpus[1], &shown.devices, &shown.mps, &[], &look)));
}

#[test]
fn processes_as_a_table() {
    let all = fixtures::mps::processes();
    for width in [60, 80, 140] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("process-list-{width}"), fits(processes::list(&all, false, &look).text(), &look));
    }
    let look = fixtures::look(80, UTF8);
    let none = gpush_api::GpuProcesses { processes: Vec::new(), unknown: Vec::new(), ..all.clone() };
    assert_eq!(processes::list(&none, true, &look).text(), "No unleased process.\n");
    assert_eq!(processes::list(&none, false, &look).text(), "No process uses a GPU.\n");
    let pipe = Appearance { wraps: false, ..fixtures::look(60, UTF8) };
    let text = fixtures::plain(processes::list(&all, false, &pipe).text());
    let rows = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit() || c == 'G' || c == 'T'));
    assert_eq!(rows.count(), 1 + all.processes.len() + 1, "a line a process, the heading, the foot:\n{text}");
    assert!(text.contains("/srv/imagenet"), "nothing is cut:\n{text}");
}
