//! Reads the config file, and checks who can have written it.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code};
use gpush_core::config::{Config, ConfigErrors, MOST_BYTES};
use gpush_host::helper::trust::{self, Untrusted};

use crate::system::options::Trust;

/// Returns the hint for a missing file.
fn create(path: &Path) -> String {
    format!(
        "create an empty config with `install -D -m 644 /dev/null {}`, then start gpushd or run `gpushctl config \
         reload` (administrator). The man page gpush-config(5) describes the settings. Without --config and \
         GPUSH_CONFIG, gpushd needs no config file",
        path.display()
    )
}

/// Why gpushd cannot use a config file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigLoadError {
    /// The user gave the path of the file, but the file does not exist.
    #[error("there is no config file {}: {}", path.display(), create(path))]
    Absent {
        /// Path of the config file.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("the config file {} can't be read", path.display())]
    Unreadable {
        /// Path of the config file.
        path: PathBuf,
        source: io::Error,
    },
    /// Another user can modify the config file or the driver library.
    #[error("the {what} {} is not trusted: {why}; {}", path.display(), why.remedy())]
    Untrusted {
        /// What the file is.
        what: &'static str,
        path: PathBuf,
        why: Untrusted,
    },
    /// The content of the file is invalid.
    #[error("{0}")]
    Wrong(ConfigErrors),
}

impl ConfigLoadError {
    pub(crate) fn to_api(&self) -> ApiError {
        match self {
            Self::Absent { path } => {
                ApiError::new(Code::ConfigInvalid, format!("there is no config file {}", path.display()))
                    .hint(create(path))
            }
            Self::Unreadable { path, source } => {
                ApiError::new(Code::ConfigInvalid, self.to_string()).cause(source.to_string()).hint(format!(
                    "see it with `ls -ld {0}`, make {0} a regular file that gpushd can read, then run `gpushctl config \
                    reload` (administrator)",
                    path.display()
                ))
            }
            Self::Untrusted { what, path, why } => {
                ApiError::new(Code::ConfigInvalid, format!("the {what} {} is not trusted", path.display()))
                    .cause(why.to_string())
                    .hint(format!("{}, then run `gpushctl config reload` (administrator)", why.remedy()))
            }
            Self::Wrong(errors) => {
                let located = errors.located();
                let path = located.first().map_or("the config", |first| first.path.as_str());
                let mut error = ApiError::new(Code::ConfigInvalid, format!("the config {path} has errors"));
                for problem in &located {
                    error = error.cause(format!(
                        "line {}, column {}: {} ({})",
                        problem.line, problem.column, problem.message, problem.hint
                    ));
                }
                error.hint(format!(
                    "correct the config file, check it with `gpushctl config check {path}`, then run `gpushctl config \
                    reload` (administrator)"
                ))
            }
        }
    }
}

/// Reads and checks the config file. Returns no content if there is no file and none is required.
///
/// # Errors
/// If gpushd cannot use the file.
pub(super) fn read(path: &Path, must_exist: bool, trust: Trust) -> Result<(Config, Option<Vec<u8>>), ConfigLoadError> {
    let unreadable = |source| ConfigLoadError::Unreadable { path: path.to_owned(), source };
    let opened = open(path);
    // Check the trust even if the file is missing: another user must not be able to create the file.
    check_trust("config file", path, trust)?;
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(link) = dangling_link(path) {
                let text = format!("{} is a symbolic link to a missing file", link.display());
                return Err(unreadable(io::Error::new(io::ErrorKind::NotFound, text)));
            }
            if must_exist {
                return Err(ConfigLoadError::Absent { path: path.to_owned() });
            }
            return Ok((Config::default(), None));
        }
        Err(error) => return Err(unreadable(error)),
    };
    let bytes = content(file).map_err(unreadable)?;
    let config = parse(&bytes, path, trust)?;
    Ok((config, Some(bytes)))
}

/// Returns whether the file now has other content than `loaded`, the content that gpushd loaded; `None` means no file.
/// Returns true if the file cannot be read.
pub(super) fn differs(path: &Path, loaded: Option<&[u8]>) -> bool {
    match open(path).and_then(content) {
        Ok(now) => loaded != Some(now.as_slice()),
        Err(error) => error.kind() != io::ErrorKind::NotFound || loaded.is_some(),
    }
}

fn open(path: &Path) -> io::Result<fs::File> {
    // With this flag, opening a pipe without a writer does not block.
    fs::File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)
}

fn content(file: fs::File) -> io::Result<Vec<u8>> {
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    // Read one byte more than permitted, so that the parser reports a file that is too large.
    file.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Parses the content of a config file, and checks the driver library that it names.
///
/// # Errors
/// If the content is invalid, or another user could have written the library.
pub(super) fn parse(bytes: &[u8], path: &Path, trust: Trust) -> Result<Config, ConfigLoadError> {
    let config = Config::from_bytes(bytes, &path.display().to_string()).map_err(ConfigLoadError::Wrong)?;
    let library = Path::new(&config.driver.library);
    // If the library is named without a path, the dynamic linker finds it in directories that only root can write.
    if library.components().count() > 1 {
        check_trust("driver library", library, trust)?;
    }
    Ok(config)
}

/// Checks that no other user could have written a file, if trust is required.
fn check_trust(what: &'static str, path: &Path, trust: Trust) -> Result<(), ConfigLoadError> {
    let own = nix::unistd::geteuid().as_raw();
    match trust {
        Trust::Logged => Ok(()),
        Trust::Required => match trust::check_file(path, own) {
            // The file is missing, or is not a regular file. The caller reports this error itself.
            Ok(()) | Err(Untrusted::Unreadable(_) | Untrusted::NotAFile) => Ok(()),
            Err(why) => Err(ConfigLoadError::Untrusted { what, path: path.to_owned(), why }),
        },
    }
}

/// Returns the dangling symbolic link in a path; `None` if the path has none.
fn dangling_link(path: &Path) -> Option<&Path> {
    let is_link = |part: &&Path| fs::symlink_metadata(part).is_ok_and(|meta| meta.is_symlink());
    path.ancestors().filter(is_link).find(|link| fs::metadata(link).is_err())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn error(path: &Path, trust: Trust) -> ApiError {
        read(path, false, trust).unwrap_err().to_api()
    }

    #[test]
    fn missing_config_is_an_error_only_if_named() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        assert_eq!(read(&path, false, Trust::Required).unwrap(), (Config::default(), None));
        let error = read(&path, true, Trust::Logged).unwrap_err();
        assert!(error.to_string().contains("`install -D -m 644 /dev/null "), "{error}");
        assert!(error.to_api().message.contains("there is no config file"), "{error}");
    }

    #[test]
    fn pipe_and_directory_are_refused_as_config_at_once() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for path in [path.as_path(), scratch.path()] {
            for trust in [Trust::Logged, Trust::Required] {
                assert_eq!(error(path, trust).causes, ["it is not a regular file"]);
            }
        }
    }

    #[test]
    fn link_to_a_missing_file_is_not_a_missing_config() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        symlink("absent", at("link")).unwrap();
        symlink("round", at("round")).unwrap();
        for (path, named) in [(at("link"), at("link")), (at("link/config.toml"), at("link"))] {
            let error = error(&path, Trust::Logged);
            assert_eq!(error.causes, [format!("{} is a symbolic link to a missing file", named.display())]);
            assert!(error.hint.unwrap().contains(&format!("`ls -ld {}`", path.display())));
        }
        assert!(error(&at("round"), Trust::Logged).causes[0].contains("symbolic links"));
    }

    #[test]
    fn config_and_library_that_others_can_write_are_not_trusted() {
        let scratch = tempfile::tempdir().unwrap();
        let [path, library] = ["config.toml", "library.so"].map(|name| scratch.path().join(name));
        fs::write(&path, "auto_reconcile = true\n").unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let is_refused = |untrusted: &Path| {
            let error = error(&path, Trust::Required);
            assert!(error.message.ends_with("is not trusted"), "{error}");
            let command = format!("`chmod go-w {}`", untrusted.display());
            assert!(error.hint.as_ref().is_some_and(|hint| hint.contains(&command)), "{error:?}");
            assert!(read(&path, true, Trust::Logged).is_ok());
        };
        mode(&path, 0o666);
        is_refused(&path);
        mode(&path, 0o644);
        read(&path, true, Trust::Required).unwrap();
        fs::write(&path, format!("[driver]\nlibrary = \"{}\"\n", library.display())).unwrap();
        read(&path, true, Trust::Required).unwrap();
        fs::write(&library, "").unwrap();
        mode(&library, 0o666);
        is_refused(&library);
        // Another user could create the file.
        fs::remove_file(&path).unwrap();
        mode(scratch.path(), 0o777);
        assert!(error(&path, Trust::Required).message.ends_with("is not trusted"));
    }
}
