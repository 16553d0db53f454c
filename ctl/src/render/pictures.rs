//! Snapshots of all drawings, at 80 and 120 columns, in UTF-8 and ASCII.

use std::sync::Arc;

use gpush_api::{
    Actor, ApiError, Code, ConfigDiff, ConfigView, DesiredView, Gpu, GpuDiff, GpuState, InstanceStep, LeaseAccess,
    MigModeStep, Mode, MpsPolicy, MpsSettings, NamedLayout, OperationState, OperationSummary, Override, OverrideEnded,
    Overrides, PendingRestart, Placement, Plans, Refusal, Reloaded, RuleView, SettingDiff, Step, TimesliceLevel,
    TimeslicePolicy,
};
use insta::assert_snapshot;

use super::{
    Appearance, Charset, appearance, config, fixtures, gpu, gpu_list, gpu_notes, names, operation, operation_list,
    overrides, plan, profiles, show, status, summary, trouble,
};

mod configs;
mod gpus;
mod leases;
mod lists;
mod mps;
mod operations;
mod statuses;

const UTF8: Charset = Charset::Utf8;

/// Checks that no line of a drawing is too long for the terminal. Returns the drawing without
/// colors. Do not use this function for drawings with text that users copy, because their lines may
/// be longer.
fn fits(text: &str, look: &Appearance) -> String {
    let plain = fixtures::plain(text);
    for line in plain.lines() {
        assert!(appearance::width(line) <= look.width, "{} columns of {}: {line}", appearance::width(line), look.width);
    }
    assert!(!plain.lines().any(|l| l.ends_with(' ')), "blanks at the end of a line:\n{plain}");
    plain
}

fn drawn(status: &status::Status, brief: bool, look: &Appearance) -> String {
    fits(&status::status(status, brief, look), look)
}

#[test]
fn error_as_text() {
    let look = fixtures::look(60, UTF8);
    let error = ApiError::new(Code::Blocked, "GPU 0 (GPU-3a1f): 3g.40gb@0 is in use and in the way of 7g.80gb")
        .cause("GPU instance 2 is held by pid 4123 of alice (python train.py)")
        .cause("first line\n  | with a caret\n  | ^^^^")
        .hint("wait for it to end, or leave the GPU out: gpushctl mig apply --gpu 1-7");
    let text = trouble::lines("error", &error, 0, &look).join("\n");
    assert_snapshot!("error", fits(&text, &look));
}

#[test]
fn every_state_has_its_word() {
    let states = [
        GpuState::Ready,
        GpuState::Cordoned,
        GpuState::Degraded,
        GpuState::Changing,
        GpuState::Held,
        GpuState::Unknown,
        GpuState::Lost,
        GpuState::Maintenance,
    ];
    let look = fixtures::look(80, UTF8);
    for state in states {
        let mut one = fixtures::mixed().swap_remove(3);
        one.state = state;
        let heading = fixtures::plain(&gpu::heading(&one, &[], &look));
        assert_eq!(heading.contains(names::state(state).0), state != GpuState::Ready, "{heading}");
        // Every state except `ready` must have an explanation, even if gpushd gives no reason.
        assert_eq!(gpu_notes::of(&one, &look).is_empty(), state == GpuState::Ready);
    }
}
