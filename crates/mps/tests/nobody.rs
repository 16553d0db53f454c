//! Listeners on a daemon's socket that are not control daemons. The conformance tests of
//! `sim/mps-sim` cover control daemons: NVIDIA's daemon and the simulated daemon.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{os::unix::net::UnixListener, path::Path, time::Duration};

use gpush_mps::protocol::{
    control::{Control, ControlError},
    session::SessionError,
};

#[tokio::test]
async fn listeners_that_are_not_daemons_are_distinguished() {
    let long = Duration::from_secs(10);
    let absent = Control::of(Path::new("/nonexistent")).daemon(long).await.unwrap_err();
    assert!(matches!(absent, ControlError::Session(SessionError::Absent { .. })), "{absent:?}");
    let dir = tempfile::tempdir().unwrap();
    let other = UnixListener::bind(dir.path().join("control_privileged")).unwrap();
    let stream = Control::of(dir.path()).daemon(long).await.unwrap_err();
    assert!(matches!(stream, ControlError::Session(SessionError::System(_))), "{stream:?}");
    drop(other);
}
