//! Tests of the files of jobs.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use gpush_api::SlurmJobEnd;

use super::*;

fn directory(dir: &tempfile::TempDir) -> Directory {
    Directory::new(&dir.path().join("jobs"), Instant::now() + Duration::from_secs(600))
}

fn run(id: u32, restart: u32, leader: Option<u32>) -> Job {
    let uid = Some(nix::unistd::geteuid().as_raw());
    Job { cluster: "ci".to_owned(), id, node: "n1".to_owned(), uid, restart: Some(restart), leader, ..Job::default() }
}

fn task(job: u32) -> Task {
    Task { job, cluster: Some("ci".to_owned()), node: Some("n1".to_owned()) }
}

fn of_file(restart: u32) -> EndedRun {
    EndedRun::OfFile { restart, may_have_lease: true }
}

fn refused(why: &str) -> JobState {
    JobState::Refused { reasons: vec![why.to_owned()], hint: None }
}

fn state(directory: &Directory, job: u32) -> Option<JobState> {
    match directory.find(&task(job)).unwrap() {
        Found::File(file) => Some(file.state),
        Found::Nothing => None,
        Found::Several => panic!("several files"),
    }
}

/// Returns the names of all files except the lock and the list of places.
fn left(directory: &Directory) -> Vec<String> {
    let mut names = directory.names().unwrap();
    names.retain(|name| name != "lock" && name != "places");
    names.sort();
    names
}

/// Fault: every user could list the directory, and so the ids of all jobs.
#[test]
fn task_finds_its_files_without_listing_the_directory() {
    let places = [HookPlace::new("ci", "n1"), HookPlace::new("b", "n2")];
    let names: Vec<String> = possible_names(41, &places).map(|name| name.to_string()).collect();
    for name in ["ci-41@n1", "ci-41+42@n1", "ci-41+1065@n1", "b-41@n2"] {
        assert!(names.iter().any(|found| found == name), "{name}");
    }
    assert_eq!(names.len(), 2 * 1025);
    assert_eq!(possible_names(u32::MAX, &places).count(), 2, "no id is larger");
}

#[test]
fn file_of_a_job_is_its_users_and_is_found_by_the_leader() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let component = run(42, 0, Some(41));
    directory.begin(&component, None, PossibleLeases::All).unwrap();
    let mode = |name: &str| fs::metadata(dir.path().join("jobs").join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("ci-42@n1"), mode("ci-42@n1+run"), mode("lock"), mode("")), (0o400, 0o600, 0o600, 0o711));
    assert_eq!((state(&directory, 41), state(&directory, 42)), (Some(JobState::Begun), Some(JobState::Begun)));
    // An Epilog may know only the job id.
    directory.remove(&run(42, 0, None), 0);
    assert_eq!(left(&directory), [""; 0], "the link is removed as well");
}

#[test]
fn late_epilog_of_an_earlier_run_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
    let second = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
    directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap();
    let ended = |restart| directory.ended_run(&run(42, restart, None), None);
    assert_eq!((ended(0), ended(1)), (EndedRun::Earlier { restart: Some(0) }, of_file(1)));
    directory.remove(&run(42, 0, None), 0);
    assert_eq!(state(&directory, 42), Some(refused("second")));
    // Slurm runs a second Prolog for the same run.
    let again = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
    assert_eq!(
        directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap(),
        FileWritten::Again
    );
    assert_eq!(
        directory.write(&run(42, 1, None), &again, refused("again"), PossibleLeases::All).unwrap(),
        FileWritten::Yes
    );
    directory.remove(&run(42, 1, None), 1);
    assert_eq!(left(&directory), [""; 0]);
}

/// Case: Slurm 22.05 gives the Epilogs of both runs the restart count of the second run.
#[test]
fn epilog_that_started_before_the_prolog_ends_an_earlier_run() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let ended = |job: &Job, ticks| directory.ended_run(job, Some(&HookStart::at(ticks)));
    let (first, second) = (run(42, 0, None), run(42, 1, None));
    assert_eq!(ended(&first, 1), EndedRun::NoFile);
    directory.begin(&first, Some(HookStart::at(10)), PossibleLeases::All).unwrap();
    assert_eq!(ended(&second, 20), of_file(0));
    assert_eq!(ended(&first, 9), EndedRun::Earlier { restart: None }, "of a job that had this id before");
    directory.begin(&second, Some(HookStart::at(30)), PossibleLeases::All).unwrap();
    assert_eq!(ended(&second, 20), EndedRun::Earlier { restart: Some(0) });
    assert_eq!(ended(&second, 40), of_file(1));
    assert_eq!(directory.ended_run(&second, None), of_file(1), "/proc cannot be read");
}

#[test]
fn refused_run_has_no_lease_but_an_earlier_run_may_have_one() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let may_have_lease = |job: &Job| match directory.ended_run(job, None) {
        EndedRun::OfFile { may_have_lease, .. } => may_have_lease,
        other => panic!("{other:?}"),
    };
    let refuse = |job: &Job, asked, leases| {
        let run = directory.begin(job, None, asked).unwrap();
        directory.write(job, &run, refused("why"), leases).unwrap();
        may_have_lease(job)
    };
    let (first, second) = (run(42, 0, None), run(42, 1, None));
    assert!(!refuse(&first, PossibleLeases::Earlier, PossibleLeases::Earlier), "refused without gpushd");
    directory.begin(&first, None, PossibleLeases::All).unwrap();
    assert!(may_have_lease(&first));
    assert!(refuse(&second, PossibleLeases::Earlier, PossibleLeases::Earlier), "gpushd does not know it yet");
    assert!(!refuse(&second, PossibleLeases::All, PossibleLeases::None), "gpushd refused it");
    // Simulates an Epilog that removed the file of a run but could not reach gpushd.
    directory.remove(&second, 1);
    let end = SlurmJobEnd { cluster: "ci".to_owned(), job: 42, node: "n1".to_owned(), restart: 1, until_ms: 0 };
    directory.note_end(&end).unwrap();
    assert!(refuse(&run(42, 2, None), PossibleLeases::Earlier, PossibleLeases::Earlier));
}

/// Case: slurmd was killed, and the Prolog of the first run continues without it.
#[test]
fn late_prolog_of_an_earlier_run_writes_and_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let first = directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
    let second = directory.begin(&run(42, 1, None), None, PossibleLeases::All).unwrap();
    directory.write(&run(42, 1, None), &second, refused("second"), PossibleLeases::All).unwrap();
    assert_eq!(
        directory.write(&run(42, 0, None), &first, refused("first"), PossibleLeases::All).unwrap(),
        FileWritten::Late
    );
    directory.remove_run(&run(42, 0, None), &first);
    assert_eq!(state(&directory, 42), Some(refused("second")));
    // Simulates an Epilog, which removes the file.
    directory.remove(&run(42, 1, None), 1);
    assert_eq!(
        directory.write(&run(42, 1, None), &second, refused("late"), PossibleLeases::All).unwrap(),
        FileWritten::Late
    );
    assert_eq!(left(&directory), [""; 0]);
}

/// Fault: the leader's file replaced the link to the component's file. If the leader then needed no lease, tasks found
/// no file.
#[test]
fn leader_and_component_have_files_of_different_names() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let (component, leader) = (run(42, 0, Some(41)), run(41, 0, None));
    let of_component = directory.begin(&component, None, PossibleLeases::All).unwrap();
    directory.write(&component, &of_component, refused("component"), PossibleLeases::All).unwrap();
    let of_leader = directory.begin(&leader, None, PossibleLeases::All).unwrap();
    assert_eq!(state(&directory, 41), Some(JobState::Begun));
    directory.remove_run(&leader, &of_leader);
    assert_eq!(state(&directory, 41), Some(refused("component")));
    // This time, the component's file is removed before the leader's.
    directory.begin(&leader, None, PossibleLeases::All).unwrap();
    directory.remove(&component, 0);
    assert_eq!(state(&directory, 41), Some(JobState::Begun));
    directory.remove(&leader, 0);
    assert_eq!(left(&directory), [""; 0]);
}

/// Fault: hooks read the restart count from a file that the user owned.
#[test]
fn contents_of_the_users_file_decide_nothing_for_hooks_of_root() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    directory.begin(&run(42, 0, None), None, PossibleLeases::All).unwrap();
    let path = dir.path().join("jobs/ci-42@n1");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, r#"{"cluster":"ci","job":42,"node":"n1","restart":4294967295,"state":"passed"}"#).unwrap();
    assert_eq!(directory.ended_run(&run(42, 0, None), None), of_file(0));
    directory.remove(&run(42, 0, None), 0);
    assert_eq!(left(&directory), [""; 0]);
}

/// Case: Prologs and Epilogs of two runs run at the same time. At the end, the file of the later run must exist.
#[test]
fn concurrent_hooks_leave_the_file_of_the_last_run() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    for round in 0..200 {
        let old = run(42, 2 * round, Some(41));
        let of_old = directory.begin(&old, None, PossibleLeases::All).unwrap();
        let new = run(42, 2 * round + 1, Some(41));
        std::thread::scope(|scope| {
            scope.spawn(|| directory.remove(&old, 2 * round));
            scope.spawn(|| directory.remove_run(&old, &of_old));
            scope.spawn(|| directory.write(&old, &of_old, refused("old"), PossibleLeases::All).map(drop).unwrap());
            let of_new = directory.begin(&new, None, PossibleLeases::All).unwrap();
            directory.write(&new, &of_new, refused("new"), PossibleLeases::All).unwrap();
        });
        assert_eq!(state(&directory, 42), Some(refused("new")), "round {round}");
        assert_eq!(left(&directory), ["ci-41+42@n1", "ci-42@n1", "ci-42@n1+run"], "round {round}");
    }
}

/// A Prolog whose file cannot be read must not let the job run without a lease.
#[test]
fn run_is_current_until_its_file_is_replaced_or_removed() {
    let dir = tempfile::tempdir().unwrap();
    let directory = directory(&dir);
    let (first, second) = (run(42, 0, None), run(42, 1, None));
    let begun = directory.begin(&first, None, PossibleLeases::All).unwrap();
    assert!(directory.is_current(&first, &begun));
    let record = dir.path().join("jobs").join("ci-42@n1+run");
    let written = fs::read(&record).unwrap();
    fs::write(&record, "{").unwrap();
    assert!(directory.is_current(&first, &begun), "the file cannot be read");
    fs::write(&record, written).unwrap();
    let later = directory.begin(&second, None, PossibleLeases::All).unwrap();
    assert!(!directory.is_current(&first, &begun) && directory.is_current(&second, &later));
    directory.remove(&second, 1);
    assert!(!directory.is_current(&second, &later));
}
