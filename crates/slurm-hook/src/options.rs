//! The command line of `gpush-slurm-hook`: the name of a hook, and a few options.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use gpush_core::duration;

/// A hook of Slurm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Begins a job on this node.
    Prolog,
    /// Ends a job on this node.
    Epilog,
    /// Prints the environment of a task.
    TaskProlog,
}

/// The options of a hook.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Socket of gpushd.
    pub socket: Option<PathBuf>,
    /// Config of gpushd.
    pub config: Option<PathBuf>,
    /// Directory for the files of jobs.
    pub dir: Option<PathBuf>,
    /// Time after which the hook gives up.
    pub deadline: Option<Duration>,
    /// Slurm's gres.conf.
    pub gres_conf: Option<PathBuf>,
}

/// How to use the program.
const USAGE: &str = "usage: gpush-slurm-hook prolog|epilog|task-prolog [--socket FILE] [--config FILE] [--dir DIR] \
                     [--deadline DURATION] [--gres-conf FILE]";

impl Options {
    /// Parses the arguments of the program, without its name. The kernel passes all arguments in the first line of a
    /// script, such as `#!/usr/lib/gpush/gpush-slurm-hook prolog --deadline 15s`, as one word, and then the path of the
    /// script.
    ///
    /// # Errors
    /// If an argument is not valid. The text says why, and how to use the program.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<(Command, Self), String> {
        let mut words: Vec<OsString> = arguments.collect();
        if let [line, script] = words.as_slice()
            && script.as_encoded_bytes().starts_with(b"/")
        {
            words = line.to_string_lossy().split_whitespace().map(OsString::from).collect();
        }
        let mut words = words.into_iter();
        let command = match words.next().as_deref().and_then(|word| word.to_str()) {
            Some("prolog") => Command::Prolog,
            Some("epilog") => Command::Epilog,
            Some("task-prolog") => Command::TaskProlog,
            Some(other) => return Err(format!("{other:?} is not a hook; {USAGE}")),
            None => return Err(USAGE.to_owned()),
        };
        let mut options = Self::default();
        while let Some(word) = words.next() {
            let Some(word) = word.to_str() else { return Err(format!("{word:?} is not an option; {USAGE}")) };
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(OsString::from(value))),
                None => (word, None),
            };
            let mut value = || {
                let value = value.clone().or_else(|| words.next()).filter(|value| !value.is_empty());
                value.ok_or_else(|| format!("{name} needs a value; {USAGE}"))
            };
            match name {
                "--socket" => options.socket = Some(value()?.into()),
                "--config" => options.config = Some(value()?.into()),
                "--dir" => options.dir = Some(value()?.into()),
                "--gres-conf" => options.gres_conf = Some(value()?.into()),
                "--deadline" => {
                    let text = value()?;
                    let text = text.to_string_lossy();
                    let deadline = duration::parse(&text).map_err(|error| format!("{name} {text}: {error}"))?;
                    options.deadline = Some(deadline);
                }
                _ => return Err(format!("{word:?} is not an option; {USAGE}")),
            }
        }
        Ok((command, options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<(Command, Options), String> {
        Options::parse(words.iter().map(OsString::from))
    }

    #[test]
    fn first_line_of_a_script_is_split_into_words() {
        let script = "/usr/share/gpush/slurm/prolog";
        assert_eq!(parsed(&["prolog", script]), Ok((Command::Prolog, Options::default())));
        let (command, options) = parsed(&["epilog --deadline  5s\t--socket=/run/x\r", script]).unwrap();
        assert_eq!(command, Command::Epilog);
        assert_eq!(options.deadline, Some(Duration::from_secs(5)));
        assert_eq!(options.socket, Some("/run/x".into()));
        let (command, options) =
            parsed(&["task-prolog", "--dir", "/run/a b", "--config=/c", "--gres-conf", "g"]).unwrap();
        assert_eq!(command, Command::TaskProlog);
        let Options { dir, config, gres_conf, .. } = options;
        assert_eq!((dir, config, gres_conf), (Some("/run/a b".into()), Some("/c".into()), Some("g".into())));
    }

    #[test]
    fn invalid_argument_is_named() {
        for (words, expected) in [
            (&[][..], "usage: "),
            (&["proolog"], "\"proolog\" is not a hook"),
            (&["prolog --deadlin 5s", "/script"], "\"--deadlin\" is not an option"),
            (&["prolog", "--deadline"], "--deadline needs a value"),
            (&["prolog", "--deadline", "soon"], "--deadline soon: "),
            (&["prolog", "extra"], "\"extra\" is not an option"),
        ] {
            let error = parsed(words).unwrap_err();
            assert!(error.starts_with(expected), "{words:?}: {error}");
        }
    }
}
