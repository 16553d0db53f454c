//! Checks whether gpushd can trust a file: only root, or the user that gpushd runs as, can have written the file.
//!
//! gpushd follows the path from `/`, one name at a time. Every directory and every symbolic link on the path must
//! belong to one of these users. Other users must not be able to write to the file or to a directory on the path. A
//! sticky directory is allowed, because other users cannot replace a trusted user's files in such a directory. So no
//! other user can change the file behind the path, not even between the check and the use. If a name does not exist,
//! gpushd checks the path up to the last directory that exists.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use nix::errno::Errno;

/// Maximum number of symbolic links to follow, as in the kernel.
const MOST_LINKS: usize = 40;

/// Why a file is not trusted.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    /// The path is not absolute.
    #[error("the path is not absolute")]
    Relative,
    /// The file does not exist or cannot be read.
    #[error("cannot read the file: {0}")]
    Unreadable(#[from] io::Error),
    /// The path does not lead to an executable file.
    #[error("the file is not a program")]
    NotAProgram,
    /// The path leads to a directory or a device.
    #[error("this is not a regular file")]
    NotAFile,
    /// The file, or a directory on its path, belongs to an untrusted user.
    #[error("{} belongs to uid {owner}", path.display())]
    Foreign {
        /// The file or directory.
        path: PathBuf,
        /// Owner of that file or directory.
        owner: u32,
    },
    /// Other users can write to the file, or to a directory on its path.
    #[error("{} can be written by other users", path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
    },
}

impl Untrusted {
    /// Returns the hint for a program that the config names.
    pub fn hint(&self) -> String {
        match self {
            Self::Relative => "write the absolute path of the program under [mode_change] in the config".to_owned(),
            Self::Unreadable(_) | Self::NotAProgram => {
                "write the path of an existing program under [mode_change] in the config, then run `systemctl reload \
                gpushd`"
                    .to_owned()
            }
            Self::NotAFile | Self::Foreign { .. } | Self::Writable { .. } => self.remedy(),
        }
    }

    /// Returns the command that makes the file trusted.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Foreign { path, .. } => format!("check its content, then run `chown root {}`", path.display()),
            Self::Writable { path } => format!("check its content, then run `chmod go-w {}`", path.display()),
            Self::Relative => "give an absolute path".to_owned(),
            Self::Unreadable(_) | Self::NotAProgram | Self::NotAFile => "give the path of a regular file".to_owned(),
        }
    }
}

/// Checks a file that gpushd reads or loads, and every directory and link on its path. `own` is gpushd's uid.
///
/// # Errors
/// Another user could have written the file, a directory or a link, or the file does not exist.
pub fn check_file(path: &Path, own: u32) -> Result<(), Untrusted> {
    let (_, meta) = follow(path, own)?;
    if meta.is_file() { Ok(()) } else { Err(Untrusted::NotAFile) }
}

/// Returns the file that `program` leads to, if a gpushd with uid `own` may run it.
///
/// # Errors
/// gpushd must not run the file.
pub fn check(program: &str, own: u32) -> Result<PathBuf, Untrusted> {
    if !program.starts_with('/') {
        return Err(Untrusted::Relative);
    }
    let (file, meta) = follow(Path::new(program), own)?;
    if !meta.is_file() || meta.mode() & 0o111 == 0 {
        return Err(Untrusted::NotAProgram);
    }
    Ok(file)
}

/// Follows a path to its file, and checks every directory and link on the path.
fn follow(path: &Path, own: u32) -> Result<(PathBuf, Metadata), Untrusted> {
    let mut names = names(&std::path::absolute(path)?);
    let mut reached = PathBuf::from("/");
    let mut meta = fs::symlink_metadata(&reached)?;
    check_owner_and_mode(&reached, &meta, own)?;
    let mut links = 0;
    while let Some(name) = names.pop_front() {
        if name == ".." {
            reached.pop();
            meta = fs::symlink_metadata(&reached)?;
            continue;
        }
        let next = reached.join(&name);
        let found = match fs::symlink_metadata(&next) {
            // Even in a sticky directory, any user can create a missing file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_writable_by_others(&meta, own) => {
                return Err(Untrusted::Writable { path: reached });
            }
            other => other?,
        };
        check_owner_and_mode(&next, &found, own)?;
        if !found.is_symlink() {
            (reached, meta) = (next, found);
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Err(io::Error::from(Errno::ELOOP).into());
        }
        let target = fs::read_link(&next)?;
        if target.is_absolute() {
            reached = PathBuf::from("/");
            meta = fs::symlink_metadata(&reached)?;
        }
        for name in self::names(&target).into_iter().rev() {
            names.push_front(name);
        }
    }
    Ok((reached, meta))
}

/// Returns the names in a path, in order.
fn names(path: &Path) -> VecDeque<OsString> {
    let name = |component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(name).collect()
}

/// Returns whether users other than root and `own` can write to a file. Group permission matters
/// only if gpushd runs as root. Otherwise gpushd ignores group permission, because the private
/// group of a user has no other members.
fn is_writable_by_others(meta: &Metadata, own: u32) -> bool {
    let others = if own == 0 { 0o022 } else { 0o002 };
    // The mode of a symbolic link has no effect.
    !meta.is_symlink() && meta.mode() & others != 0
}

fn check_owner_and_mode(path: &Path, meta: &Metadata, own: u32) -> Result<(), Untrusted> {
    if meta.uid() != 0 && meta.uid() != own {
        return Err(Untrusted::Foreign { path: path.to_owned(), owner: meta.uid() });
    }
    // In a sticky directory, only the owner of a file (or of the directory) can replace the file.
    let is_sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
    if is_writable_by_others(meta, own) && !is_sticky {
        return Err(Untrusted::Writable { path: path.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn program_that_others_can_write_is_refused() {
        let own = nix::unistd::geteuid().as_raw();
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("hooks");
        fs::create_dir(&dir).unwrap();
        let file = dir.join("hook");
        fs::write(&file, "#!/bin/sh\n").unwrap();
        let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let name = file.to_str().unwrap();
        mode(&dir, 0o755);
        mode(&file, 0o644);
        assert!(matches!(check(name, own), Err(Untrusted::NotAProgram)));
        mode(&file, 0o755);
        assert_eq!(check(name, own).unwrap(), fs::canonicalize(&file).unwrap());
        mode(&file, 0o757);
        assert!(matches!(check(name, own), Err(Untrusted::Writable { .. })));
        mode(&file, 0o755);
        mode(&dir, 0o777);
        assert!(matches!(check(name, own), Err(Untrusted::Writable { path }) if path.ends_with("hooks")));
        mode(&dir, 0o1777);
        check(name, own).unwrap();
        assert!(matches!(check(name, own + 7), Err(Untrusted::Foreign { .. })) || own == 0);
        assert!(matches!(check("hooks/hook", own), Err(Untrusted::Relative)));
        assert!(matches!(check("/no/such/program", own), Err(Untrusted::Unreadable(_))));
        assert!(matches!(check("/bin", own), Err(Untrusted::NotAProgram)));
    }

    #[test]
    fn file_that_another_user_could_have_written_is_not_trusted() {
        let own = nix::unistd::geteuid().as_raw();
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("config.toml");
        fs::write(&file, "").unwrap();
        let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        mode(&file, 0o644);
        check_file(&file, own).unwrap();
        mode(&file, 0o666);
        let error = check_file(&file, own).unwrap_err();
        assert!(matches!(&error, Untrusted::Writable { path } if path.ends_with("config.toml")), "{error}");
        assert!(error.remedy().contains("`chmod go-w "), "{}", error.remedy());
        mode(&file, 0o644);
        mode(scratch.path(), 0o777);
        assert!(matches!(check_file(&file, own), Err(Untrusted::Writable { .. })));
        mode(scratch.path(), 0o700);
        assert!(matches!(check_file(scratch.path(), own), Err(Untrusted::NotAFile)));
        if own == 0 {
            std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
            let error = check_file(&file, own).unwrap_err();
            assert!(matches!(error, Untrusted::Foreign { owner: 65534, .. }), "{error}");
        }
    }

    /// Changes the owner of a file. Needs root.
    fn give(path: &Path, uid: u32) {
        std::os::unix::fs::lchown(path, Some(uid), None).unwrap();
    }

    #[test]
    fn link_through_a_directory_of_another_user_is_not_trusted() {
        let own = nix::unistd::geteuid().as_raw();
        if own != 0 {
            println!("SKIPPED: only root can give a directory to another user");
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        for dir in ["theirs", "ours"] {
            fs::create_dir(at(dir)).unwrap();
        }
        fs::write(at("ours/library.so"), "").unwrap();
        symlink(at("ours/library.so"), at("theirs/link.so")).unwrap();
        symlink("theirs/link.so", at("first.so")).unwrap();
        check_file(&at("first.so"), own).unwrap();
        give(&at("theirs"), 65534);
        assert!(
            matches!(check_file(&at("first.so"), own), Err(Untrusted::Foreign { path, .. }) if path == at("theirs"))
        );
        // gpushd also refuses a file that does not exist yet, if another user can create it.
        let absent = check_file(&at("theirs/absent.so"), own);
        assert!(matches!(absent, Err(Untrusted::Foreign { .. })), "{absent:?}");
        assert!(matches!(check_file(&at("ours/absent.so"), own), Err(Untrusted::Unreadable(_))));
        // In a sticky directory, other users cannot replace `library.so`, but any user may create `absent.so`. A link
        // may belong to another user.
        fs::set_permissions(at("ours"), fs::Permissions::from_mode(0o1777)).unwrap();
        check_file(&at("ours/library.so"), own).unwrap();
        assert!(matches!(check_file(&at("ours/absent.so"), own), Err(Untrusted::Writable { .. })));
        symlink("library.so", at("ours/link.so")).unwrap();
        check_file(&at("ours/link.so"), own).unwrap();
        give(&at("ours/link.so"), 65534);
        assert!(matches!(check_file(&at("ours/link.so"), own), Err(Untrusted::Foreign { .. })));
    }

    #[test]
    fn links_and_parent_names_lead_where_the_kernel_says() {
        let own = nix::unistd::geteuid().as_raw();
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/file"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(at("a/file"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("a/b", at("link")).unwrap();
        for way in ["a/./b/../file", "link/../file", "a/b/../../a/file"] {
            let way = at(way);
            assert_eq!(
                check(way.to_str().unwrap(), own).unwrap(),
                fs::canonicalize(&way).unwrap(),
                "{}",
                way.display()
            );
        }
        symlink("round", at("round")).unwrap();
        assert!(matches!(check_file(&at("round"), own), Err(Untrusted::Unreadable(_))));
    }
}
