//! `[notify]`: when gpushd tells the holder of a lease that the lease expires.

use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::{
    fix,
    reader::{Reader, get},
    toml_text::{list, span, text},
};
use crate::{diagnostic::Problem, duration, quote::Quoted};

/// Maximum number of warnings before the end of a lease.
const MOST_WARNINGS: usize = 8;

/// The longest time between a warning and the end of a lease: 30 days.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// `[notify]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notify {
    /// How long before the end of a lease gpushd warns its holder, longest first.
    pub before: Vec<Duration>,
    /// Absolute path of a program that gpushd runs for each notice.
    pub command: Option<String>,
    /// User that runs the program; `None` for a user that systemd creates for the run.
    pub user: Option<String>,
}

impl Default for Notify {
    fn default() -> Self {
        let before = vec![Duration::from_secs(15 * 60), Duration::from_secs(2 * 60)];
        Self { before, command: None, user: None }
    }
}

impl Notify {
    /// Returns the keys and their values as TOML.
    pub(super) fn written(&self) -> [(&'static str, Option<String>); 3] {
        let before: Vec<String> = self.before.iter().map(|before| duration::format(*before)).collect();
        [
            ("before", Some(list(&before))),
            ("command", self.command.as_deref().map(text)),
            ("user", self.user.as_deref().map(text)),
        ]
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Notify {
    let before = before(reader, table).unwrap_or_else(|| Notify::default().before);
    let command = reader.absolute(table, "command", "/etc/gpush/hooks/notify");
    Notify { before, command, user: user(reader, table) }
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

fn before(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<Vec<Duration>> {
    let value = get(table, "before")?;
    let items = match value.get_ref() {
        DeValue::Array(items) => items.iter().collect(),
        _ => vec![value],
    };
    // A number without a unit is an error here: people mean minutes, and the general meaning of such a number is seconds.
    let numbers: Option<Vec<String>> = items.iter().map(|item| fix::without_unit(item.get_ref())).collect();
    if let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) {
        let with = |unit: &str| list(&numbers.iter().map(|number| format!("{number}{unit}")).collect::<Vec<_>>());
        let hint = format!("add the unit that you mean: before = {} or {}", with("m"), with("s"));
        reader.report(Problem::new(value.span(), "`before` has no unit of time", hint));
        return None;
    }
    let texts = reader.one_or_more(table, "before", "[\"15m\", \"2m\"]")?;
    let mut before = Vec::new();
    for one in &texts {
        let why = match duration::parse_positive(&one.value) {
            Ok(time) if time > LONGEST => format!("is longer than {}", span(LONGEST)),
            Ok(time) => {
                before.push(time);
                continue;
            }
            Err(error) => format!("is not a duration: {error}"),
        };
        let message = format!("{} in `before` {why}", Quoted(&one.value));
        reader.report(Problem::new(one.span.clone(), message, "write for example before = [\"15m\", \"2m\"]"));
    }
    if let Some(one) = texts.get(MOST_WARNINGS) {
        let message = format!("`before` has more than {MOST_WARNINGS} times");
        reader.report(Problem::new(one.span.clone(), message, "remove some of them"));
    }
    before.sort_unstable_by(|a, b| b.cmp(a));
    before.dedup();
    Some(before)
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
