//! Accounts: the users whose leases, requests, connections and records gpushd counts together.
//!
//! A user can have 65,536 or more subordinate uids, and can connect with each of them through a user namespace. So
//! every limit counts per account, and never per uid:
//!
//! ```text
//! uid ─┬─ root, or the user that gpushd runs as ──────► this user
//!      ├─ the user database knows it ─────────────────► this user
//!      ├─ a transient uid of a user namespace ────────► the account of all unknown uids
//!      ├─ in a range of subordinate uids ─┬─ of a user ► the owner of the range
//!      │                                  └─ of root ──► containers of root
//!      ├─ the name service does not answer ───────────► no answer
//!      └─ otherwise ──────────────────────────────────► the account of all unknown uids
//! ```
//!
//! A user with 65,536 subordinate uids can cause more lookups than the cache of the name service has entries. So a uid
//! in a range counts for the owner of the range until the name service has answered about the uid ([`Accounts::last`]),
//! and lookups of such uids leave room in the queue for other lookups ([`UidKind`]). Only [`Accounts::of`] waits.
//!
//! The ranges are in `/etc/subuid`, see subuid(5). If `subid` in `/etc/nsswitch.conf` names another source, gpushd also
//! asks `getsubids` for the ranges of each user whose account it has determined, for example because the user has
//! connected. Until then, the user's subordinate uids from such a source belong to the account of all unknown uids.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::Path,
    process::Stdio,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant, SystemTime},
};

use crate::users::{NameService, UidKind, Unanswered};
use gpush_locked::Locked;

/// Ranges of subordinate uids, below the root of the file system.
const SUBUID: &str = "etc/subuid";

/// The file that names the sources of ranges, below the root of the file system.
const SOURCES: &str = "etc/nsswitch.conf";

/// The program that prints the ranges of a user.
const GETSUBIDS: &str = "/usr/bin/getsubids";

/// Time limit for [`GETSUBIDS`].
const GETSUBIDS_LIMIT: Duration = Duration::from_secs(2);

/// How long the ranges of a user from another source are fresh.
const DIRECTORY_FRESH: Duration = Duration::from_secs(3600);

/// Maximum number of users whose ranges gpushd asks for.
const MOST_OWNERS: usize = 4096;

/// Maximum number of users whose ranges gpushd asks for in one [`Accounts::refresh`].
const OWNERS_A_REFRESH: usize = 32;

/// Maximum number of lines that gpushd reads from `/etc/subuid`. The uids of later lines are unknown.
const MOST_RANGES: usize = 100_000;

/// The user whose leases, requests, connections and records count together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Account {
    /// The user with this uid, including subordinate uids.
    User(u32),
    /// Subordinate uids of root, which containers of root use. They do not have the rights of root. For quotas, also uid 0
    /// in a container.
    RootContainers,
    /// All uids that belong neither to a user nor to a range whose owner exists.
    Unknown,
}

impl Account {
    /// Returns the uid of the user; `None` if the account is not that of a user.
    #[must_use]
    pub fn user(self) -> Option<u32> {
        match self {
            Self::User(uid) => Some(uid),
            Self::RootContainers | Self::Unknown => None,
        }
    }

    /// Returns a number that identifies the account. For a user, it is the uid.
    #[must_use]
    pub fn number(self) -> i64 {
        match self {
            Self::User(uid) => uid.into(),
            Self::Unknown => -1,
            Self::RootContainers => -2,
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::RootContainers => f.write_str("the containers of root"),
            Self::Unknown => f.write_str("the account of all unknown uids"),
        }
    }
}

/// Finds the accounts of uids. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub struct Accounts {
    names: NameService,
    own_uid: u32,
    host_root: Arc<Path>,
    ranges: Arc<Locked<Ranges>>,
}

#[derive(Debug, Default)]
struct Ranges {
    /// The ranges in `/etc/subuid`, sorted by their first uid.
    local: Vec<Range>,
    /// When `/etc/subuid` was changed before it was read.
    changed: Option<SystemTime>,
    /// For each user whose account was determined, the time of the last lookup, and the ranges from other sources.
    directory: BTreeMap<u32, (Option<Instant>, Vec<Range>)>,
    /// The ranges of all these users, sorted by their first uid.
    from_directory: Vec<Range>,
}

impl Ranges {
    /// Replaces the ranges of a user from other sources.
    fn set_directory(&mut self, owner: u32, of_owner: Vec<Range>) {
        let Some(entry) = self.directory.get_mut(&owner) else { return };
        entry.1 = of_owner;
        self.from_directory = sorted(self.directory.values().flat_map(|(_, ranges)| ranges).cloned().collect());
    }
}

/// A range of subordinate uids.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Range {
    first: u32,
    last: u32,
    owner: Owner,
    /// The largest `last` of this range and all earlier ranges.
    reach: u32,
}

/// The owner of a range of uids.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Owner {
    Uid(u32),
    Name(String),
    /// systemd-nsresourced lends the range to a user namespace, and does not report the user.
    Namespace,
}

impl Accounts {
    /// Creates the handle, and reads `/etc/subuid`. `own_uid` is the uid that gpushd runs as, and `host_root` the root of
    /// the file system.
    #[must_use]
    pub fn new(names: NameService, own_uid: u32, host_root: &Path) -> Self {
        let accounts = Self { names, own_uid, host_root: host_root.into(), ranges: Arc::default() };
        accounts.read_local();
        accounts
    }

    /// Returns the account of a uid.
    ///
    /// # Errors
    /// The name service did not answer within 5 s about the uid, or within 5 s about the owner of its range.
    pub async fn of(&self, uid: u32) -> Result<Account, Unanswered> {
        if self.is_own(uid) {
            return Ok(Account::User(uid));
        }
        let owner = self.owner(uid);
        if self.names.known_user(uid, kind_of(owner.as_ref())).await?.is_some() {
            self.note_owner(uid);
            return Ok(Account::User(uid));
        }
        match owner {
            None => Ok(Account::Unknown),
            Some(Owner::Uid(owner)) => Ok(of_owner(Some(owner))),
            Some(Owner::Name(name)) => Ok(of_owner(self.names.uid(&name).await?)),
            Some(Owner::Namespace) => Ok(Account::Unknown),
        }
    }

    /// Returns the account of a uid according to the last answers of the name service, without waiting. Until the name
    /// service has answered about a uid in a range, returns the account of the owner of the range.
    ///
    /// # Errors
    /// There is no answer yet about a uid in no range, or about the owner of the range. A lookup has begun, unless too
    /// many lookups wait.
    pub fn last(&self, uid: u32) -> Result<Account, Unanswered> {
        if self.is_own(uid) {
            return Ok(Account::User(uid));
        }
        let owner = self.owner(uid);
        let user = self.names.last_known_user(uid, kind_of(owner.as_ref()));
        if let Ok(Some(_)) = user {
            self.note_owner(uid);
            return Ok(Account::User(uid));
        }
        match owner {
            None => user.map(|_| Account::Unknown),
            Some(Owner::Uid(owner)) => Ok(of_owner(Some(owner))),
            Some(Owner::Name(name)) => Ok(of_owner(self.names.last_uid(&name)?)),
            Some(Owner::Namespace) => Ok(Account::Unknown),
        }
    }

    /// Returns whether `uid` is a subordinate uid of the user `owner`. Waits for the name service only if `uid` is in a range
    /// of `owner`. A uid of a user is not subordinate, even if it is in a range.
    ///
    /// # Errors
    /// The name service did not answer within 5 s about the owner of the range, or within 5 s about the uid.
    pub async fn owns(&self, owner: u32, uid: u32) -> Result<bool, Unanswered> {
        let of_range = match self.range_owner(owner, uid) {
            Some(Owner::Name(name)) => self.names.uid(&name).await?,
            Some(Owner::Uid(of_range)) => Some(of_range),
            Some(Owner::Namespace) | None => None,
        };
        // The uid may be that of a user who was created just now.
        Ok(of_range == Some(owner) && self.names.user_now(uid, UidKind::Subordinate).await?.is_none())
    }

    /// Does the same as [`Accounts::owns`] according to the last answers of the name service, without waiting.
    ///
    /// # Errors
    /// There is no answer yet about the owner of the range, or about the uid.
    pub fn last_owns(&self, owner: u32, uid: u32) -> Result<bool, Unanswered> {
        let of_range = match self.range_owner(owner, uid) {
            Some(Owner::Name(name)) => self.names.last_uid(&name)?,
            Some(Owner::Uid(of_range)) => Some(of_range),
            Some(Owner::Namespace) | None => None,
        };
        Ok(of_range == Some(owner) && self.names.last_known_user(uid, UidKind::Subordinate)?.is_none())
    }

    /// Returns the uid of the user who owns the subordinate uid `uid`; `None` if `uid` is not a subordinate uid. Waits for the
    /// name service only about the owner. Until it has answered about `uid`, a uid in a range is a subordinate uid.
    ///
    /// # Errors
    /// The name service did not answer within 5 s about the owner of the range.
    pub(crate) async fn owner_of(&self, uid: u32) -> Result<Option<u32>, Unanswered> {
        let owner = if self.is_own(uid) { None } else { self.owner(uid) };
        if owner.is_none() || matches!(self.names.last_known_user(uid, UidKind::Subordinate), Ok(Some(_))) {
            return Ok(None);
        }
        match owner {
            Some(Owner::Uid(owner)) => Ok(Some(owner)),
            Some(Owner::Name(name)) => self.names.uid(&name).await,
            Some(Owner::Namespace) | None => Ok(None),
        }
    }

    /// Returns the owner of the range that holds `uid`, if `owner` can be this owner. Root of the host needs no range, and
    /// root of a container owns nothing.
    fn range_owner(&self, owner: u32, uid: u32) -> Option<Owner> {
        if owner == 0 || owner == uid || self.is_own(uid) { None } else { self.owner(uid) }
    }

    /// Returns whether a uid is in a range of subordinate uids.
    pub(crate) fn kind(&self, uid: u32) -> UidKind {
        kind_of(self.owner(uid).as_ref())
    }

    /// Reads `/etc/subuid` again if it has changed, and asks other sources for the ranges of the users whose
    /// accounts were determined.
    pub async fn refresh(&self) {
        self.read_local();
        let text = fs::read_to_string(self.host_root.join(SOURCES)).unwrap_or_default();
        if !has_other_source(&text) {
            return;
        }
        for owner in self.owners_to_look_up() {
            let Ok(Some(name)) = self.names.known_user(owner, UidKind::Other).await else { continue };
            let Some(output) = getsubids(&name).await else { continue };
            self.lock().set_directory(owner, directory_ranges(&output, owner));
        }
    }

    fn is_own(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    fn lock(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock()
    }

    fn owner(&self, uid: u32) -> Option<Owner> {
        let ranges = self.lock();
        find(&ranges.local, uid)
            .or_else(|| find(&ranges.from_directory, uid))
            .cloned()
            .or_else(|| self.names.is_transient(uid).then_some(Owner::Namespace))
    }

    /// Remembers a user, so that [`Accounts::refresh`] asks for the user's ranges.
    fn note_owner(&self, uid: u32) {
        let mut ranges = self.lock();
        if ranges.directory.len() < MOST_OWNERS {
            ranges.directory.entry(uid).or_default();
        }
    }

    fn owners_to_look_up(&self) -> Vec<u32> {
        let mut ranges = self.lock();
        let is_due = |at: &Option<Instant>| at.is_none_or(|at| at.elapsed() >= DIRECTORY_FRESH);
        let due = ranges.directory.iter_mut().filter(|(_, (at, _))| is_due(at)).take(OWNERS_A_REFRESH);
        due.map(|(uid, (at, _))| {
            *at = Some(Instant::now());
            *uid
        })
        .collect()
    }

    fn read_local(&self) {
        let file = self.host_root.join(SUBUID);
        let changed = fs::metadata(&file).and_then(|data| data.modified()).ok();
        if self.lock().changed == changed {
            return;
        }
        let local = local_ranges(&fs::read_to_string(file).unwrap_or_default());
        let mut ranges = self.lock();
        (ranges.local, ranges.changed) = (local, changed);
    }
}

fn kind_of(owner: Option<&Owner>) -> UidKind {
    if owner.is_some() { UidKind::Subordinate } else { UidKind::Other }
}

/// Returns the account for a range. `None` means that the owner of the range does not exist.
fn of_owner(owner: Option<u32>) -> Account {
    match owner {
        Some(0) => Account::RootContainers,
        Some(owner) => Account::User(owner),
        None => Account::Unknown,
    }
}

/// Returns the owner of the range that holds the uid. Of several, the range with the largest first uid counts.
fn find(ranges: &[Range], uid: u32) -> Option<&Owner> {
    let after = ranges.partition_point(|range| range.first <= uid);
    let before = ranges[..after].iter().rev().take_while(|range| range.reach >= uid);
    before.into_iter().find(|range| range.last >= uid).map(|range| &range.owner)
}

fn sorted(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_by_key(|range| range.first);
    let mut reach = 0;
    for range in &mut ranges {
        reach = reach.max(range.last);
        range.reach = reach;
    }
    ranges
}

fn range(owner: Owner, first: &str, count: &str) -> Option<Range> {
    let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
    let last = first.saturating_add(count.checked_sub(1)?);
    Some(Range { first, last, owner, reach: last })
}

/// Parses `/etc/subuid`: lines in the form `owner:first:count`, where `owner` is a name or a uid.
fn local_ranges(text: &str) -> Vec<Range> {
    let of_line = |line: &str| {
        let mut fields = line.trim().split(':');
        let owner = fields.next().filter(|owner| !owner.is_empty() && !owner.starts_with('#'))?;
        let owner = owner.parse().map_or_else(|_| Owner::Name(owner.to_owned()), Owner::Uid);
        range(owner, fields.next()?, fields.next()?)
    };
    sorted(text.lines().take(MOST_RANGES).filter_map(of_line).collect())
}

/// Parses the output of `getsubids USER`: lines in the form `0: alice 100000 65536`.
fn directory_ranges(text: &str, owner: u32) -> Vec<Range> {
    let of_line = |line: &str| {
        let mut words = line.split_whitespace().skip(2);
        range(Owner::Uid(owner), words.next()?, words.next()?)
    };
    sorted(text.lines().take(MOST_RANGES).filter_map(of_line).collect())
}

/// Returns whether `/etc/nsswitch.conf` names a source of ranges other than the file.
fn has_other_source(text: &str) -> bool {
    let line = text.lines().find_map(|line| line.trim().strip_prefix("subid:"));
    line.is_some_and(|sources| sources.split_whitespace().any(|source| source != "files"))
}

/// Runs `getsubids`; `None` if it fails or takes too long.
async fn getsubids(user: &str) -> Option<String> {
    let mut command = tokio::process::Command::new(GETSUBIDS);
    command.arg(user).env_clear().current_dir("/").kill_on_drop(true);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let output = tokio::time::timeout(GETSUBIDS_LIMIT, command.output()).await.ok()?.ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests;
