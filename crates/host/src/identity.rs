//! User id, user name and command line of the processes on the GPUs.
//!
//! ```text
//! uid       /proc/PID/status                              always: does not read the process's memory
//! user      the name service                              within 50 ms
//! command   the process's memory, which may not answer    within 50 ms, separately for each account
//! ```
//!
//! The uid of a process is known even if its command line cannot be read. If the read of one
//! process blocks, command lines are missing only for processes of the same account.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use gpush_core::config::NamedAccount;
use gpush_locked::Locked;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};

use crate::{
    accounts::{Account, Accounts},
    config_accounts, proc, subtask,
    users::{NameService, Unanswered},
};

/// How long a request waits for command lines, and for the owners of subordinate uids.
const WAIT: Duration = Duration::from_millis(50);

/// Maximum number of accounts whose command lines are read at the same time. Each account can block one thread, because a
/// read of a process's memory can hang.
const MOST_ACCOUNTS: usize = 32;

/// A process with its user and its command line, as far as known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Effective user id.
    pub uid: u32,
    /// Name of the user.
    pub user: Option<String>,
    /// Command line, cleaned for display and truncated.
    pub command: Option<String>,
}

impl ProcessIdentity {
    /// Describes the process by its command line, its pid and its user.
    pub fn describe(&self, pid: u32) -> String {
        let user = self.user.clone().unwrap_or_else(|| format!("uid {}", self.uid));
        let command = self.command.as_deref().unwrap_or("a process without a command line");
        format!("{command} (pid {pid}, {user})")
    }
}

/// Looks up users and command lines of processes. A handle; cloning it is cheap.
#[derive(Debug, Clone)]
pub struct Users {
    names: NameService,
    accounts: Accounts,
    commands: Commands,
    host_root: Arc<Path>,
}

impl Users {
    /// Starts the threads of the name service. `host_root` is the root of the file system with `/etc/subuid`.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(host_root: &Path) -> std::io::Result<Self> {
        Ok(Self::new(NameService::start()?, nix::unistd::geteuid().as_raw(), host_root))
    }

    /// Creates the handle. `names` looks up users and groups. `own_uid` is the uid that gpushd runs as, and `host_root`
    /// the root of the file system.
    #[must_use]
    pub fn new(names: NameService, own_uid: u32, host_root: &Path) -> Self {
        let accounts = Accounts::new(names.clone(), own_uid, host_root);
        Self { names, accounts, commands: Commands::new(proc::command_line), host_root: host_root.into() }
    }

    /// Returns the accounts of users, for which limits count.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Returns the name service.
    #[must_use]
    pub fn names(&self) -> &NameService {
        &self.names
    }

    /// Returns the name of a user; `None` if the user has none, or the name service did not answer in time.
    pub async fn user(&self, uid: u32) -> Option<String> {
        self.names.user(uid, self.accounts.kind(uid)).await
    }

    /// Returns the names of the users who own these uids as subordinate uids. Omits other uids, and what the name service
    /// did not answer within 50 ms in all.
    pub async fn owners(&self, uids: BTreeSet<u32>) -> HashMap<u32, String> {
        let mut owners = HashMap::new();
        let find = async {
            for uid in uids {
                let Ok(Some(owner)) = self.accounts.owner_of(uid).await else { continue };
                if let Some(name) = self.user(owner).await {
                    owners.insert(uid, name);
                }
            }
        };
        let _omits_the_others = tokio::time::timeout(WAIT, find).await;
        owners
    }

    /// Returns a note for each of these users and groups that does not exist. `file` is the path of the config that names
    /// them.
    pub async fn account_notes(&self, file: Option<&str>, accounts: &[NamedAccount]) -> Vec<String> {
        config_accounts::notes(&self.names, &self.host_root, file, accounts).await
    }

    /// Returns whether `gids` contains the id of one of the groups with these names. Waits for all groups at the same time.
    ///
    /// # Errors
    /// The name service did not answer about a group within 5 s, and `gids` contains none of the other groups.
    pub async fn is_in_one_of(&self, gids: &[u32], groups: &[String]) -> Result<bool, Unanswered> {
        let mut unanswered = Ok(false);
        let mut answers: FuturesUnordered<_> = groups.iter().map(|group| self.names.group(group)).collect();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(Some(gid)) if gids.contains(&gid) => return Ok(true),
                Ok(Some(_) | None) => {}
                Err(error) => unanswered = Err(error),
            }
        }
        unanswered
    }

    /// Returns the command lines that were read within 50 ms. `processes` contains pairs of pid and
    /// uid. `proc` is `/proc`, or the same directory of a simulated host.
    pub async fn commands(&self, proc: &Path, processes: &[(u32, u32)]) -> HashMap<u32, String> {
        let mut by_account = BTreeMap::<Account, Vec<u32>>::new();
        for (pid, uid) in processes {
            by_account.entry(self.accounts.last(*uid).unwrap_or(Account::Unknown)).or_default().push(*pid);
        }
        self.commands.of(proc, by_account).await
    }

    /// Returns the users and command lines of these processes. Omits processes that have ended.
    pub async fn processes(&self, pids: Vec<u32>) -> HashMap<u32, ProcessIdentity> {
        if pids.is_empty() {
            return HashMap::new();
        }
        let read = subtask::blocking(move || {
            pids.into_iter().filter_map(|pid| Some((pid, proc::owner(pid)?))).collect::<Vec<_>>()
        });
        let uids = read.await.unwrap_or_default();
        let mut users = HashMap::new();
        for (_, uid) in &uids {
            if !users.contains_key(uid) {
                users.insert(*uid, self.user(*uid).await);
            }
        }
        let mut commands = self.commands(Path::new("/proc"), &uids).await;
        let identity = |(pid, uid): (u32, u32)| {
            let user = users.get(&uid).cloned().flatten();
            (pid, ProcessIdentity { uid, user, command: commands.remove(&pid) })
        };
        uids.into_iter().map(identity).collect()
    }
}

/// Reads command lines, separately for each account.
#[derive(Clone)]
struct Commands {
    read: Arc<Read>,
    /// One lock for each account, locked while that account's processes are read.
    locks: Arc<Locked<HashMap<Account, Arc<Lock<()>>>>>,
}

/// A function that reads the command line of a process below a `/proc`.
type Read = dyn Fn(&Path, u32) -> Option<String> + Send + Sync;

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commands").finish_non_exhaustive()
    }
}

type Found = Arc<Locked<HashMap<u32, String>>>;

impl Commands {
    fn new(read: impl Fn(&Path, u32) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { read: Arc::new(read), locks: Arc::default() }
    }

    /// Returns the command lines that were read within [`WAIT`].
    async fn of(&self, proc: &Path, by_account: BTreeMap<Account, Vec<u32>>) -> HashMap<u32, String> {
        let found = Found::default();
        let mut reads = tokio::task::JoinSet::new();
        for (account, pids) in by_account {
            let (commands, found, proc) = (self.clone(), Arc::clone(&found), proc.to_owned());
            reads.spawn(async move {
                let Some(lock) = commands.lock(account) else { return };
                let turn = lock.lock_owned().await;
                let read = move || commands.fill(&proc, &pids, &found, turn);
                subtask::blocking(read).await;
            });
        }
        let _ = tokio::time::timeout(WAIT, async { while subtask::next(&mut reads).await.is_some() {} }).await;
        let mut found = found.lock();
        std::mem::take(&mut *found)
    }

    fn fill(&self, proc: &Path, pids: &[u32], found: &Found, turn: OwnedMutexGuard<()>) {
        for pid in pids {
            // The caller no longer waits for the result, so stop. The caller's next request reads the remaining command
            // lines.
            if Arc::strong_count(found) == 1 {
                break;
            }
            if let Some(command) = (self.read)(proc, *pid) {
                found.lock().insert(*pid, command);
            }
        }
        drop(turn);
    }

    /// Returns the lock of an account; `None` if gpushd already reads the processes of [`MOST_ACCOUNTS`] other accounts.
    fn lock(&self, account: Account) -> Option<Arc<Lock<()>>> {
        let mut locks = self.locks.lock();
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        if locks.len() >= MOST_ACCOUNTS && !locks.contains_key(&account) {
            return None;
        }
        Some(Arc::clone(locks.entry(account).or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{name_cache::IDENTITY_WAIT, users::Lookups};

    #[tokio::test]
    async fn own_process_is_known() {
        let (me, own) = (std::process::id(), nix::unistd::geteuid().as_raw());
        let known = Users::start(Path::new("/")).unwrap().processes(vec![me, u32::MAX - 1]).await;
        assert_eq!((known.len(), known[&me].uid), (1, own));
        assert!(known[&me].command.as_deref().unwrap().contains("gpush_host"), "{known:?}");
        assert!(known[&me].describe(me).contains(&format!("(pid {me}, ")));
    }

    /// Fault: a subordinate uid of a user looked like any unknown uid. A uid of a user has no owner, even in a range.
    #[tokio::test]
    async fn owners_of_subordinate_uids_are_named() {
        let host = tempfile::tempdir().unwrap();
        std::fs::create_dir(host.path().join("etc")).unwrap();
        let ranges = "anna:100000:10\n1001:200000:10\nroot:300000:10\nslow:400000:10\nanna:1001:1\n";
        std::fs::write(host.path().join("etc/subuid"), ranges).unwrap();
        let user = |uid: &u32| {
            let name = match uid {
                0 => "root",
                1000 => "anna",
                1001 => "bob",
                _ => return Some(None),
            };
            Some(Some(name.to_owned()))
        };
        let uid = |name: &String| match name.as_str() {
            "anna" => Some(Some(1000)),
            "root" => Some(Some(0)),
            _ => None,
        };
        let lookups = Lookups { user: Box::new(user), uid: Box::new(uid), ..Lookups::empty() };
        let users = Users::new(NameService::with(lookups).unwrap(), 990, host.path());
        assert_eq!(users.user(1001).await.as_deref(), Some("bob"));
        let owners = users.owners([0, 990, 1001, 99_999, 100_000, 200_009, 300_000, 400_000].into()).await;
        let named = [(100_000, "anna"), (200_009, "bob"), (300_000, "root")].map(|(uid, name)| (uid, name.to_owned()));
        assert_eq!(owners, HashMap::from(named));
    }

    /// Fault: a request waited for one admin group after the other, 5 s for each, while the name service did not answer.
    #[tokio::test]
    async fn known_group_counts_while_another_group_is_unanswered() {
        let (answer, never) = std::sync::mpsc::channel::<()>();
        let never = Locked::new(never);
        let group = move |name: &String| match name.as_str() {
            "known" => Some(Some(77)),
            _ => never.lock().recv().ok().map(|()| None),
        };
        let names = NameService::with(Lookups { group: Box::new(group), ..Lookups::empty() }).unwrap();
        assert_eq!(names.group("known").await, Ok(Some(77)));
        let users = Users::new(names, 990, Path::new("/nowhere"));
        let groups = ["hangs", "also hangs", "known"].map(str::to_owned);
        assert_eq!(users.is_in_one_of(&[77], &groups).await, Ok(true));
        // With a paused clock, the limit passes as soon as the test waits for nothing else.
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        assert_eq!(users.is_in_one_of(&[78], &groups).await, Err(Unanswered));
        assert!(begun.elapsed() < 2 * IDENTITY_WAIT, "both groups are looked up at the same time");
        tokio::time::resume();
        drop(answer);
        assert_eq!(users.is_in_one_of(&[78], &groups).await, Err(Unanswered));
    }

    /// A read of `/proc/PID/cmdline` can block forever: the memory may be mapped from a file system that hangs.
    #[tokio::test]
    async fn process_that_does_not_answer_hides_no_other_users_command() {
        let (answer, never) = std::sync::mpsc::channel::<()>();
        let never = Locked::new(never);
        let commands = Commands::new(move |_, pid| {
            if pid == 1 {
                let _ = never.lock().recv();
            }
            Some(format!("command {pid}"))
        });
        let by_account = || BTreeMap::from([(Account::User(1000), vec![2, 1, 3]), (Account::User(1001), vec![4])]);
        let first = commands.of(Path::new("/proc"), by_account()).await;
        assert_eq!(first, HashMap::from([(2, "command 2".to_owned()), (4, "command 4".to_owned())]));
        // The first read still hangs. The second read does not use another thread for this user.
        let second = commands.of(Path::new("/proc"), by_account()).await;
        assert_eq!(second, HashMap::from([(4, "command 4".to_owned())]));
        drop(answer);
    }

    #[tokio::test]
    async fn users_beyond_the_limit_get_no_thread() {
        let commands = Commands::new(|_, pid| Some(pid.to_string()));
        let taken: Vec<_> = (0..32).map(|uid| commands.lock(Account::User(uid)).unwrap()).collect();
        assert!(commands.lock(Account::User(32)).is_none() && commands.lock(Account::User(31)).is_some());
        drop(taken);
        assert!(commands.lock(Account::User(32)).is_some());
    }
}
