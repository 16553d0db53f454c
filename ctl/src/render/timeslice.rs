//! GPUs that are shared by turns: what that is worth, and whether the driver goes along.

use gpush_api::{Gpu, TimesliceState, TimesliceView};

use super::{
    Look,
    look::{NOTE, QUIET, count, paint},
};

/// What turns are not, said wherever they are shown.
const TRUTH: &str = "no memory or fault isolation, no guaranteed share";

/// The level in words, as events and lines have it: `time-slice level long`.
pub(crate) fn level(turns: &TimesliceView) -> String {
    match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) => format!("time-slice level {level}"),
        (TimesliceState::Unsupported, _) => "no time-slice levels".to_owned(),
        (TimesliceState::Known | TimesliceState::Unknown, _) => "time-slice level not known".to_owned(),
    }
}

/// The line below a GPU in `status`, and a note of what is wrong.
pub(crate) fn below(gpu: &Gpu, indent: usize, look: &Look) -> Vec<String> {
    let Some(turns) = &gpu.timeslice else { return Vec::new() };
    let margin = " ".repeat(indent);
    let read = read(turns, look);
    let text = format!("{}, {}{read}: {TRUTH}", count(turns.replicas as usize, "replica"), level(turns));
    let mut out = look.wrap(&format!("{margin}by turns  "), &look.clean(&text));
    out.iter_mut().for_each(|line| *line = paint(QUIET, line));
    if let Some(why) = trouble(turns) {
        let lines = look.wrap(&format!("{margin}! level: "), &look.clean(why));
        out.extend(lines.iter().map(|line| paint(NOTE, line)));
    }
    out
}

/// When the level was read: a while before all else that is shown of the GPU.
fn read(turns: &TimesliceView, look: &Look) -> String {
    let read = turns.read_at.filter(|_| turns.state == TimesliceState::Known);
    read.map(|at| format!(", read {}", look.ago(at))).unwrap_or_default()
}

/// Why the level is not the wanted one, where that is worth a word.
fn trouble(turns: &TimesliceView) -> Option<&str> {
    let told = match turns.state {
        TimesliceState::Known => turns.level != Some(turns.wanted),
        TimesliceState::Unsupported => false,
        // What has not been read yet will be in a moment.
        TimesliceState::Unknown => turns.since.is_some(),
    };
    turns.reason.as_deref().filter(|_| told)
}

/// Facts for `gpu show`, by name.
pub(crate) fn facts(turns: &TimesliceView, look: &Look) -> Vec<(&'static str, String)> {
    let replicas = count(turns.replicas as usize, "replica");
    let since = turns.since.map(|since| format!(", first seen {}", look.ago(since))).unwrap_or_default();
    let since = read(turns, look) + &since;
    let state = match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) if level == turns.wanted => format!("{level}, as wanted{since}"),
        (TimesliceState::Known, Some(level)) => format!("{level}, wanted is {}{since}", turns.wanted),
        (TimesliceState::Unsupported, _) => format!("unsupported, wanted is {}", turns.wanted),
        (TimesliceState::Known | TimesliceState::Unknown, _) => format!("not known, wanted is {}", turns.wanted),
    };
    let why = turns.reason.as_ref().map(|why| format!(": {}", look.clean(why))).unwrap_or_default();
    let mut facts = vec![("by turns", format!("{replicas}; {TRUTH}")), ("level", format!("{state}{why}"))];
    match turns.state {
        TimesliceState::Known | TimesliceState::Unknown => {
            facts.push(("", "a level reaches only contexts that are made after it was set".to_owned()));
        }
        TimesliceState::Unsupported => {}
    }
    facts
}
