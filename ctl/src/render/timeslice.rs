//! Time-sliced GPUs: their level, and whether the driver supports levels.

use gpush_api::{Gpu, TimesliceState, TimesliceView};

use super::{
    Appearance,
    appearance::{NOTE, QUIET, count, paint},
};

/// What time-slicing does not provide. gpushctl says so wherever it shows a time-sliced GPU.
const LIMITS: &str = "no memory or fault isolation, no guaranteed share";

/// Describes the time-slice level of a GPU: `time-slice level long`.
pub(crate) fn level(turns: &TimesliceView) -> String {
    match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) => format!("time-slice level {level}"),
        (TimesliceState::Unsupported, _) => "no time-slice levels".to_owned(),
        (TimesliceState::Known | TimesliceState::Unknown, _) => "time-slice level not known".to_owned(),
    }
}

/// Draws the line about time-slicing below a GPU in `status`. If there is a problem, adds a note.
pub(crate) fn below(gpu: &Gpu, indent: usize, look: &Appearance) -> Vec<String> {
    let Some(turns) = &gpu.timeslice else { return Vec::new() };
    let margin = " ".repeat(indent);
    let read = read(turns, look);
    let text = format!("{}, {}{read}: {LIMITS}", count(turns.replicas as usize, "replica"), level(turns));
    let mut out = look.wrap(&format!("{margin}time-sliced  "), &look.clean(&text));
    out.iter_mut().for_each(|line| *line = paint(QUIET, line));
    if let Some(why) = trouble(turns) {
        let lines = look.wrap(&format!("{margin}! level: "), &look.clean(why));
        out.extend(lines.iter().map(|line| paint(NOTE, line)));
    }
    out
}

/// Describes when the level was read. This may be earlier than the reading of the GPU.
fn read(turns: &TimesliceView, look: &Appearance) -> String {
    let read = turns.read_at.filter(|_| turns.state == TimesliceState::Known);
    read.map(|at| format!(", read {}", look.ago(at))).unwrap_or_default()
}

/// Returns why a GPU does not have its desired level, if this is worth a note.
fn trouble(turns: &TimesliceView) -> Option<&str> {
    let reported = match turns.state {
        TimesliceState::Known => turns.level != Some(turns.wanted),
        TimesliceState::Unsupported => false,
        // If the level was never read, show no note, because gpushd reads it soon.
        TimesliceState::Unknown => turns.since.is_some(),
    };
    turns.reason.as_deref().filter(|_| reported)
}

/// Returns the facts about time-slicing for `gpu show`, each with its name.
pub(crate) fn facts(turns: &TimesliceView, look: &Appearance) -> Vec<(&'static str, String)> {
    let replicas = count(turns.replicas as usize, "replica");
    let since = turns.since.map(|since| format!(", first seen {}", look.ago(since))).unwrap_or_default();
    let since = read(turns, look) + &since;
    let state = match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) if level == turns.wanted => format!("{level}, as configured{since}"),
        (TimesliceState::Known, Some(level)) => format!("{level}; configured: {}{since}", turns.wanted),
        (TimesliceState::Unsupported, _) => format!("not supported; configured: {}", turns.wanted),
        (TimesliceState::Known | TimesliceState::Unknown, _) => format!("not known; configured: {}", turns.wanted),
    };
    let why = turns.reason.as_ref().map(|why| format!(": {}", look.clean(why))).unwrap_or_default();
    let mut facts = vec![("time-slicing", format!("{replicas}; {LIMITS}")), ("level", format!("{state}{why}"))];
    match turns.state {
        TimesliceState::Known | TimesliceState::Unknown => {
            facts.push(("", "a level applies only to CUDA contexts created after it was set".to_owned()));
        }
        TimesliceState::Unsupported => {}
    }
    facts
}
