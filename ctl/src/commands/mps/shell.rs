//! An environment in the syntax of a shell: `eval` of it sets these variables and does nothing else, whatever their
//! values contain.

use gpush_api::{ApiError, Code};

use crate::args::Shell;

/// Variables of MPS: those that are set now and not among the new ones are unset.
pub(super) const OURS: &str = "CUDA_MPS_";

/// Returns lines that unset the variables in `unset` and set `variables`.
pub(super) fn lines(shell: Shell, unset: &[String], variables: &[(String, String)]) -> Result<String, ApiError> {
    let mut out = String::new();
    for name in unset.iter().filter(|name| is_name(name)) {
        out += &match shell {
            Shell::Sh => format!("unset {name}\n"),
            Shell::Fish => format!("set -e {name}\n"),
            Shell::Csh => format!("unsetenv {name};\n"),
        };
    }
    for (name, value) in variables {
        if !is_name(name) || value.chars().any(char::is_control) {
            let text = format!("the variable {name:?} that gpushd gave can't be written for a shell");
            return Err(ApiError::new(Code::Internal, text).hint("add `--json` to print it as it is"));
        }
        let value = quoted(shell, value);
        out += &match shell {
            Shell::Sh => format!("export {name}={value}\n"),
            Shell::Fish => format!("set -gx {name} {value}\n"),
            // Its backquotes make blanks of newlines.
            Shell::Csh => format!("setenv {name} {value};\n"),
        };
    }
    Ok(out)
}

/// Returns whether every shell accepts this name of a variable.
fn is_name(name: &str) -> bool {
    let first = name.bytes().next();
    first.is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn quoted(shell: Shell, value: &str) -> String {
    let inner = match shell {
        Shell::Sh => value.replace('\'', "'\\''"),
        Shell::Fish => value.replace('\\', "\\\\").replace('\'', "\\'"),
        // Its history looks into quotes.
        Shell::Csh => value.replace('\'', "'\\''").replace('!', "\\!"),
    };
    format!("'{inner}'")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const ODD: &str = "/run/it's $(touch /tmp/x) `x` \"a\" \\ * ; & | ~ {1,2} #";

    fn variables() -> Vec<(String, String)> {
        vec![("CUDA_VISIBLE_DEVICES".into(), "GPU-1".into()), ("CUDA_MPS_PIPE_DIRECTORY".into(), ODD.into())]
    }

    #[test]
    fn each_shell_has_its_words() {
        let unset = ["CUDA_MPS_LOG_DIRECTORY".to_owned(), "not a name".to_owned()];
        let plain = [("A".to_owned(), "it's!".to_owned())];
        let text = |shell| lines(shell, &unset, &plain).unwrap();
        assert_eq!(text(Shell::Sh), "unset CUDA_MPS_LOG_DIRECTORY\nexport A='it'\\''s!'\n");
        assert_eq!(text(Shell::Fish), "set -e CUDA_MPS_LOG_DIRECTORY\nset -gx A 'it\\'s!'\n");
        assert_eq!(text(Shell::Csh), "unsetenv CUDA_MPS_LOG_DIRECTORY;\nsetenv A 'it'\\''s\\!';\n");
    }

    #[test]
    fn a_shell_reads_back_what_was_meant() {
        let script = lines(Shell::Sh, &[], &variables()).unwrap() + "printf %s \"$CUDA_MPS_PIPE_DIRECTORY\"";
        let said = Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap(), ODD);
    }

    #[test]
    fn what_no_shell_could_take_is_refused() {
        for (name, value) in [("A B", "x"), ("", "x"), ("1A", "x"), ("A;id", "x"), ("A", "x\ny"), ("A", "\u{1b}[m")] {
            let wrong = [(name.to_owned(), value.to_owned())];
            assert!(lines(Shell::Sh, &[], &wrong).is_err(), "{name}={value:?}");
        }
    }
}
