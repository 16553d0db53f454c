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

use gpush_api::{Mig, Process, text};
use gpush_nvml::Reading;
use nix::unistd::{Uid, User};
use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};
use tokio::sync::oneshot;

/// How long an caller waits.
const WAIT: Duration = Duration::from_millis(50);

/// How long a user's name is remembered.
const NAMES: Duration = Duration::from_secs(300);

/// How many are: anybody may come with uids of their own.
const MOST_NAMES: usize = 1024;

/// Characters of a command line that are kept.
const COMMAND: usize = 256;

/// A process, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Person {
    pub(crate) uid: u32,
    pub(crate) user: Option<String>,
    pub(crate) command: Option<String>,
}

impl Person {
    /// The process in words: what it runs, its pid and user.
    pub(crate) fn of_process(&self, pid: u32) -> String {
        let user = self.user.clone().unwrap_or_else(|| format!("uid {}", self.uid));
        let command = self.command.as_deref().unwrap_or("a process without a command line");
        format!("{command} (pid {pid}, {user})")
    }
}

enum Question {
    Processes(Vec<u32>, oneshot::Sender<HashMap<u32, Person>>),
    User(u32, oneshot::Sender<Option<String>>),
}

/// The thread that knows.
#[derive(Debug, Clone)]
pub(crate) struct People {
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

impl People {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let (tx, rx) = sync_channel::<Question>(64);
        let names = Names::default();
        let found = names.clone();
        thread::Builder::new().name("people".to_owned()).spawn(move || {
            let mut thread = Thread { system: System::new(), names: found };
            while let Ok(question) = rx.recv() {
                match question {
                    Question::Processes(pids, answer) => {
                        // Nobody waits any more: the next caller will want newer answers.
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
    pub(crate) async fn user(&self, uid: u32) -> Option<String> {
        match self.names.find(uid) {
            Some(name) => name,
            None => self.ask(|answer| Question::User(uid, answer)).await.flatten(),
        }
    }

    /// Who processes are, as far as it is found out in time.
    pub(crate) async fn processes(&self, pids: Vec<u32>) -> HashMap<u32, Person> {
        if pids.is_empty() {
            return HashMap::new();
        }
        self.ask(|answer| Question::Processes(pids, answer)).await.unwrap_or_default()
    }

    /// Writes uid, user and command line into the processes of a reading.
    pub(crate) async fn name(&self, reading: &mut Reading) {
        let mut pids: Vec<u32> = processes(reading).filter_map(|process| process.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        let known = self.processes(pids).await;
        for process in processes_mut(reading) {
            if let Some(person) = process.pid.and_then(|pid| known.get(&pid)) {
                process.uid = Some(person.uid);
                process.user.clone_from(&person.user);
                process.command.clone_from(&person.command);
            }
        }
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (tx, rx) = oneshot::channel();
        self.tx.try_send(question(tx)).ok()?;
        tokio::time::timeout(WAIT, rx).await.ok()?.ok()
    }
}

fn processes(reading: &Reading) -> impl Iterator<Item = &Process> {
    let instances = reading.mig.iter().flat_map(|mig: &Mig| &mig.instances);
    let inner = instances
        .flat_map(|instance| instance.processes.iter().chain(instance.compute.iter().flat_map(|c| &c.processes)));
    reading.processes.iter().chain(inner)
}

fn processes_mut(reading: &mut Reading) -> impl Iterator<Item = &mut Process> {
    let instances = reading.mig.iter_mut().flat_map(|mig: &mut Mig| &mut mig.instances);
    let inner = instances.flat_map(|instance| {
        instance.processes.iter_mut().chain(instance.compute.iter_mut().flat_map(|c| &mut c.processes))
    });
    reading.processes.iter_mut().chain(inner)
}

struct Thread {
    system: System,
    names: Names,
}

impl Thread {
    fn processes(&mut self, pids: &[u32]) -> HashMap<u32, Person> {
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
            known.insert(*pid, Person { uid, user: None, command: shown(&command) });
        }
        for person in known.values_mut() {
            person.user = self.name(person.uid);
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
        assert!(known[&me].command.as_deref().unwrap().contains("gpushd"), "{known:?}");
    }

    #[test]
    fn a_command_line_is_cut_and_cleaned() {
        assert_eq!(shown("a\x1b[31m\nb").as_deref(), Some("a?[31m b"));
        assert_eq!(shown("py\u{200b}thon \u{202e}gpj.exe").as_deref(), Some("py?thon ?gpj.exe"));
        assert_eq!(shown(&"é".repeat(300)).unwrap().chars().count(), COMMAND);
        assert_eq!(shown(" \n"), None);
    }
}
