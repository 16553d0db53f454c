//! The users and groups that a config names, with their lines in the file.
//!
//! gpushd ignores a name that the host does not have. So a misspelt group gives its members the next quota, without an
//! error. [`NamedAccount::absent_note`] reports such a name.

use gpush_api::LeaseAccess;
use toml::de::{DeTable, DeValue};

use super::Config;
use crate::{lease::quota::Subject, quote::Quoted};

/// The key of a quota's users.
const QUOTA_USERS: &str = "quota.users";

/// The key of the user under which the hook for notices runs.
const NOTIFY_USER: &str = "notify.user";

/// The key of the users whose leases may be unused.
const IDLE_USERS: &str = "idle.exempt.users";

/// The key of the groups whose leases may be unused.
const IDLE_GROUPS: &str = "idle.exempt.groups";

/// The key of a quota's groups.
const QUOTA_GROUPS: &str = "quota.groups";

/// A user or group that a config names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedAccount {
    /// The user or group.
    pub subject: Subject,
    /// Key that names it: `quota.groups`.
    pub key: &'static str,
    /// Position of its `[[quota]]` or `[[gpu]]` table in the file. 0 is the first.
    pub table: usize,
    /// Line of the file; `None` if it is not known.
    pub line: Option<usize>,
}

impl NamedAccount {
    fn new(key: &'static str, name: &str, table: usize, line: Option<usize>) -> Self {
        let name = name.to_owned();
        let is_group = key.ends_with("groups");
        let subject = if is_group { Subject::Group(name) } else { Subject::User(name) };
        Self { subject, key, table, line }
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.subject {
            Subject::User(name) | Subject::Group(name) => name,
            Subject::Everybody => "",
        }
    }

    /// Returns a note that the host has no such user or group. `file` is the path of the config, and `nearest` the most
    /// similar name of the host.
    #[must_use]
    pub fn absent_note(&self, file: Option<&str>, nearest: Option<&str>) -> String {
        let place = self.place(file);
        let what = if matches!(self.subject, Subject::User(_)) { "user" } else { "group" };
        let meant = nearest.map_or_else(String::new, |name| format!("; did you mean {}?", Quoted(name)));
        let name = Quoted(self.name());
        if self.key == NOTIFY_USER {
            return format!("{place}this host has no user {name}, so the hook of [notify] cannot run{meant}");
        }
        format!("{place}this host has no {what} {name}, so `{}` ignores this name{meant}", self.key)
    }

    /// Returns the names of groups in earlier quotas, if this is the user of a quota. If the user is a member of such a
    /// group, the quota of the user never applies.
    pub fn groups_of_earlier_quotas<'a>(&self, all: &'a [Self]) -> Vec<&'a Self> {
        let is_earlier = |one: &&Self| one.key == QUOTA_GROUPS && one.table < self.table;
        if self.key == QUOTA_USERS { all.iter().filter(is_earlier).collect() } else { Vec::new() }
    }

    /// Returns a note that the quota of this user never applies, because an earlier quota is for a group of the user.
    #[must_use]
    pub fn shadowed_note(&self, file: Option<&str>, group: &Self) -> String {
        format!(
            "{}quota {} never applies to user {}, who is a member of group {}: quota {} is for this group, and only the \
             first quota for a user applies; put the quota of the user first",
            self.place(file),
            self.table + 1,
            Quoted(self.name()),
            Quoted(group.name()),
            group.table + 1
        )
    }

    /// Returns the position in the file, as the beginning of a note.
    fn place(&self, file: Option<&str>) -> String {
        match (file, self.line) {
            (Some(file), Some(line)) => format!("{file}:{line}: "),
            (Some(_) | None, _) => String::new(),
        }
    }
}

impl Config {
    /// Returns the users and groups that the config names, without their lines.
    #[must_use]
    pub fn accounts(&self) -> Vec<NamedAccount> {
        let mut all = Vec::new();
        let mut add = |key: &'static str, table: usize, names: &[String]| {
            all.extend(names.iter().map(|name| NamedAccount::new(key, name, table, None)));
        };
        add("access.admin_groups", 0, &self.access.admin_groups);
        add("metrics.readers", 0, &self.metrics.readers);
        add(NOTIFY_USER, 0, self.notify.user.as_slice());
        add(IDLE_USERS, 0, &self.idle.exempt.users);
        add(IDLE_GROUPS, 0, &self.idle.exempt.groups);
        for (table, quota) in self.quotas.iter().enumerate() {
            for subject in &quota.subjects {
                match subject {
                    Subject::User(name) => add(QUOTA_USERS, table, std::slice::from_ref(name)),
                    Subject::Group(name) => add(QUOTA_GROUPS, table, std::slice::from_ref(name)),
                    Subject::Everybody => {}
                }
            }
        }
        for (table, rule) in self.rules.iter().enumerate() {
            if let Some(LeaseAccess { users, groups }) = &rule.access {
                add("gpu.users", table, users);
                add("gpu.groups", table, groups);
            }
        }
        all
    }
}

/// Returns the users and groups that the text of a valid config names, in the order of the file.
#[must_use]
pub fn accounts_in(text: &str) -> Vec<NamedAccount> {
    let (table, _) = DeTable::parse_recoverable(text);
    let mut all = Vec::new();
    let mut add = |key: &'static str, at: usize, table: &DeTable<'_>| {
        let own = key.rsplit('.').next().unwrap_or(key);
        let Some(value) = table.iter().find(|(one, _)| one.get_ref() == own).map(|(_, value)| value) else { return };
        let items = match value.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![value],
        };
        for item in items {
            if let DeValue::String(name) = item.get_ref() {
                let before = text.get(..item.span().start).unwrap_or_default();
                all.push(NamedAccount::new(key, name, at, Some(before.matches('\n').count() + 1)));
            }
        }
    };
    for (key, value) in table.get_ref() {
        match (key.get_ref().as_ref(), value.get_ref()) {
            ("access", DeValue::Table(access)) => add("access.admin_groups", 0, access),
            ("metrics", DeValue::Table(metrics)) => add("metrics.readers", 0, metrics),
            ("notify", DeValue::Table(notify)) => add(NOTIFY_USER, 0, notify),
            ("idle", DeValue::Table(idle)) => {
                let exempt = idle.iter().find(|(key, _)| key.get_ref() == "exempt");
                if let Some(DeValue::Table(exempt)) = exempt.map(|(_, value)| value.get_ref()) {
                    add(IDLE_USERS, 0, exempt);
                    add(IDLE_GROUPS, 0, exempt);
                }
            }
            (name @ ("quota" | "gpu"), DeValue::Array(items)) => {
                let [users, groups] =
                    if name == "quota" { [QUOTA_USERS, QUOTA_GROUPS] } else { ["gpu.users", "gpu.groups"] };
                for (at, item) in items.iter().enumerate() {
                    if let DeValue::Table(item) = item.get_ref() {
                        add(users, at, item);
                        add(groups, at, item);
                    }
                }
            }
            _ => {}
        }
    }
    all.sort_by_key(|account| account.line);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "[access]\nadmin_groups = [\"ops\"]\n[notify]\nuser = \"mail\"\n[[quota]]\ngroups = [\n  \"studnets\",\n  \"staff\",\n]\n\
                        users = [\"alice\"]\nleases = 1\n\n[[quota]]\neverybody = true\n\n\
                        [[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nusers = [\"anna\"]\ngroups = [\"ml\"]\n";

    #[test]
    fn accounts_have_their_lines_and_keys() {
        let found = accounts_in(TEXT);
        let of = |account: &NamedAccount| (account.key, account.name().to_owned(), account.line);
        let named: Vec<_> = found.iter().map(of).collect();
        let expected = [
            ("access.admin_groups", "ops", 2),
            (NOTIFY_USER, "mail", 4),
            ("quota.groups", "studnets", 7),
            ("quota.groups", "staff", 8),
            ("quota.users", "alice", 10),
            ("gpu.users", "anna", 19),
            ("gpu.groups", "ml", 20),
        ];
        assert_eq!(named, expected.map(|(key, name, line)| (key, name.to_owned(), Some(line))));
        let mut of_config = Config::parse(TEXT, "config.toml").unwrap().accounts();
        let key = |one: &NamedAccount| (one.key, one.name().to_owned());
        of_config.sort_by_key(key);
        let mut of_text: Vec<_> = found.iter().map(|one| NamedAccount { line: None, ..one.clone() }).collect();
        of_text.sort_by_key(key);
        assert_eq!(of_config, of_text);
    }

    #[test]
    fn note_names_the_line_the_key_and_a_similar_name() {
        let account = &accounts_in(TEXT)[2];
        assert_eq!(
            account.absent_note(Some("/etc/gpush/config.toml"), Some("students")),
            "/etc/gpush/config.toml:7: this host has no group `studnets`, so `quota.groups` ignores this name; \
             did you mean `students`?"
        );
        let no_line = NamedAccount { line: None, ..account.clone() };
        assert_eq!(
            no_line.absent_note(None, None),
            "this host has no group `studnets`, so `quota.groups` ignores this name"
        );
        assert_eq!(
            accounts_in(TEXT)[1].absent_note(None, None),
            "this host has no user `mail`, so the hook of [notify] cannot run"
        );
    }
}
