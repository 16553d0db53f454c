//! Hints for a command that `gpushctl run` cannot run.

use std::{ffi::OsString, io::ErrorKind, os::unix::fs::PermissionsExt as _, path::Path};

use gpush_core::nearest::nearest;

use crate::args::{typed, words::interpreter};

/// Commands that only a shell has.
const OF_SHELLS: [&str; 9] = ["cd", "source", ".", "export", "alias", "ulimit", "module", "conda", "set"];

/// Characters that only a shell understands.
const FOR_SHELLS: [char; 11] = ['|', ';', '&', '<', '>', '$', '*', '"', '\'', '(', '`'];

/// Returns what to type instead of a command that cannot be run.
pub(super) fn hint(command: &[OsString], why: ErrorKind) -> Option<String> {
    let words: Vec<&str> = command.iter().map(|word| word.to_str()).collect::<Option<_>>()?;
    let (program, rest) = words.split_first()?;
    if *program != program.trim() || program.contains(' ') {
        return quoted_line(program, rest);
    }
    if OF_SHELLS.contains(program) || is_variable(program) {
        return in_shell(&words);
    }
    let path = Path::new(program);
    match why {
        ErrorKind::PermissionDenied if path.is_dir() => Some(format!("{program} is a directory: name a program")),
        ErrorKind::PermissionDenied if path.is_file() => not_executable(path, &words),
        ErrorKind::NotFound if path.is_file() && !program.contains('/') => {
            not_executable(path, &words).or_else(|| meant(&[&[format!("./{program}").as_str()], rest].concat()))
        }
        ErrorKind::NotFound if !program.contains('/') && interpreter(program).is_some() => {
            meant(&[&[interpreter(program)?], words.as_slice()].concat())
        }
        ErrorKind::NotFound if !program.contains('/') => {
            let known = programs();
            let near = nearest(program, known.iter().map(String::as_str))?;
            meant(&[&[near], rest].concat())
        }
        _ => None,
    }
}

fn meant(words: &[&str]) -> Option<String> {
    let line = typed::command_line(words.iter().copied())?;
    Some(format!("did you mean `{line}`?"))
}

/// Returns the hint for a command line that the user quoted as one word.
fn quoted_line(line: &str, rest: &[&str]) -> Option<String> {
    if !rest.is_empty() {
        return None;
    }
    if line.contains(FOR_SHELLS) {
        let script = typed::command_line([line])?;
        return Some(format!("let a shell run it: `sh -c {script}`"));
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let line = typed::command_line(words)?;
    Some(format!("write the command without quotes: `{line}`"))
}

/// `FOO=1 python3 train.py` sets a variable, as only a shell does. `env` does the same.
fn is_variable(word: &str) -> bool {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    word.split_once('=').is_some_and(|(name, _)| is_name(name))
}

fn in_shell(words: &[&str]) -> Option<String> {
    if is_variable(words.first()?) {
        let line = typed::command_line(words.iter().copied())?;
        return Some(format!("to set a variable, run `env {line}`"));
    }
    let script = words.join(" ");
    let script = typed::command_line([format!("{script} && COMMAND").as_str()])?;
    Some(format!("only a shell has `{}`: `bash -c {script}`", words.first()?))
}

/// Returns the hint for a file without permission to execute it: its interpreter, or `chmod`.
fn not_executable(path: &Path, words: &[&str]) -> Option<String> {
    let is_executable = path.metadata().is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    if is_executable {
        return None;
    }
    let program = words.first()?;
    match interpreter(program) {
        Some(interpreter) => meant(&[&[interpreter], words].concat()),
        None => {
            let chmod = typed::command_line(["chmod", "+x", program])?;
            Some(format!("the file is not executable: `{chmod}`"))
        }
    }
}

/// Returns the names of the programs in the directories of `PATH`.
fn programs() -> Vec<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let entries = std::env::split_paths(&path).filter_map(|directory| directory.read_dir().ok()).flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_of(words: &[&str], why: ErrorKind) -> Option<String> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        hint(&words, why)
    }

    #[test]
    fn shell_syntax_leads_to_a_program_that_understands_it() {
        for (words, expected) in [
            (&["python3 train.py --lr 1"][..], "write the command without quotes: `python3 train.py --lr 1`"),
            (&["python3 x.py | tee log"], "let a shell run it: `sh -c 'python3 x.py | tee log'`"),
            (&["FOO=1", "python3", "x.py"], "to set a variable, run `env FOO=1 python3 x.py`"),
            (&["cd", "/data"], "only a shell has `cd`: `bash -c 'cd /data && COMMAND'`"),
        ] {
            assert_eq!(hint_of(words, ErrorKind::NotFound).as_deref(), Some(expected), "{words:?}");
        }
        assert_eq!(hint_of(&["/no/such/program"], ErrorKind::NotFound), None);
    }

    #[test]
    fn misspelled_program_is_corrected_from_the_path() {
        assert_eq!(hint_of(&["sleeep", "1"], ErrorKind::NotFound).as_deref(), Some("did you mean `sleep 1`?"));
        assert_eq!(hint_of(&["qqzzxxqqzzxx"], ErrorKind::NotFound), None);
        assert_eq!(hint_of(&["qq.py", "1"], ErrorKind::NotFound).as_deref(), Some("did you mean `python3 qq.py 1`?"));
    }

    #[test]
    fn file_without_permission_leads_to_its_interpreter() {
        let scratch = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = scratch.path().join(name);
            std::fs::write(&path, "x").unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (python, other) = (file("train.py"), file("simulate"));
        let denied = ErrorKind::PermissionDenied;
        assert_eq!(hint_of(&[&python, "-v"], denied), Some(format!("did you mean `python3 {python} -v`?")));
        assert_eq!(hint_of(&[&other], denied), Some(format!("the file is not executable: `chmod +x {other}`")));
        let directory = scratch.path().to_str().unwrap();
        assert_eq!(hint_of(&[directory], denied), Some(format!("{directory} is a directory: name a program")));
    }
}
