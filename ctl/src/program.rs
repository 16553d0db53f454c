//! Programs of other packages that a command runs, such as nvidia-smi and journalctl.
//!
//! For root, another user must not be able to choose the program. So root runs a program only if no other user could have
//! written the file or a directory on its path, and only with a clean environment. Other users run the program that their
//! own `PATH` names.

use std::{
    ffi::OsStr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use gpush_api::{ApiError, Code};
use gpush_host::helper::{self, trust};

/// Returns a command for a program: a path, or a name that is looked up in `PATH`.
///
/// # Errors
/// Root must not run the program.
pub(crate) fn command(program: impl AsRef<Path>) -> Result<Command, ApiError> {
    let program = program.as_ref();
    let own = nix::unistd::geteuid();
    if !own.is_root() {
        return Ok(Command::new(program));
    }
    for_root(program, std::env::var_os("PATH").as_deref(), own.as_raw())
}

/// Returns a command for a program that root runs. `own` is the uid of root.
fn for_root(program: &Path, search: Option<&OsStr>, own: u32) -> Result<Command, ApiError> {
    let refused = |why: &trust::Untrusted, path: &Path| {
        ApiError::new(Code::Unsupported, format!("gpushctl does not run {} as root: {why}", path.display()))
            .hint(why.remedy())
    };
    let found = find(program, search);
    let text = found.to_string_lossy();
    let file = trust::check(&text, own).map_err(|why| refused(&why, &found))?;
    let mut command = Command::new(file);
    // A program with several names chooses by its name what it does, and `file` has followed links.
    command.arg0(&found).env_clear().env("PATH", helper::SEARCH).env("LANG", "C.UTF-8").current_dir("/");
    // Slurm's programs find slurm.conf by this variable.
    if let Some(value) = std::env::var_os("SLURM_CONF") {
        command.env("SLURM_CONF", value);
    }
    Ok(command)
}

/// Returns the path of the program. A name without a directory is the first such file in an absolute directory of
/// `search`. A directory in `search` that is not absolute depends on where the caller is, so it is skipped.
fn find(program: &Path, search: Option<&OsStr>) -> PathBuf {
    if program.components().count() > 1 || program.is_absolute() {
        return std::path::absolute(program).unwrap_or_else(|_| program.to_owned());
    }
    let search = search.map(std::env::split_paths).into_iter().flatten();
    let found = search.filter(|directory| directory.is_absolute()).map(|directory| directory.join(program));
    let mut found = found.filter(|file| file.is_file());
    found.next().unwrap_or_else(|| Path::new("/usr/bin").join(program))
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::OsString,
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt,
    };

    use super::*;

    /// Fault: `gpu reset` and `support-bundle`, run by root, ran a program from a directory that another user could write.
    #[test]
    fn program_that_others_can_write_is_not_run_by_root() {
        let (own, scratch) = (nix::unistd::geteuid().as_raw(), tempfile::tempdir().unwrap());
        let directory = scratch.path().join("bin");
        fs::create_dir(&directory).unwrap();
        let file = directory.join("nvidia-smi");
        fs::write(&file, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
        let search = |first: &Path| {
            let mut paths = OsString::from(first);
            paths.push(":/usr/bin");
            paths
        };
        let run = || for_root(Path::new("nvidia-smi"), Some(&search(&directory)), own);
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
        let command = run().unwrap();
        assert_eq!(command.get_program(), fs::canonicalize(&file).unwrap());
        assert!(command.get_envs().all(|(name, _)| ["PATH", "LANG", "SLURM_CONF"].iter().any(|known| name == *known)));
        fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        let error = run().unwrap_err();
        assert!(error.message.contains("can be written by other users"), "{error:?}");
        assert!(error.hint.unwrap().contains("`chmod go-w "));
    }

    #[test]
    fn relative_directory_in_path_is_skipped() {
        let search = OsString::from(".::bin:/usr/bin");
        assert_eq!(find(Path::new("env"), Some(&search)), Path::new("/usr/bin/env"));
        assert_eq!(find(Path::new("no-such-program"), Some(&search)), Path::new("/usr/bin/no-such-program"));
        assert_eq!(find(Path::new("/opt/slurm/bin/squeue"), Some(&search)), Path::new("/opt/slurm/bin/squeue"));
    }
}
