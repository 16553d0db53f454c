//! `[notify]`: when gpushd tells the holder of a lease that the lease expires.

use std::time::Duration;

use toml::de::DeTable;

use super::{reader::Reader, toml_text::text, warning_times};
use crate::{diagnostic::Problem, quote::Quoted};

/// `[notify]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notify {
    /// How long before the end of a lease gpushd warns its holder, longest first.
    pub before: Vec<Duration>,
    /// Absolute path of a program that gpushd runs for each notice.
    pub command: Option<String>,
    /// User that runs the program; `None` for a user that systemd creates for the run.
    pub user: Option<String>,
    /// Whether the administrator's comment of a Slurm job shows the last notice about its lease.
    pub job_comment: bool,
}

impl Default for Notify {
    fn default() -> Self {
        let before = vec![Duration::from_secs(15 * 60), Duration::from_secs(2 * 60)];
        Self { before, command: None, user: None, job_comment: true }
    }
}

impl Notify {
    /// Returns the keys and their values as TOML.
    pub(super) fn written(&self) -> [(&'static str, Option<String>); 4] {
        [
            ("before", Some(warning_times::written(&self.before))),
            ("command", self.command.as_deref().map(text)),
            ("user", self.user.as_deref().map(text)),
            ("job_comment", Some(self.job_comment.to_string())),
        ]
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Notify {
    let before = warning_times::read(reader, table, "before").unwrap_or_else(|| Notify::default().before);
    let command = reader.absolute(table, "command", "/etc/gpush/hooks/notify");
    let job_comment = reader.flag(table, "job_comment").unwrap_or(true);
    Notify { before, command, user: user(reader, table), job_comment }
}

fn user(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<String> {
    let named = reader.word(table, "user", "\"gpush-notify\"")?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let problem = if named.value == "root" || named.value == "0" {
        "the hook of [notify] must not run as root".to_owned()
    } else if named.value.is_empty() || named.value.starts_with('-') || !named.value.chars().all(is_name) {
        format!("{} is not the name of a user", Quoted(&named.value))
    } else {
        return Some(named.value);
    };
    let hint =
        "write the name of a user without privileges, or leave `user` out: then systemd creates one for each run";
    reader.report(Problem::new(named.span, problem, hint));
    None
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn hook_has_an_absolute_path_and_never_runs_as_root() {
        let notify = |lines: &str| Config::parse(&format!("[notify]\n{lines}\n"), "config.toml").map(|one| one.notify);
        let found = notify("command = \"/etc/gpush/mail\"\nuser = \"mailer\"").unwrap();
        assert_eq!((found.command.as_deref(), found.user.as_deref()), (Some("/etc/gpush/mail"), Some("mailer")));
        for (lines, part) in [
            ("command = \"mail\"", "is not an absolute path"),
            ("user = \"root\"", "must not run as root"),
            ("user = \"0\"", "must not run as root"),
            ("user = \"a b\"", "is not the name of a user"),
            ("user = \"-x\"", "is not the name of a user"),
        ] {
            let error = notify(lines).unwrap_err().to_string();
            assert!(error.contains(part), "{lines}: {error}");
        }
    }

    #[test]
    fn warnings_are_sorted_and_may_be_one_or_none() {
        let before = |value: &str| {
            let text = format!("[notify]\nbefore = {value}\n");
            let config = Config::parse(&text, "config.toml").map_err(|error| error.to_string())?;
            Ok::<_, String>(config.notify.before.iter().map(std::time::Duration::as_secs).collect::<Vec<_>>())
        };
        assert_eq!(before("[\"2m\", \"1h\", \"2m\"]"), Ok(vec![3600, 120]));
        assert_eq!(before("\"10m\""), Ok(vec![600]));
        assert_eq!(before("[]"), Ok(Vec::new()));
        for (value, part) in [
            ("[\"0s\"]", "must be longer than 0"),
            ("[\"60d\"]", "is longer than"),
            ("[\"soon\"]", "is not a duration"),
            ("[\"1m\",\"2m\",\"3m\",\"4m\",\"5m\",\"6m\",\"7m\",\"8m\",\"9m\"]", "more than 8 times"),
        ] {
            let error = before(value).unwrap_err();
            assert!(error.contains(part), "{value}: {error}");
        }
    }
}
