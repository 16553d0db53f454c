//! The file of a lease, to which gpushd appends its notices. Programs of the lease get the path in `GPUSH_NOTICE`, and can
//! watch the file (`tail -f`, inotify).
//!
//! ```text
//! granted ─► empty file, which the holder may only read ─► notice ─► one more line ─► lease ended ─┬─ no notice: removed
//!                                                                                               └─ removed an hour later
//! ```
//!
//! The directory belongs to gpushd, and no other user can create a file in it. So the paths need no check for links.

use std::{
    collections::VecDeque,
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use gpush_api::{LeaseId, LeaseNotice, NoticeKind};
use gpush_host::acl;
use gpush_locked::Locked;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

/// How long the file of an ended lease stays.
const KEPT: Duration = Duration::from_secs(3600);

/// Maximum size of a file in bytes for notices that the holder may miss.
const LARGEST: u64 = 64 << 10;

/// Maximum size of a file in bytes for warnings of the end. Notices of the end itself have no maximum: there are few.
const LARGEST_WITH_WARNINGS: u64 = 4 * LARGEST;

/// The files of all leases.
#[derive(Debug)]
pub(super) struct NoticeFiles {
    directory: PathBuf,
    /// Ended leases whose files stay for a while, oldest first.
    ended: Locked<VecDeque<(Instant, LeaseId)>>,
}

/// One line of a file.
#[derive(Debug, Serialize, Deserialize)]
struct FileLine {
    lease_id: LeaseId,
    /// Without the number of terminals, which is known only later.
    #[serde(flatten)]
    notice: LeaseNotice,
}

impl NoticeFiles {
    /// Creates the directory.
    pub(super) fn new(directory: PathBuf) -> Self {
        let created = DirBuilder::new().recursive(true).mode(0o711).create(&directory);
        // The mode of a new directory also depends on the umask.
        let opened = created.and_then(|()| std::fs::set_permissions(&directory, Permissions::from_mode(0o711)));
        if let Err(error) = opened {
            tracing::warn!("leases have no files with notices, because {} is not usable: {error}", directory.display());
        }
        Self { directory, ended: Locked::default() }
    }

    fn file(&self, id: LeaseId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    /// Creates the file of a lease.
    pub(super) fn create(&self, id: LeaseId, uid: u32) {
        if let Err(error) = create(&self.file(id), uid) {
            tracing::debug!(lease = %id, "lease {id} has no file with notices: {error}");
        }
    }

    /// Returns the path of the file of a lease; `None` if there is no file.
    pub(super) fn path(&self, id: LeaseId) -> Option<String> {
        let path = self.file(id);
        path.exists().then(|| path.to_string_lossy().into_owned())
    }

    /// Appends a notice to the file of a lease.
    pub(super) fn append(&self, id: LeaseId, notice: &LeaseNotice) {
        if let Err(error) = append(&self.file(id), id, notice) {
            tracing::debug!(lease = %id, "lease {id}: cannot write a notice to its file: {error}");
        }
    }

    /// Returns the last notice in the file of a lease. The number of its terminals is not known.
    pub(super) fn last(&self, id: LeaseId) -> Option<LeaseNotice> {
        let text = std::fs::read_to_string(self.file(id)).ok()?;
        let line: FileLine = serde_json::from_str(text.lines().next_back()?).ok()?;
        Some(line.notice)
    }

    /// Removes the file of an ended lease if it is empty. Otherwise it is removed after [`KEPT`].
    pub(super) fn close(&self, id: LeaseId) {
        let path = self.file(id);
        let now = Instant::now();
        let mut ended = self.ended.lock();
        match std::fs::metadata(&path) {
            Ok(found) if found.len() == 0 => remove(&path),
            Ok(_) => ended.push_back((now, id)),
            // A request that was never granted has no file.
            Err(_) => {}
        }
        while let Some((at, id)) = ended.front().copied()
            && now.saturating_duration_since(at) >= KEPT
        {
            ended.pop_front();
            remove(&self.file(id));
        }
    }

    /// Removes the old files of leases that have ended before this gpushd began.
    pub(super) fn remove_others(&self, is_open: impl Fn(LeaseId) -> bool) {
        for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let id = entry.file_name().to_str().and_then(|name| name.parse::<LeaseId>().ok());
            let is_old = entry
                .metadata()
                .and_then(|found| found.modified())
                .is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age >= KEPT));
            match id {
                Some(id) if is_open(id) => {}
                Some(_) if is_old => remove(&entry.path()),
                Some(id) => self.ended.lock().push_back((Instant::now(), id)),
                None => {}
            }
        }
    }
}

fn create(path: &Path, uid: u32) -> io::Result<()> {
    // A lease of a deleted database may have had the same number. It has ended.
    remove(path);
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    if uid == geteuid().as_raw() {
        return Ok(());
    }
    // The file belongs to gpushd: its owner could change the mode, and fill the file system.
    let opened = match acl::grant_read(path, uid) {
        Ok(true) => Ok(()),
        // The file system has no access lists.
        Ok(false) => fchown(&file, Some(uid), None).and_then(|()| file.set_permissions(Permissions::from_mode(0o400))),
        Err(error) => Err(error),
    };
    opened.inspect_err(|_| remove(path))
}

fn append(path: &Path, id: LeaseId, notice: &LeaseNotice) -> io::Result<()> {
    let kind = notice.kind;
    let notice = LeaseNotice { terminals: None, ..notice.clone() };
    let mut line = serde_json::to_vec(&FileLine { lease_id: id, notice })?;
    line.push(b'\n');
    let mut file = OpenOptions::new().append(true).open(path)?;
    let largest = match kind {
        NoticeKind::Expired | NoticeKind::Revoked | NoticeKind::GpuLost => u64::MAX,
        NoticeKind::EndsSoon | NoticeKind::Unused | NoticeKind::OverLimit => LARGEST_WITH_WARNINGS,
        NoticeKind::Cordoned | NoticeKind::MpsFault | NoticeKind::UnusedNoMore | NoticeKind::OverLimitNoMore => LARGEST,
    };
    if file.metadata()?.len() >= largest {
        return Err(io::Error::other("the file is full"));
    }
    file.write_all(&line)
}

fn remove(path: &Path) {
    let _it_may_be_gone = std::fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    fn files() -> (tempfile::TempDir, NoticeFiles) {
        let directory = tempfile::tempdir().unwrap();
        let files = NoticeFiles::new(directory.path().join("notices"));
        (directory, files)
    }

    fn notice(text: &str) -> LeaseNotice {
        let (at, kind) = (Timestamp::UNIX_EPOCH, NoticeKind::Revoked);
        LeaseNotice { at, kind, text: text.to_owned(), ends_at: None, terminals: None }
    }

    #[test]
    fn each_notice_is_one_line_that_only_the_holder_can_read() {
        let (_directory, files) = files();
        assert_eq!(files.path(LeaseId(7)), None);
        files.create(LeaseId(7), geteuid().as_raw());
        for text in ["lease L7 ends in 10m", "lease L7 has ended"] {
            files.append(LeaseId(7), &notice(text));
        }
        let path = files.path(LeaseId(7)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
        assert_eq!(std::fs::metadata(&files.directory).unwrap().permissions().mode() & 0o777, 0o711);
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!((&lines[0]["lease_id"], &lines[0]["notice_kind"]), (&"L7".into(), &"revoked".into()));
        let last = files.last(LeaseId(7)).unwrap();
        assert_eq!((last.kind, last.text.as_str()), (NoticeKind::Revoked, "lease L7 has ended"));
        assert_eq!(files.last(LeaseId(8)), None);
    }

    /// The owner of a file can change its mode, and then fill the file system.
    #[test]
    fn file_of_another_user_belongs_to_gpushd() {
        if !geteuid().is_root() {
            println!("SKIPPED files of other users: only root can create them");
            return;
        }
        let (_directory, files) = files();
        files.create(LeaseId(1), 65_534);
        let found = std::fs::metadata(files.file(LeaseId(1))).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&found), 0);
        files.append(LeaseId(1), &notice("x"));
        assert!(files.last(LeaseId(1)).is_some(), "gpushd may write it");
    }

    #[test]
    fn file_of_an_earlier_lease_with_the_same_number_is_replaced() {
        let (_directory, files) = files();
        std::fs::write(files.file(LeaseId(1)), "an old notice\n").unwrap();
        files.create(LeaseId(1), geteuid().as_raw());
        assert_eq!(std::fs::read_to_string(files.file(LeaseId(1))).unwrap(), "");
        files.close(LeaseId(2));
        assert!(files.ended.lock().is_empty(), "a request without a file leaves nothing");
    }

    #[test]
    fn file_without_notices_goes_with_the_lease() {
        let (_directory, files) = files();
        for id in [LeaseId(1), LeaseId(2)] {
            files.create(id, geteuid().as_raw());
        }
        files.append(LeaseId(2), &notice("x"));
        files.close(LeaseId(1));
        files.close(LeaseId(2));
        assert_eq!(files.path(LeaseId(1)), None);
        assert!(files.path(LeaseId(2)).is_some(), "a program may still read it");
    }

    #[test]
    fn old_files_of_an_earlier_gpushd_are_removed() {
        let (_directory, files) = files();
        for (id, age) in [(1, 7200), (2, 7200), (3, 60)] {
            files.create(LeaseId(id), geteuid().as_raw());
            let file = File::open(files.file(LeaseId(id))).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        files.remove_others(|id| id == LeaseId(1));
        let left: Vec<bool> = (1..=3).map(|id| files.path(LeaseId(id)).is_some()).collect();
        assert_eq!(left, [true, false, true], "open, old, recent");
    }

    /// Fault: a full file did not get the notice of the end.
    #[test]
    fn file_does_not_grow_without_limit_but_gets_each_end() {
        let (_directory, files) = files();
        files.create(LeaseId(1), geteuid().as_raw());
        let fill = |kind| {
            for _ in 0..2000 {
                files.append(LeaseId(1), &LeaseNotice { kind, ..notice(&"x".repeat(400)) });
            }
            std::fs::metadata(files.file(LeaseId(1))).unwrap().len()
        };
        for (kind, largest) in [(NoticeKind::Cordoned, LARGEST), (NoticeKind::Unused, LARGEST_WITH_WARNINGS)] {
            let size = fill(kind);
            assert!((largest..largest + 1000).contains(&size), "{size}");
        }
        files.append(LeaseId(1), &notice("lease L1 has ended"));
        assert_eq!(files.last(LeaseId(1)).map(|last| last.text).as_deref(), Some("lease L1 has ended"));
    }
}
