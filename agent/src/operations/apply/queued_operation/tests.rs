//! The error of an operation that did not begin.

use super::*;

#[test]
fn operation_error_includes_what_the_operation_waited_for() {
    let over = || too_long("op-3", Duration::from_secs(60));
    let last = ApiError::new(Code::Blocked, "GPU 0 is in use").cause("held by a process").hint("end it");
    let ended = because_of(over(), last);
    assert_eq!(ended.message, "operation op-3 could not begin within 1m");
    assert_eq!(ended.causes, ["GPU 0 is in use", "held by a process"]);
    assert_eq!(ended.hint, over().hint, "the hint of the end of the wait");
    // A final refusal of the last attempt is the end itself.
    assert_eq!(because_of(over(), over()), over());
}

#[test]
fn end_of_the_wait_names_the_error_of_each_gpu() {
    let each = ["GPU 0 is in use", "GPU 1 is in use"].map(|message| ApiError::new(Code::Blocked, message));
    let last = ApiError::several("2 of 2 GPUs cannot be changed: GPUs 0, 1", each.to_vec());
    let cancelled = ApiError::new(Code::Cancelled, "root cancelled the operation");
    let ended = because_of(cancelled, last);
    assert_eq!(
        ended.sentences(),
        [
            "root cancelled the operation",
            "2 of 2 GPUs cannot be changed: GPUs 0, 1",
            "GPU 0 is in use",
            "GPU 1 is in use"
        ]
    );
}

#[test]
fn operation_waits_only_for_what_can_change_by_itself() {
    let waits = |code, retryable| {
        let error = ApiError::new(code, "GPU 0 cannot be changed");
        is_retryable(&if retryable { error.retryable() } else { error })
    };
    for code in [Code::Blocked, Code::Conflict, Code::Resetting, Code::Unavailable, Code::Stopping] {
        assert!(waits(code, true) && !waits(code, false), "{code:?}");
    }
    assert!(waits(Code::DriverUnavailable, false) && waits(Code::DriverTimeout, false));
    for code in [Code::UnknownProfile, Code::LayoutImpossible, Code::GpuLost, Code::ConfigInvalid, Code::Denied] {
        assert!(!waits(code, true), "{code:?}");
    }
}
