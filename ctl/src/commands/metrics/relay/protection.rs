//! Checks that only root and the relay's user can change the files of the relay.
//!
//! A user who can change the web config can remove its passwords, or name another key. So the relay refuses files that
//! others can change, and files in directories in which others can replace them.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code};
use nix::unistd::{Uid, User};

use super::tls::unreadable;

/// Mode bits with which the group or all users can change a file.
const WRITABLE: u32 = 0o022;

/// Mode bit of a directory in which users can replace only their own files, such as `/tmp`.
const STICKY: u32 = 0o1000;

/// Checks a file and its directories.
///
/// # Errors
/// The file does not exist, it is not a regular file, or other users can change or replace it.
pub(super) fn check(path: &Path) -> Result<(), ApiError> {
    let of = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    // A FIFO would keep the relay waiting.
    if !of.is_file() {
        let what = format!("cannot use {}: it is not a regular file", path.display());
        return Err(ApiError::new(Code::BadRequest, what).hint("name a regular file"));
    }
    let own = Uid::effective().as_raw();
    if let Some(fault) = fault(of.uid(), of.mode(), own) {
        return Err(refused(path, path, &fault));
    }
    for directory in directories(path).map_err(|error| unreadable(path, &error))? {
        let of = fs::metadata(&directory).map_err(|error| unreadable(&directory, &error))?;
        let is_shared_safely = of.mode() & STICKY != 0;
        if let Some(fault) = fault(of.uid(), if is_shared_safely { 0 } else { of.mode() }, own) {
            return Err(refused(path, &directory, &fault));
        }
    }
    Ok(())
}

/// Who can change a file, apart from root and the relay's user.
#[derive(Debug, PartialEq, Eq)]
enum Fault {
    /// Its owner.
    Owner(u32),
    /// Its group, or all users.
    Writable { by_all: bool },
}

/// Returns who can change a file that belongs to `uid`. `own` is the uid of the relay.
fn fault(uid: u32, mode: u32, own: u32) -> Option<Fault> {
    if uid != 0 && uid != own {
        return Some(Fault::Owner(uid));
    }
    (mode & WRITABLE != 0).then_some(Fault::Writable { by_all: mode & 0o002 != 0 })
}

/// Returns the directories on the path of a file, and those on its path without symbolic links.
fn directories(path: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let paths = [std::path::absolute(path)?, fs::canonicalize(path)?];
    Ok(paths.iter().flat_map(|path| path.ancestors().skip(1)).map(Path::to_owned).collect())
}

/// Returns the error about a file. `place` is the file itself or one of its directories.
fn refused(path: &Path, place: &Path, fault: &Fault) -> ApiError {
    let shown = path.display();
    let (who, command) = match fault {
        Fault::Owner(uid) => {
            let name = User::from_uid(Uid::from_raw(*uid)).ok().flatten().map(|user| user.name);
            let who = name.map_or_else(|| format!("uid {uid}"), |name| format!("user {name}"));
            (who, format!("chown root {}", place.display()))
        }
        Fault::Writable { by_all } => {
            let who = if *by_all { "every user of this host" } else { "the group of the file" };
            let who = if place == path || *by_all { who } else { "the group of the directory" };
            (who.to_owned(), format!("chmod go-w {}", place.display()))
        }
    };
    let at = if place == path { String::new() } else { format!(" in {}", place.display()) };
    let verb = if place == path { "change" } else { "replace" };
    let what = format!("cannot use {shown}: {who} can {verb} it{at}");
    ApiError::new(Code::ConfigInvalid, what).hint(format!("`{command}`"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn only_root_and_the_own_user_may_change_a_file() {
        for (uid, mode, expected) in [
            (0, 0o600, None),
            (990, 0o640, None),
            (990, 0o644, None),
            (1001, 0o600, Some(Fault::Owner(1001))),
            (0, 0o660, Some(Fault::Writable { by_all: false })),
            (990, 0o666, Some(Fault::Writable { by_all: true })),
            (0, 0o602, Some(Fault::Writable { by_all: true })),
        ] {
            assert_eq!(fault(uid, mode, 990), expected, "{uid} {mode:o}");
        }
        let error = refused(Path::new("/etc/web.yml"), Path::new("/etc/web.yml"), &Fault::Owner(4_000_001));
        assert_eq!(error.message, "cannot use /etc/web.yml: uid 4000001 can change it");
        assert_eq!(error.hint.as_deref(), Some("`chown root /etc/web.yml`"));
    }

    /// Fault: the relay accepted a web config with mode 0666.
    #[test]
    fn file_that_others_can_change_or_replace_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("config");
        fs::create_dir(&directory).unwrap();
        let file = directory.join("web.yml");
        fs::write(&file, "").unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let refusal = |path: &Path| check(path).err().map(|error| (error.message, error.hint.unwrap()));
        set(&directory, 0o755);
        set(&file, 0o640);
        assert_eq!(refusal(&file), None);
        for mode in [0o666, 0o660] {
            set(&file, mode);
            let (message, hint) = refusal(&file).unwrap();
            assert!(message.ends_with("can change it") && hint.starts_with("`chmod go-w "), "{message} {hint}");
        }
        set(&file, 0o640);
        set(&directory, 0o777);
        let (message, hint) = refusal(&file).unwrap();
        assert!(message.contains("can replace it in") && hint.ends_with("config`"), "{message} {hint}");
        // A symbolic link in a safe directory leads to the same file.
        let link = scratch.path().join("link.yml");
        symlink(&file, &link).unwrap();
        assert!(refusal(&link).is_some());
        set(&directory, 0o1777);
        assert_eq!(refusal(&file), None, "in a sticky directory, users can replace only their own files");
    }

    /// Fault: a FIFO as web config kept the relay waiting without a word.
    #[test]
    fn fifo_is_refused_at_once() {
        let scratch = tempfile::tempdir().unwrap();
        let fifo = scratch.path().join("web.yml");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(check(&fifo).unwrap_err().message.contains("is not a regular file"));
        assert_eq!(check(&scratch.path().join("none")).unwrap_err().code, Code::NotFound);
    }
}
