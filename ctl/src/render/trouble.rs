//! Errors as text: what failed, why, and which command can help.

use anstyle::Style;
use gpush_api::ApiError;

use super::{
    Appearance,
    appearance::{BAD, IDLE, QUIET, paint},
    equal_errors::{self, EqualErrors},
    names::gpu_numbers,
};

/// Maximum number of causes of an error to print. JSON has all.
const MOST_CAUSES: usize = 8;

/// Draws an error: its message after `word`, its causes, its nested errors, its outcome and its hint. Each line starts
/// with `indent` blanks.
pub(crate) fn lines(word: &str, error: &ApiError, indent: usize, look: &Appearance) -> Vec<String> {
    let mut out = labelled(word, BAD, &error.message, indent, look);
    // Print one cause more than the limit: the line `1 more` would take as much space.
    let printed = if error.causes.len() > MOST_CAUSES + 1 { MOST_CAUSES } else { error.causes.len() };
    let (printed, more) = error.causes.split_at(printed);
    for cause in printed {
        out.extend(labelled("  cause", QUIET, cause, indent, look));
    }
    if !more.is_empty() {
        let text = format!("{} more; `--json` prints all", more.len());
        out.extend(labelled("  causes", QUIET, &text, indent, look));
    }
    out.extend(of_gpus(word, &error.errors, indent + 2, look));
    if let Some(outcome) = &error.outcome {
        out.extend(labelled("  outcome", QUIET, outcome, indent, look));
    }
    if let Some(hint) = &error.hint {
        out.extend(labelled("  hint", IDLE, hint, indent, look));
    }
    out
}

/// Draws the errors of several GPUs. Errors that differ only in their GPU are drawn once.
pub(crate) fn of_gpus<'a>(
    word: &str,
    errors: impl IntoIterator<Item = &'a ApiError>,
    indent: usize,
    look: &Appearance,
) -> Vec<String> {
    let mut out = Vec::new();
    for EqualErrors { first, others } in equal_errors::join(errors) {
        out.extend(lines(word, first, indent, look));
        if !others.is_empty() {
            out.extend(labelled("  same for", QUIET, &gpu_numbers(&others), indent, look));
        }
    }
    out
}

/// Draws `label: text`, or `! text`, in as many lines as needed.
fn labelled(label: &str, style: Style, text: &str, indent: usize, look: &Appearance) -> Vec<String> {
    let margin = " ".repeat(indent);
    let label = &if label == "!" { label.to_owned() } else { format!("{label}:") };
    let mut out = Vec::new();
    // A cause may have several lines, such as a line of a config file and a caret below it.
    for (at, line) in text.lines().enumerate() {
        let line = look.clean(line);
        let first = format!("{margin}{label} ");
        if text.contains('\n') {
            let first = if at == 0 { format!("{margin}{} ", paint(style, label)) } else { format!("{margin}  ") };
            out.push(format!("{first}{line}"));
            continue;
        }
        for wrapped in look.wrap(&first, &line) {
            out.push(match wrapped.strip_prefix(&first) {
                Some(rest) => format!("{margin}{} {rest}", paint(style, label)),
                None => wrapped,
            });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use gpush_api::{Code, GpuIndex};

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn error_of_each_gpu_keeps_its_causes_and_hint() {
        let of = |gpu: GpuIndex, pid: u32| {
            ApiError::new(Code::Blocked, format!("the layout can't be applied on GPU {gpu} while 3g.40gb@4 is in use"))
                .cause(format!("3g.40gb@4 (GPU instance 2, compute instance 0) is held by pid {pid}"))
                .hint(format!("stop pid {pid}, or wait for it to end, and try again"))
        };
        let whole =
            ApiError::several("2 of 3 GPUs cannot be changed: GPUs 0, 2", vec![of(GpuIndex(0), 7), of(GpuIndex(2), 8)])
                .outcome("no GPU was changed, because gpushd changes either all selected GPUs or none");
        let drawn = lines("error", &whole, 0, &fixtures::look(80, Charset::Ascii)).join("\n");
        insta::assert_snapshot!(fixtures::plain(&drawn), @"
        error: 2 of 3 GPUs cannot be changed: GPUs 0, 2
          error: the layout can't be applied on GPU 0 while 3g.40gb@4 is in use
            cause: 3g.40gb@4 (GPU instance 2, compute instance 0) is held by pid 7
            hint: stop pid 7, or wait for it to end, and try again
          error: the layout can't be applied on GPU 2 while 3g.40gb@4 is in use
            cause: 3g.40gb@4 (GPU instance 2, compute instance 0) is held by pid 8
            hint: stop pid 8, or wait for it to end, and try again
          outcome: no GPU was changed, because gpushd changes either all selected GPUs
                   or none
        ");
    }

    #[test]
    fn many_causes_are_folded() {
        let drawn = |number: u32| {
            let error = ApiError::new(Code::Blocked, "GPU 0 is in use");
            let error = (1..=number).fold(error, |error, pid| error.cause(format!("held by pid {pid}")));
            lines("error", &error, 0, &fixtures::look(80, Charset::Ascii))
        };
        let plain = |lines: Vec<String>| lines.iter().map(|line| fixtures::plain(line)).collect::<Vec<_>>();
        assert_eq!(plain(drawn(9)).last().unwrap(), "  cause: held by pid 9");
        let folded = plain(drawn(20));
        assert_eq!(folded[8..], ["  cause: held by pid 8", "  causes: 12 more; `--json` prints all"]);
    }

    /// Lines that are not indented would look like further errors.
    #[test]
    fn labels_of_an_error_are_indented_below_its_message() {
        let error = ApiError::new(Code::Blocked, "cannot apply").cause("GPU 0 is in use").outcome("no GPU was changed");
        for (word, indent) in [("error", 0), ("!", 0), ("refused", 2)] {
            let drawn = lines(word, &error.clone().hint("try again"), indent, &fixtures::look(80, Charset::Ascii));
            let margin = |line: &String| {
                let text = fixtures::plain(line);
                text.len() - text.trim_start().len()
            };
            assert_eq!(drawn.iter().map(margin).collect::<Vec<_>>(), [indent, indent + 2, indent + 2, indent + 2]);
        }
    }
}
