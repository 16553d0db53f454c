//! The active config. A reload applies all of a new config, or none of it.
//!
//! Most settings take effect at once. The options of the driver worker and the path of the second socket take effect
//! only when gpushd starts again. Until then, gpushd uses the old values, and shows them next to the values in the
//! file.
//!
//! gpushd keeps a copy of the last valid file in its state directory. If the file has errors when systemd starts
//! gpushd, gpushd uses the copy and reports the errors. It does the same after a reload of such a file. Without the
//! copy, the daemons and leases of users would lose their rules.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use gpush_api::{ApiError, Code, PendingRestart};
use gpush_core::config::{Config, ConfigErrors, MOST_BYTES};

use gpush_host::helper::trust::{self, Untrusted};

use crate::options::Trust;

/// Hint for a missing file.
const WITHOUT: &str = "copy config.example.toml there, or use neither --config nor GPUSH_CONFIG; without a file at \
    the default path, gpushd runs and manages no GPU";

/// Why gpushd cannot use a config file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigLoadError {
    /// The user gave the path of the file, but the file does not exist.
    #[error("there is no config file {}: {WITHOUT}", path.display())]
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
    /// Another user could have written the file.
    #[error("the config file {} is not trusted: {why}; {}", path.display(), why.remedy())]
    Untrusted {
        /// Path of the config file.
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
                ApiError::new(Code::ConfigInvalid, format!("there is no config file {}", path.display())).hint(WITHOUT)
            }
            Self::Unreadable { path, source } => ApiError::new(Code::ConfigInvalid, self.to_string())
                .cause(source.to_string())
                .hint(format!("make {} readable for gpushd, or name another file with --config", path.display())),
            Self::Untrusted { path, why } => {
                ApiError::new(Code::ConfigInvalid, format!("the config file {} is not trusted", path.display()))
                    .cause(why.to_string())
                    .hint(format!("{}, then `systemctl reload gpushd`", why.remedy()))
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
                    "correct the config file, check it with `gpushctl config check {path}`, then `systemctl reload \
                    gpushd`"
                ))
            }
        }
    }
}

/// The active config and its origin. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Settings(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    must_exist: bool,
    trust: Trust,
    /// Path of the copy of the last valid file.
    copy: Option<PathBuf>,
    state: RwLock<CurrentSettings>,
}

#[derive(Debug)]
struct CurrentSettings {
    config: Arc<Config>,
    /// The content of the active file; `None` if there is no file.
    text: Option<Vec<u8>>,
    /// The error of the last start or reload; `None` if the file was loaded.
    trouble: Option<ApiError>,
    /// Settings whose new value in the file takes effect only after a restart.
    pending: Vec<PendingRestart>,
}

/// A file that gpushd has read but not activated yet.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// The config to activate. Settings that need a restart have their old values.
    pub(crate) config: Config,
    /// The config as it is in the file.
    pub(crate) in_file: Config,
    text: Option<Vec<u8>>,
}

impl Settings {
    /// Reads the config when a user starts gpushd.
    pub(crate) fn load(path: &Path, must_exist: bool, trust: Trust) -> Result<Self, ConfigLoadError> {
        let (config, text) = read(path, must_exist, trust)?;
        Ok(Self::new(path, must_exist, trust, None, (config, text, None)))
    }

    /// Reads the config when systemd starts gpushd. If the file has errors, uses `copy`, the copy of the last valid
    /// file. If there is no copy and `has_history` is set, a gpushd has run before: gpushd then does not start, because
    /// it does not know the rules.
    ///
    /// # Errors
    /// If the file cannot be used, and neither can the copy.
    pub(crate) fn load_as_service(
        path: &Path,
        must_exist: bool,
        trust: Trust,
        copy: &Path,
        has_history: bool,
    ) -> Result<Self, ConfigLoadError> {
        let loaded = match read(path, must_exist, trust) {
            Ok((config, text)) => (config, text, None),
            Err(error @ ConfigLoadError::Wrong(_)) => {
                let text = std::fs::read(copy).ok();
                let last = text.as_ref().map(|text| Config::from_bytes(text, &copy.display().to_string()));
                let trouble = error.to_api();
                match last {
                    Some(Ok(config)) => (config, text, Some(trouble.outcome("gpushd uses the last valid config"))),
                    None if !has_history => (Config::default(), None, Some(trouble.outcome("gpushd manages no GPU"))),
                    None | Some(Err(_)) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        Ok(Self::new(path, must_exist, trust, Some(copy.to_owned()), loaded))
    }

    fn new(
        path: &Path,
        must_exist: bool,
        trust: Trust,
        copy: Option<PathBuf>,
        (config, text, trouble): (Config, Option<Vec<u8>>, Option<ApiError>),
    ) -> Self {
        let state = CurrentSettings { config: Arc::new(config), text, trouble, pending: Vec::new() };
        Self(Arc::new(Inner { path: path.to_owned(), must_exist, trust, copy, state: RwLock::new(state) }))
    }

    /// Writes the copy of the active file. If the file had errors at the very first start, writes an empty copy, so
    /// that the next start succeeds.
    pub(crate) fn keep_copy(&self) {
        let Some(copy) = &self.0.copy else { return };
        let state = self.0.state.read().unwrap_or_else(PoisonError::into_inner);
        let text = state.text.clone().unwrap_or_default();
        drop(state);
        if std::fs::read(copy).is_ok_and(|kept| kept == text) {
            return;
        }
        let new = copy.with_extension("new");
        if let Err(error) = std::fs::write(&new, &text).and_then(|()| std::fs::rename(&new, copy)) {
            tracing::warn!("cannot write {}: {error}", copy.display());
        }
    }

    /// Reads the file again, without applying it.
    ///
    /// # Errors
    /// If the file is invalid or unreadable.
    pub(crate) fn candidate(&self) -> Result<Candidate, ApiError> {
        let (in_file, text) =
            read(&self.0.path, self.0.must_exist, self.0.trust).map_err(|trouble| trouble.to_api())?;
        let in_force = self.config();
        let mut config = Config { driver: in_force.driver.clone(), ..in_file.clone() };
        config.api.admin_socket.clone_from(&in_force.api.admin_socket);
        Ok(Candidate { config, in_file, text })
    }

    /// Applies a candidate.
    pub(crate) fn activate(&self, candidate: Candidate) {
        let Candidate { config, in_file, text } = candidate;
        let pending = config.pending_restart(&in_file);
        let mut state = self.0.state.write().unwrap_or_else(PoisonError::into_inner);
        *state = CurrentSettings { config: Arc::new(config), text, trouble: None, pending };
        drop(state);
        self.keep_copy();
    }

    /// Stores why a reload was refused, so that health reports it. Returns the error.
    pub(crate) fn refuse(&self, mut error: ApiError) -> ApiError {
        error = error.outcome("the previous config stays in effect");
        let mut state = self.0.state.write().unwrap_or_else(PoisonError::into_inner);
        state.trouble = Some(error.clone());
        error
    }

    /// Returns the path of the config file. The file may not exist.
    pub(crate) fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the active config.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.state.read().unwrap_or_else(PoisonError::into_inner).config)
    }

    /// Returns the path of the file; `None` if there is no file and the defaults apply.
    pub(crate) fn file(&self) -> Option<String> {
        let state = self.0.state.read().unwrap_or_else(PoisonError::into_inner);
        state.text.is_some().then(|| self.0.path.display().to_string())
    }

    /// Returns the changes in the file that need a restart.
    pub(crate) fn pending_restart(&self) -> Vec<PendingRestart> {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner).pending.clone()
    }

    /// Returns the error of the last start or reload; `None` if the file was loaded.
    pub(crate) fn trouble(&self) -> Option<ApiError> {
        self.0.state.read().unwrap_or_else(PoisonError::into_inner).trouble.clone()
    }
}

fn read(path: &Path, must_exist: bool, trust: Trust) -> Result<(Config, Option<Vec<u8>>), ConfigLoadError> {
    use std::os::unix::fs::OpenOptionsExt;

    use io::Read;
    let unreadable = |source| ConfigLoadError::Unreadable { path: path.to_owned(), source };
    // With this flag, opening a pipe without a writer does not block.
    let opened = std::fs::File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if must_exist {
                return Err(ConfigLoadError::Absent { path: path.to_owned() });
            }
            return Ok((Config::default(), None));
        }
        Err(error) => return Err(unreadable(error)),
    };
    if trust == Trust::Required {
        let own = nix::unistd::geteuid().as_raw();
        trust::check_file(path, own).map_err(|why| ConfigLoadError::Untrusted { path: path.to_owned(), why })?;
    }
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(unreadable(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let mut bytes = Vec::new();
    // Read one byte more than permitted, so that the parser reports a file that is too large.
    file.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let config = Config::from_bytes(&bytes, &path.display().to_string()).map_err(ConfigLoadError::Wrong)?;
    Ok((config, Some(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_config_is_an_error_only_if_named() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        let settings = Settings::load(&path, false, Trust::Required).unwrap();
        assert_eq!(*settings.config(), Config::default());
        assert_eq!(settings.file(), None);
        let error = Settings::load(&path, true, Trust::Logged).unwrap_err();
        assert!(error.to_string().contains("copy config.example.toml there"), "{error}");
        assert!(error.to_api().message.contains("there is no config file"), "{error}");
    }

    #[test]
    fn pipe_and_directory_are_refused_as_config_at_once() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for path in [path.as_path(), scratch.path()] {
            let error = Settings::load(path, true, Trust::Logged).unwrap_err();
            assert_eq!(error.to_api().causes, ["it is not a regular file"], "{error}");
        }
    }

    #[test]
    fn system_service_refuses_a_config_that_others_can_write() {
        use std::os::unix::fs::PermissionsExt;
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        std::fs::write(&path, "auto_reconcile = true\n").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o777);
        let error = Settings::load(&path, true, Trust::Required).unwrap_err();
        assert!(error.to_string().contains("is not trusted") && error.to_string().contains("`chmod go-w "), "{error}");
        assert!(Settings::load(&path, true, Trust::Logged).unwrap().config().auto_reconcile);
        mode(0o644);
        let settings = Settings::load(&path, true, Trust::Required).unwrap();
        // A reload refuses such permissions too.
        mode(0o666);
        let error = settings.candidate().unwrap_err();
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`chmod go-w ")), "{error:?}");
    }

    #[test]
    fn service_with_invalid_config_uses_the_last_valid_one() {
        let scratch = tempfile::tempdir().unwrap();
        let [path, copy] = ["config.toml", "copy"].map(|name| scratch.path().join(name));
        let load = |has_history| Settings::load_as_service(&path, true, Trust::Logged, &copy, has_history);
        std::fs::write(&path, "auto_reconcile = 7\n").unwrap();
        let first = load(false).unwrap();
        assert_eq!(*first.config(), Config::default());
        let trouble = first.trouble().unwrap();
        assert!(trouble.causes[0].starts_with("line 1, column 18: "), "{trouble:?}");
        assert!(load(true).is_err(), "the rules of an earlier gpushd are not known");
        first.keep_copy();
        assert_eq!(*load(true).unwrap().config(), Config::default(), "the second start of the same host");

        std::fs::write(&path, "auto_reconcile = true\n").unwrap();
        load(true).unwrap().keep_copy();
        std::fs::write(&path, "auto_reconcile = 7\n").unwrap();
        let settings = load(true).unwrap();
        assert!(settings.config().auto_reconcile && settings.trouble().is_some());
        // A successful reload also replaces the copy.
        std::fs::write(&path, "auto_reconcile = false\n").unwrap();
        settings.activate(settings.candidate().unwrap());
        assert_eq!(settings.trouble(), None);
        std::fs::write(&path, "\u{0}").unwrap();
        assert!(!load(true).unwrap().config().auto_reconcile);
    }

    #[test]
    fn invalid_config_changes_nothing_and_is_reported_until_fixed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        std::fs::write(&path, "auto_reconcile = true\n").unwrap();
        let settings = Settings::load(&path, true, Trust::Logged).unwrap();
        assert!(settings.config().auto_reconcile);
        std::fs::write(&path, b"auto_reconcile = false\n\xff").unwrap();
        let error = settings.refuse(settings.candidate().unwrap_err());
        assert_eq!(error.code, Code::ConfigInvalid);
        assert!(settings.config().auto_reconcile);
        assert_eq!(settings.trouble(), Some(error));
        std::fs::write(&path, "auto_reconcile = false\n").unwrap();
        let candidate = settings.candidate().unwrap();
        assert!(settings.config().auto_reconcile, "read, and not in force yet");
        settings.activate(candidate);
        assert!(!settings.config().auto_reconcile);
        assert_eq!(settings.trouble(), None);
    }
}
