//! Which files gpushd trusts: those that only root, or the user that gpushd runs as, can have written. The path is
//! absolute, and all directories above it belong to these users and are not writable by others.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Why a file is not trusted.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    /// Its path is not absolute.
    #[error("it is not an absolute path")]
    Relative,
    /// It cannot be read.
    #[error("cannot read it: {0}")]
    Unreadable(#[from] io::Error),
    /// It is not an executable file.
    #[error("it is not a program")]
    NotAProgram,
    /// It is a directory or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// It, or a directory above it, belongs to an untrusted user.
    #[error("{} belongs to uid {owner}", path.display())]
    Foreign {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Other users can write it, or a directory above it.
    #[error("{} can be written by others", path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
    },
}

impl Untrusted {
    /// Returns what to do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Relative => "name it by its absolute path under [mode_change] in the config".to_owned(),
            Self::Unreadable(_) | Self::NotAProgram => {
                "name a program that is there under [mode_change] in the config, then `systemctl reload gpushd`"
                    .to_owned()
            }
            Self::NotAFile | Self::Foreign { .. } | Self::Writable { .. } => self.remedy(),
        }
    }

    /// The command that makes the file trusted.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Foreign { path, .. } => format!("check its content, then `chown root {}`", path.display()),
            Self::Writable { path } => format!("check its content, then `chmod go-w {}`", path.display()),
            Self::Relative => "give an absolute path".to_owned(),
            Self::Unreadable(_) | Self::NotAProgram | Self::NotAFile => "give the path of a regular file".to_owned(),
        }
    }
}

/// Checks a file that gpushd reads or loads, for a gpushd of uid `own`: the file, and every directory above it.
///
/// # Errors
/// When another user owns one of them or can write to it, or there is no such file.
pub fn check_file(path: &Path, own: u32) -> Result<(), Untrusted> {
    let path = std::path::absolute(path)?;
    let file = fs::canonicalize(&path)?;
    if !fs::metadata(&file)?.is_file() {
        return Err(Untrusted::NotAFile);
    }
    alone(&path, &file, own)
}

/// Returns the file behind `program`, if a gpushd with uid `own` may run it.
///
/// # Errors
/// Why not.
pub fn check(program: &str, own: u32) -> Result<PathBuf, Untrusted> {
    if !program.starts_with('/') {
        return Err(Untrusted::Relative);
    }
    let file = fs::canonicalize(program)?;
    let meta = fs::metadata(&file)?;
    if !meta.is_file() || meta.mode() & 0o111 == 0 {
        return Err(Untrusted::NotAProgram);
    }
    alone(Path::new(program), &file, own)?;
    Ok(file)
}

/// Checks `file`, which `path` resolves to, and the directories above both.
fn alone(path: &Path, file: &Path, own: u32) -> Result<(), Untrusted> {
    for path in file.ancestors() {
        own_alone(path, own)?;
    }
    // A link on the way is followed once, by the caller; its directory must be safe as well.
    for path in path.ancestors().skip(1) {
        own_alone(path, own)?;
    }
    Ok(())
}

fn own_alone(path: &Path, own: u32) -> Result<(), Untrusted> {
    let meta = fs::metadata(path)?;
    if meta.uid() != 0 && meta.uid() != own {
        return Err(Untrusted::Foreign { path: path.to_owned(), owner: meta.uid() });
    }
    // In a sticky directory only the owner replaces a file. A user's own group has no other members.
    let sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
    let others = if own == 0 { 0o022 } else { 0o002 };
    if meta.mode() & others != 0 && !sticky {
        return Err(Untrusted::Writable { path: path.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
}
