//! Prints the findings of `gpushctl doctor`: the message of each finding, and below it the causes
//! and the hint of this finding.

use gpush_doctor::{Finding, Severity};

use super::appearance::{Appearance, BAD, NOTE, PLAIN, count, paint};

/// Width of the area in each line. `SEVERITY` is the width of the severity after it.
const AREA: usize = 9;
const SEVERITY: usize = 8;

/// Text below the hints, unless the user is known to be an administrator.
const FOR_ADMINISTRATORS: &str = "The hints are for administrators: most commands in these hints need root.";

pub(crate) fn findings(findings: &[Finding], look: &Appearance) -> String {
    let mut lines = Vec::new();
    for finding in findings {
        let first = format!("{:<AREA$} {:<SEVERITY$} ", finding.area, finding.severity);
        let indent = " ".repeat(AREA + SEVERITY + 2);
        let number = finding.lint.map_or_else(String::new, |lint| format!("{lint}: "));
        let mut own = look.wrap(&first, &look.clean(&format!("{number}{}", finding.message)));
        if let Some(line) = own.first_mut() {
            let (area, rest) = line.split_at(AREA + 1);
            let (severity, message) = rest.split_at(SEVERITY);
            let style = match finding.severity {
                Severity::Ok => PLAIN,
                Severity::Warning => NOTE,
                Severity::Problem => BAD,
            };
            *line = format!("{area}{}{message}", paint(style, severity));
        }
        lines.append(&mut own);
        for cause in &finding.causes {
            lines.extend(look.wrap(&format!("{indent}cause: "), &look.clean(cause)));
        }
        if let Some(hint) = &finding.hint {
            let why = finding.lint.map_or_else(String::new, |lint| format!("; `gpushctl explain {lint}` says why"));
            lines.extend(look.wrap(&format!("{indent}hint: "), &look.clean(&format!("{hint}{why}"))));
        }
    }
    if !look.is_administrator && findings.iter().any(|finding| finding.hint.is_some()) {
        lines.extend(look.wrap("", FOR_ADMINISTRATORS).iter().map(|line| paint(NOTE, line)));
    }
    let number = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    lines.push(format!(
        "{}, {}",
        count(number(Severity::Problem), "problem"),
        count(number(Severity::Warning), "warning")
    ));
    lines.join("\n") + "\n"
}

/// Returns one line for each problem, without causes and hints: Slurm shows the first one as the reason of a drain.
pub(crate) fn problems(findings: &[Finding], look: &Appearance) -> String {
    findings.iter().map(|finding| look.clean(&finding.message) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use gpush_doctor::Area;

    use super::*;
    use crate::render::fixtures;

    #[test]
    fn findings_are_aligned_with_causes_and_hints() {
        let finding = |severity, message: &str, causes: &[&str], hint: Option<&str>| Finding {
            area: Area::Driver,
            severity,
            lint: None,
            message: message.to_owned(),
            causes: causes.iter().map(|&cause| cause.to_owned()).collect(),
            hint: hint.map(str::to_owned),
        };
        let all = [
            finding(Severity::Ok, "kernel module 550.163.01", &[], None),
            finding(
                Severity::Problem,
                "the driver library has version 550.163.01, but the loaded kernel module has version 535.183.01",
                &["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"],
                Some(
                    "to load the new kernel module, reboot, or run `gpushctl maintenance enter` and then `modprobe -r \
                    nvidia`",
                ),
            ),
        ];
        let text = anstream::adapter::strip_str(&findings(&all, &fixtures::look(80, crate::render::Charset::Ascii)))
            .to_string();
        insta::assert_snapshot!(text);
    }
}
