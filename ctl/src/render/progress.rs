//! The progress of a running operation. On a terminal, each GPU has a progress bar. Otherwise, gpushctl prints a line
//! at the beginning and for each unusual event. With `--quiet`, gpushctl prints nothing.
//!
//! All output goes to stderr, because stdout is for the result.

use std::io::Write;

use gpush_api::{GpuIndex, Operation, StepState};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Appearance, Charset, appearance::count, names::gpu_numbers, plan};

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// One bar for each GPU, redrawn in place.
    Bars,
    /// One line at the beginning, one line for each slow step, and one line for each GPU that is rolled back. gpushctl
    /// does not print the other steps, because the result shows what these steps did.
    Lines,
    /// Nothing.
    Quiet,
}

/// What was already shown of the progress.
pub(crate) struct Progress {
    shown: Shown,
    /// Whether the line at the beginning was printed.
    begun: bool,
    /// For each GPU: whether its rollback was printed, and the last slow step that was printed.
    reported: Vec<(bool, Option<String>)>,
    /// Notes that were already printed.
    noted: Vec<String>,
    /// Reasons for waiting that were already printed.
    waited: Vec<String>,
    /// The number of steps of each GPU. It may change: if an operation has waited, it gets a new plan when it begins.
    steps: Vec<u32>,
}

enum Shown {
    Bars(MultiProgress, Vec<ProgressBar>),
    Lines(Box<dyn Write>),
    Quiet,
}

impl Progress {
    pub(crate) fn new(style: Style, operation: &Operation, look: &Appearance) -> Self {
        let shown = match style {
            Style::Bars => bars(operation, look),
            Style::Lines => Shown::Lines(Box::new(anstream::stderr())),
            Style::Quiet => Shown::Quiet,
        };
        Self::of(shown, operation)
    }

    fn of(shown: Shown, operation: &Operation) -> Self {
        let reported = vec![(false, None); operation.plans.len()];
        Self { shown, begun: false, reported, noted: Vec::new(), waited: Vec::new(), steps: steps(operation) }
    }

    #[cfg(test)]
    fn to(out: Box<dyn Write>, operation: &Operation) -> Self {
        Self::of(Shown::Lines(out), operation)
    }

    /// Shows what has changed since the last call.
    pub(crate) fn update(&mut self, operation: &Operation, look: &Appearance) {
        let steps = steps(operation);
        if steps != self.steps {
            if let Shown::Bars(all, _) = &self.shown {
                let _ = all.clear();
                self.shown = bars(operation, look);
            }
            self.reported = vec![(false, None); operation.plans.len()];
            self.steps = steps;
        }
        // Compare the texts of notes, because gpushd may drop old notes.
        for note in operation.notes.iter().filter(|note| !self.noted.contains(note)).cloned().collect::<Vec<_>>() {
            look.wrap("", &look.clean(&note)).iter().for_each(|line| self.say(line));
        }
        self.noted.clone_from(&operation.notes);
        if let Shown::Lines(out) = &mut self.shown
            && !self.begun
            && let Some(line) = beginning(operation)
        {
            self.begun = true;
            // Ignore an error: stderr may be closed, but the operation continues.
            let _ = writeln!(out, "{line}");
        }
        let gpus = operation.plans.iter().zip(&mut self.reported).enumerate();
        for (at, (plan, reported)) in gpus {
            let Some(now) = operation.progress.iter().find(|p| p.gpu == plan.gpu) else { continue };
            match &mut self.shown {
                Shown::Bars(_, bars) => {
                    if let Some(bar) = bars.get(at) {
                        bar.set_position(u64::from(now.done));
                        bar.set_message(look.fit(&look.clean(&doing(now)), look.width.saturating_sub(48).max(16)));
                    }
                }
                Shown::Lines(out) => {
                    if now.rolling_back && !reported.0 {
                        reported.0 = true;
                        let _ = writeln!(out, "{}", look.clean(&taking_back(now)));
                    }
                }
                Shown::Quiet => {}
            }
        }
    }

    /// Returns whether nothing is printed.
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self.shown, Shown::Quiet)
    }

    /// Prints the reasons for waiting that were not printed before.
    pub(crate) fn waits(&mut self, reasons: &[String], look: &Appearance) {
        for reason in reasons {
            if !self.waited.contains(reason) {
                self.waited.push(reason.clone());
                look.wrap("waits: ", &look.clean(reason)).iter().for_each(|line| self.say(line));
            }
        }
    }

    /// Prints the steps that take long. Prints nothing if there are progress bars, because they show the steps.
    pub(crate) fn waiting(&mut self, operation: &Operation, look: &Appearance) {
        let Shown::Lines(out) = &mut self.shown else { return };
        for (now, reported) in operation.progress.iter().zip(&mut self.reported) {
            let (Some(doing), false) = (&now.doing, now.error.is_some()) else { continue };
            if reported.1.as_ref() == Some(doing) {
                continue;
            }
            reported.1 = Some(doing.clone());
            let doing = look.clean(doing);
            let _ = writeln!(out, "GPU {}  {} of {} done, still {doing}", now.gpu, now.done, now.total);
        }
    }

    /// Prints a text that does not belong to a step.
    pub(crate) fn say(&mut self, text: &str) {
        match &mut self.shown {
            Shown::Bars(all, _) => drop(all.println(text)),
            Shown::Lines(out) => drop(writeln!(out, "{text}")),
            Shown::Quiet => {}
        }
    }

    /// Removes the progress bars, because the result shows the same information.
    pub(crate) fn end(self) {
        if let Shown::Bars(all, bars) = self.shown {
            bars.iter().for_each(ProgressBar::finish_and_clear);
            // This fails only if the terminal is closed.
            let _ = all.clear();
        }
    }
}

fn steps(operation: &Operation) -> Vec<u32> {
    operation.progress.iter().map(|gpu| gpu.total).collect()
}

fn doing(now: &StepState) -> String {
    match (&now.doing, now.rolling_back) {
        (Some(doing), true) => format!("rolling back: {doing}"),
        (None, true) => "rolled back".to_owned(),
        (Some(doing), false) => doing.clone(),
        (None, false) if now.done == now.total => "done".to_owned(),
        (None, false) => "waiting".to_owned(),
    }
}

/// Returns the line at the beginning, such as `op-7: 24 steps on GPUs 0-3`. Returns `None` if there are no steps.
fn beginning(operation: &Operation) -> Option<String> {
    let changed = operation.progress.iter().filter(|gpu| gpu.total > 0);
    let (gpus, steps): (Vec<GpuIndex>, Vec<u32>) = changed.map(|gpu| (gpu.gpu, gpu.total)).unzip();
    let steps = steps.iter().sum::<u32>() as usize;
    (steps > 0).then(|| format!("{}: {} on {}", operation.id, count(steps, "step"), gpu_numbers(&gpus)))
}

fn taking_back(now: &StepState) -> String {
    let why = now.error.as_ref().map_or_else(String::new, |e| format!(": {}", e.message));
    format!("GPU {}  rolling back {}{why}", now.gpu, count(now.done as usize, "step"))
}

/// Returns the characters of a progress bar: its full part, the end of the full part, and its empty part. The empty
/// part looks as in other bars, and not like a horizontal line.
fn bar_characters(charset: Charset) -> &'static str {
    match charset {
        Charset::Utf8 => "━╸·",
        Charset::Ascii => "#>.",
    }
}

fn bars(operation: &Operation, look: &Appearance) -> Shown {
    let all = MultiProgress::new();
    let characters = bar_characters(look.charset);
    // The template is valid. If it were not, the default bar would do.
    let style = ProgressStyle::with_template("{prefix:>7}  {bar:20}  {pos:>2}/{len:<2}  {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars(characters);
    let bars = operation.plans.iter().map(|plan| {
        if plan::needs_no_change(plan) {
            return ProgressBar::hidden();
        }
        let bar = all.add(ProgressBar::new(plan::steps(plan).count() as u64).with_style(style.clone()));
        bar.set_prefix(format!("GPU {}", plan.gpu));
        bar
    });
    let bars = bars.collect();
    Shown::Bars(all, bars)
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, rc::Rc};

    use gpush_api::{ApiError, Code, MigModeStep, OperationState, Step};

    use super::*;
    use crate::render::fixtures;

    #[derive(Clone, Default)]
    struct Sink(Rc<RefCell<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn empty_part_of_a_bar_is_that_of_other_bars() {
        for charset in [Charset::Utf8, Charset::Ascii] {
            let empty = fixtures::plain(&crate::render::bar::part(0, 100, 1, &fixtures::look(80, charset)));
            assert!(bar_characters(charset).ends_with(&empty), "{charset:?}");
        }
    }

    #[test]
    fn begin_and_rollback_are_printed_once_without_single_steps() {
        let look = fixtures::look(80, Charset::Ascii);
        let sink = Sink::default();
        let mut operation = fixtures::operation(OperationState::Running);
        let mut progress = Progress::to(Box::new(sink.clone()), &operation);
        for done in [0, 1, 1, 3] {
            operation.progress[0].done = done;
            progress.update(&operation, &look);
        }
        operation.progress[0].rolling_back = true;
        operation.progress[0].error = Some(ApiError::new(Code::DriverError, "the driver refused 1g.10gb@6"));
        progress.update(&operation, &look);
        operation.progress[0].done = 1;
        progress.update(&operation, &look);
        progress.end();
        let text = String::from_utf8(sink.0.borrow().clone()).unwrap();
        insta::assert_snapshot!(text, @r"
        op-17: 6 steps on GPU 0
        GPU 0  rolling back 3 steps: the driver refused 1g.10gb@6
        ");
    }

    #[test]
    fn notes_are_printed_once_and_a_new_plan_is_printed() {
        let look = fixtures::look(80, Charset::Ascii);
        let sink = Sink::default();
        let begun = fixtures::operation(OperationState::Running);
        // While an operation waits, it has no steps yet.
        let mut waiting = Operation { state: OperationState::Waiting, ..begun.clone() };
        waiting.plans[0].steps.clear();
        waiting.progress[0].total = 0;
        let mut progress = Progress::to(Box::new(sink.clone()), &waiting);
        progress.update(&waiting, &look);
        let long = "GPU 0: 3g.40gb@4 (GPU instance 2, compute instance 0) is held by pid 4711 (alice, python train.py)";
        progress.waits(&[long.into(), "alice\u{1b}[2J 4711".into()], &look);
        progress.waits(&[long.into(), "op-3 is ahead in the queue of GPU 1".into()], &look);
        waiting.notes = vec!["gpushd was restarted".into()];
        progress.update(&waiting, &look);
        progress.update(&waiting, &look);
        let mut running = begun;
        running.progress[0].done = 1;
        progress.update(&running, &look);
        progress.end();
        let text = String::from_utf8(sink.0.borrow().clone()).unwrap();
        insta::assert_snapshot!(text, @r"
        waits: GPU 0: 3g.40gb@4 (GPU instance 2, compute instance 0) is held by pid 4711
               (alice, python train.py)
        waits: alice?[2J 4711
        waits: op-3 is ahead in the queue of GPU 1
        gpushd was restarted
        op-17: 6 steps on GPU 0
        ");
    }

    #[test]
    fn mig_mode_change_counts_as_a_step() {
        let look = fixtures::look(80, Charset::Ascii);
        let sink = Sink::default();
        let mut operation = fixtures::operation(OperationState::Running);
        operation.plans[0].add(Step::MigMode(MigModeStep::Enable { reset: None, at_reboot: false }));
        operation.progress[0].total += 1;
        let mut progress = Progress::to(Box::new(sink.clone()), &operation);
        progress.update(&operation, &look);
        let reported = String::from_utf8(sink.0.borrow().clone()).unwrap();
        let planned: Vec<String> = plan::steps(&operation.plans[0]).map(|(_, step)| step).collect();
        assert_eq!((planned.len(), planned[0].as_str()), (7, "+ MIG mode"));
        assert_eq!(reported, format!("op-17: {} steps on GPU 0\n", planned.len()));
        let plans = gpush_api::Plans { plans: operation.plans };
        let drawn = fixtures::plain(&plan::plans(&plans, &[], &look));
        assert!(drawn.contains("  1  + MIG mode\n") && drawn.contains("  7 steps: "), "{drawn}");
    }

    #[test]
    fn slow_step_is_named() {
        let look = fixtures::look(80, Charset::Ascii);
        let sink = Sink::default();
        let mut operation = fixtures::operation(OperationState::Running);
        operation.progress[0].done = 1;
        operation.progress[0].doing = Some("destroying GPU instance 3 (2g.20gb@4)".into());
        let mut progress = Progress::to(Box::new(sink.clone()), &operation);
        progress.update(&operation, &look);
        progress.waiting(&operation, &look);
        progress.waiting(&operation, &look);
        progress.say("gpushd does not answer; trying again for up to 5s");
        let text = String::from_utf8(sink.0.borrow().clone()).unwrap();
        insta::assert_snapshot!(text, @r"
        op-17: 6 steps on GPU 0
        GPU 0  1 of 6 done, still destroying GPU instance 3 (2g.20gb@4)
        gpushd does not answer; trying again for up to 5s
        ");
    }
}
