//! Notes about users and groups that the config names but the host does not have.

use std::{collections::BTreeMap, fs, path::Path};

use gpush_core::{config::NamedAccount, lease::quota::Subject, nearest::nearest, quote::Quoted};

use crate::users::{Lookups, NameService};

/// Returns a note for each of these users and groups that does not exist. If the name service does not answer, the last
/// note says so, and names what was not checked. `file` is the path of the config, and `host_root` the root of the file
/// system, where the function looks for similar names.
pub async fn notes(
    names: &NameService,
    host_root: &Path,
    file: Option<&str>,
    accounts: &[NamedAccount],
) -> Vec<String> {
    let (mut notes, mut unchecked) = (Vec::new(), Vec::<String>::new());
    for account in accounts {
        let is_answering = unchecked.is_empty();
        let (answer, database, what) = match (&account.subject, is_answering) {
            (Subject::User(name), true) => (names.uid(name).await, "passwd", "user"),
            // Do not wait for each further name.
            (Subject::User(name), false) => (names.last_uid(name), "passwd", "user"),
            (Subject::Group(name), true) => (names.group(name).await, "group", "group"),
            (Subject::Group(name), false) => (names.last_group(name), "group", "group"),
            (Subject::Everybody, _) => continue,
        };
        match answer {
            Ok(Some(_)) => {}
            Ok(None) => {
                let known = entries(host_root, database);
                let others = known.keys().map(String::as_str).filter(|name| *name != account.name());
                let similar = nearest(account.name(), others);
                notes.push(account.absent_note(file, similar));
            }
            Err(_) => unchecked.push(format!("{what} {}", Quoted(account.name()))),
        }
    }
    unchecked.dedup();
    if !unchecked.is_empty() {
        let what = unchecked.join(", ");
        notes.push(format!("the name service of the host does not answer, so these names were not checked: {what}"));
        return notes;
    }
    for account in accounts {
        notes.extend(shadowed(names, file, account, accounts).await);
    }
    notes
}

/// Returns a note if an earlier quota is for a group of this user, so that the quota of the user never applies.
async fn shadowed(
    names: &NameService,
    file: Option<&str>,
    account: &NamedAccount,
    all: &[NamedAccount],
) -> Option<String> {
    let earlier = account.groups_of_earlier_quotas(all);
    if earlier.is_empty() {
        return None;
    }
    let uid = names.uid(account.name()).await.ok()??;
    let members = names.groups_of(uid).await.ok()??;
    for group in earlier {
        let gid = names.group(group.name()).await.ok().flatten();
        if gid.is_some_and(|gid| members.contains(&gid)) {
            return Some(account.shadowed_note(file, group));
        }
    }
    None
}

/// Does the same as [`notes`], for programs without an async runtime. If `host_root` is not `/`, the host has only the users
/// and groups of the files below this root.
///
/// # Errors
/// If the threads for the lookups cannot be started.
pub fn notes_blocking(host_root: &Path, file: Option<&str>, accounts: &[NamedAccount]) -> std::io::Result<Vec<String>> {
    if accounts.is_empty() {
        return Ok(Vec::new());
    }
    let names = if host_root == Path::new("/") { NameService::start()? } else { of_files(host_root)? };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    Ok(runtime.block_on(notes(&names, host_root, file, accounts)))
}

/// Starts a name service that knows only the users and groups of the files below a root.
fn of_files(host_root: &Path) -> std::io::Result<NameService> {
    let (users, groups) = (entries(host_root, "passwd"), entries(host_root, "group"));
    NameService::with(Lookups {
        uid: Box::new(move |name| Some(users.get(name).copied())),
        group: Box::new(move |name| Some(groups.get(name).copied())),
        ..Lookups::empty()
    })
}

/// Returns the names and ids of `/etc/passwd` or `/etc/group`; empty if the file cannot be read.
fn entries(host_root: &Path, database: &str) -> BTreeMap<String, u32> {
    let text = fs::read_to_string(host_root.join("etc").join(database)).unwrap_or_default();
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let (name, id) = (fields.next()?, fields.nth(1)?.parse().ok()?);
        Some((name.to_owned(), id))
    };
    text.lines().filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use gpush_core::config::accounts_in;

    use super::*;

    const CONFIG: &str = "[access]\nadmin_groups = [\"ops\"]\n[[quota]]\nusers = [\"anna\"]\ngroups = [\"studnets\"]\n";

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nanna:x:1000:1000::/:/bin/sh\n").unwrap();
        fs::write(root.path().join("etc/group"), "ops:x:7:\nstudents:x:100:anna\n").unwrap();
        root
    }

    #[test]
    fn misspelt_group_gets_a_note_with_the_similar_name() {
        let root = root();
        assert_eq!(
            notes_blocking(root.path(), Some("c.toml"), &accounts_in(CONFIG)).unwrap(),
            [
                "c.toml:5: this host has no group `studnets`, so `quota.groups` ignores this name; did you mean `students`?"
            ]
        );
    }

    #[tokio::test]
    async fn quota_of_a_member_after_the_quota_of_the_group_is_reported() {
        let names = NameService::with(Lookups {
            uid: Box::new(|_| Some(Some(1000))),
            group: Box::new(|name| Some(Some(if name == "students" { 100 } else { 7 }))),
            memberships: Box::new(|_| Some(Some(vec![1000, 100]))),
            ..Lookups::empty()
        })
        .unwrap();
        let root = root();
        let of = async |text: &str| notes(&names, root.path(), None, &accounts_in(text)).await;
        let first = "[[quota]]\ngroups = [\"students\"]\n[[quota]]\nusers = [\"anna\"]\n";
        let found = of(first).await;
        assert!(found.len() == 1 && found[0].starts_with("quota 2 never applies to user `anna`"), "{found:?}");
        for text in [
            "[[quota]]\nusers = [\"anna\"]\n[[quota]]\ngroups = [\"students\"]\n",
            "[[quota]]\ngroups = [\"ops\"]\n[[quota]]\nusers = [\"anna\"]\n",
            "[[quota]]\ngroups = [\"students\"]\nusers = [\"anna\"]\n",
        ] {
            assert_eq!(of(text).await, [""; 0], "{text}");
        }
    }

    #[tokio::test]
    async fn outage_of_the_name_service_is_no_absence() {
        let group = |name: &String| (name != "studnets").then_some(Some(7));
        let names = NameService::with(Lookups { group: Box::new(group), ..Lookups::empty() }).unwrap();
        let root = root();
        assert_eq!(
            notes(&names, root.path(), None, &accounts_in(CONFIG)).await,
            [
                "this host has no user `anna`, so `quota.users` ignores this name",
                "the name service of the host does not answer, so these names were not checked: group `studnets`",
            ]
        );
    }
}
