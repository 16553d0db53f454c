//! Who the processes on the GPUs are: uid, user name, command line.
//!
//! Only the processes that the driver names are looked at, not all of `/proc`. Reading the command
//! line of a process that hangs in the kernel can hang too, and a name service can be slow, so all
//! of it happens on a thread of its own: whoever asks waits a moment at most, and shows pids
//! without names when that was not enough. Names that it has found lately are read without asking it.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpush_api::text;
use nix::unistd::{Uid, User};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};
use tokio::sync::oneshot;

/// How long an asker waits.
const WAIT: Duration = Duration::from_millis(50);

/// How long a user's name is remembered.
const NAMES: Duration = Duration::from_secs(300);

/// How many are: anybody may come with uids of their own.
const MOST_NAMES: usize = 1024;

/// Characters of a command line that are kept.
const COMMAND: usize = 256;

/// A process, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Effective user id.
    pub uid: u32,
    /// Name of the user.
    pub user: Option<String>,
    /// Command line, cleaned for display and cut.
    pub command: Option<String>,
}

impl ProcessIdentity {
    /// The process in words: what it runs, its pid and user.
    pub fn of_process(&self, pid: u32) -> String {
        let user = self.user.clone().unwrap_or_else(|| format!("uid {}", self.uid));
        let command = self.command.as_deref().unwrap_or("a process without a command line");
        format!("{command} (pid {pid}, {user})")
    }
}

enum Question {
    Processes(Vec<u32>, oneshot::Sender<HashMap<u32, ProcessIdentity>>),
    User(u32, oneshot::Sender<Option<String>>),
}

/// The thread that knows.
#[derive(Debug, Clone)]
pub struct Users {
    tx: SyncSender<Question>,
    names: Names,
}

/// Names of users, `None` of those without one, and when each was found.
#[derive(Debug, Clone, Default)]
struct Names(Arc<Mutex<HashMap<u32, Found>>>);

/// When a name was looked for, and what was found.
type Found = (Instant, Option<String>);

impl Names {
    fn find(&self, uid: u32) -> Option<Option<String>> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.get(&uid).filter(|(at, _)| at.elapsed() < NAMES).map(|(_, name)| name.clone())
    }

    fn keep(&self, uid: u32, name: Option<String>) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.len() >= MOST_NAMES {
            names.clear();
        }
        names.insert(uid, (Instant::now(), name));
    }
}

impl Users {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let (tx, rx) = sync_channel::<Question>(64);
        let names = Names::default();
        let found = names.clone();
        thread::Builder::new().name("users".to_owned()).spawn(move || {
            let mut thread = Thread { system: System::new(), names: found };
            while let Ok(question) = rx.recv() {
                match question {
                    Question::Processes(pids, answer) => {
                        // Nobody waits any more: the next asker will want newer answers.
                        if !answer.is_closed() {
                            let _ = answer.send(thread.processes(&pids));
                        }
                    }
                    Question::User(uid, answer) => {
                        let _ = answer.send(thread.name(uid));
                    }
                }
            }
        })?;
        Ok(Self { tx, names })
    }

    /// The name of a user.
    pub async fn user(&self, uid: u32) -> Option<String> {
        match self.names.find(uid) {
            Some(name) => name,
            None => self.ask(|answer| Question::User(uid, answer)).await.flatten(),
        }
    }

    /// Who processes are, as far as it is found out in time.
    pub async fn processes(&self, pids: Vec<u32>) -> HashMap<u32, ProcessIdentity> {
        if pids.is_empty() {
            return HashMap::new();
        }
        self.ask(|answer| Question::Processes(pids, answer)).await.unwrap_or_default()
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (tx, rx) = oneshot::channel();
        self.tx.try_send(question(tx)).ok()?;
        tokio::time::timeout(WAIT, rx).await.ok()?.ok()
    }
}

struct Thread {
    system: System,
    names: Names,
}

impl Thread {
    fn processes(&mut self, pids: &[u32]) -> HashMap<u32, ProcessIdentity> {
        let wanted: Vec<Pid> = pids.iter().map(|pid| Pid::from_u32(*pid)).collect();
        let what =
            ProcessRefreshKind::nothing().with_user(UpdateKind::Always).with_cmd(UpdateKind::Always).without_tasks();
        // A fresh table each time: a pid that was reused must not keep the old one's words.
        self.system = System::new();
        self.system.refresh_processes_specifics(ProcessesToUpdate::Some(&wanted), true, what);
        let mut known = HashMap::new();
        for pid in pids {
            let Some(process) = self.system.process(Pid::from_u32(*pid)) else { continue };
            // The effective one is who the kernel lets it be.
            let Some(uid) = process.effective_user_id().or(process.user_id()).map(|uid| **uid) else { continue };
            let words: Vec<_> = process.cmd().iter().map(|word| word.to_string_lossy()).collect();
            let command =
                if words.is_empty() { process.name().to_string_lossy().into_owned() } else { words.join(" ") };
            known.insert(*pid, ProcessIdentity { uid, user: None, command: shown(&command) });
        }
        for identity in known.values_mut() {
            identity.user = self.name(identity.uid);
        }
        known
    }

    fn name(&mut self, uid: u32) -> Option<String> {
        self.names.find(uid).unwrap_or_else(|| {
            // That the name service is down now is not remembered.
            let user = User::from_uid(Uid::from_raw(uid)).ok()?;
            let name = user.map(|user| text::plain(&user.name));
            self.names.keep(uid, name.clone());
            name
        })
    }
}

/// A command line fit to be shown: by the rule of [`text`], not too long.
fn shown(command: &str) -> Option<String> {
    let text: String = command.chars().map(text::plain_char).take(COMMAND).collect();
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_process_is_known() {
        let mut thread = Thread { system: System::new(), names: Names::default() };
        let me = std::process::id();
        let known = thread.processes(&[me, u32::MAX - 1]);
        assert_eq!(known.len(), 1);
        assert_eq!(known[&me].uid, nix::unistd::geteuid().as_raw());
        assert!(known[&me].command.as_deref().unwrap().contains("gpush_host"), "{known:?}");
    }

    #[test]
    fn a_command_line_is_cut_and_cleaned() {
        assert_eq!(shown("a\x1b[31m\nb").as_deref(), Some("a?[31m b"));
        assert_eq!(shown("py\u{200b}thon \u{202e}gpj.exe").as_deref(), Some("py?thon ?gpj.exe"));
        assert_eq!(shown(&"é".repeat(300)).unwrap().chars().count(), COMMAND);
        assert_eq!(shown(" \n"), None);
    }
}
